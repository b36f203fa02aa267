"""A kernel launch as a value: what runs on the GPU is what tests interpret and cross-compile."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton

# Triton decides at import whether kernels are compiled or interpreted on the CPU (TRITON_INTERPRET=1).
INTERPRETED = bool(triton.knobs.runtime.interpret)
AMD = torch.version.hip is not None


@dataclass(frozen=True)
class Launch:
    """One kernel with its grid, arguments (constants included) and compiler options."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: Mapping[str, Any]
    num_warps: int = 4
    num_stages: int = 3

    @property
    def options(self) -> dict[str, Any]:
        return {"num_warps": self.num_warps, "num_stages": self.num_stages, "enable_fp_fusion": True}

    def run(self) -> None:
        if all(self.grid):
            self.kernel[self.grid](**self.arguments, **self.options)

    def compile(self) -> Any:
        """Compile for the active driver's target without running: the compiled kernel."""
        return self.kernel.warmup(grid=self.grid, **self.arguments, **self.options)


@cache
def num_processors(device: torch.device) -> int:
    """Streaming multiprocessors of the device; the interpreter, which has none, imitates a small one."""
    if device.type != "cuda":
        return 4
    return torch.cuda.get_device_properties(device).multi_processor_count
