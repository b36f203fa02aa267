"""The allocators under test: every YAML in conf/allocator, found by glob."""

from collections.abc import Callable
from pathlib import Path

from hydra.utils import instantiate
from omegaconf import OmegaConf

from kvbench.allocator import Allocator, Pool

CONFIGS = sorted((Path(__file__).parents[2] / "conf" / "allocator").glob("*.yaml"))
NAMES = [config.stem for config in CONFIGS]

# Small enough that exhaustion, preemption and sharing all happen within a few steps; none is a power
# of two or a whole number of blocks or of static regions.
POOLS = [
    Pool(num_slots=331, max_rows=12, max_tokens=48, num_host_slots=130),
    Pool(num_slots=217, max_rows=9, max_tokens=71, num_host_slots=50),
    Pool(num_slots=101, max_rows=5, max_tokens=100, num_host_slots=111),
]


def maker(name: str) -> Callable[[Pool], Allocator]:
    """Builds the allocator of conf/allocator/<name>.yaml as the engine does."""
    path = next(config for config in CONFIGS if config.stem == name)
    make = instantiate(OmegaConf.load(path).make)
    return lambda pool: make(pool=pool)
