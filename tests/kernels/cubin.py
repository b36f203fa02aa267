"""What a compiled kernel needs and does, read from its machine code with the tools Triton ships.

For NVIDIA's GPUs (``Cubin``) and AMD's (``Gcn``), which need not be there.
"""

import re
import subprocess
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from kernels.triton_launch import Launch

BINARIES = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


@dataclass(frozen=True)
class CrossDriver:
    """Stands for a device that need not exist."""

    target: GPUTarget

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return hash(self.target.arch)  # keys Triton's cache of compiled kernels

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def compiling_for(target: GPUTarget) -> Iterator[None]:
    driver.set_active(CrossDriver(target))
    try:
        yield
    finally:
        driver.set_active(None)  # found anew at the next use


@dataclass(frozen=True)
class Cubin:
    """registers: per thread; shared_bytes: per program; sass: the disassembly."""

    registers: int
    shared_bytes: int
    sass: str

    @cached_property
    def instructions(self) -> Counter[str]:
        """How often each instruction occurs, modifiers included: ``LDG.E.128``."""
        return Counter(re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)", self.sass))

    def count(self, pattern: str) -> int:
        """Instructions whose whole name matches the regular expression."""
        return sum(count for name, count in self.instructions.items() if re.fullmatch(pattern, name))

    @property
    def num_spills(self) -> int:
        return self.count(r"(LDL|STL)(\..*)?")


def compile_cubin(launch: Launch, capability: int) -> Cubin:
    """Compile exactly what the launch would run on a device of that compute capability (80: sm_80)."""
    with compiling_for(GPUTarget("cuda", capability, 32)):
        kernel = launch.compile()
    with TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(kernel.asm["cubin"])
        usage = _run("cuobjdump", "-res-usage", path)
        sass = _run("nvdisasm", "-c", path)
    registers = re.search(r"REG:(\d+)", usage)
    assert registers, usage
    return Cubin(int(registers[1]), kernel.metadata.shared, sass)


@dataclass(frozen=True)
class Gcn:
    """registers, num_spills: vector registers per lane; shared_bytes: LDS per program."""

    registers: int
    num_spills: int
    shared_bytes: int
    assembly: str

    def count(self, pattern: str) -> int:
        """Instructions whose whole name matches the regular expression."""
        names = re.findall(r"^\s+([a-z]\w+)(?=\s)", self.assembly, re.MULTILINE)
        return sum(bool(re.fullmatch(pattern, name)) for name in names)


def compile_gcn(launch: Launch, architecture: str = "gfx942") -> Gcn:
    """Compile the launch for an AMD device with wavefronts of 64."""
    with compiling_for(GPUTarget("hip", architecture, 64)):
        kernel = launch.compile()
    assembly = kernel.asm["amdgcn"]
    registers, spills = (
        int(re.findall(rf"^\s+\.{field}:\s+(\d+)", assembly, re.MULTILINE)[0])
        for field in ("vgpr_count", "vgpr_spill_count")
    )
    return Gcn(registers, spills, kernel.metadata.shared, assembly)


def _run(tool: str, *arguments: object) -> str:
    command = [str(BINARIES / tool), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
