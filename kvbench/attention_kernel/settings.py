"""Schema of ``conf/attention/``: which attention problems are timed."""

import os
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from kvbench.errors import ConfigError
from kvbench.models import DTYPES
from kvbench.sizing import parse_size

_BLOCK_SIZES = range(1, 257)


@dataclass
class GridConfig:
    """The problems of one kind of device. The YAML file says what each key means."""

    dtypes: list[str] = field(default_factory=list)
    threads: list[int] = field(default_factory=list)
    num_query_heads: int = 9
    num_kv_heads: int = 3
    head_dim: int = 64
    block_sizes: list[int] = field(default_factory=list)
    batches: list[int] = field(default_factory=list)
    contexts: list[int] = field(default_factory=list)


@dataclass
class AttentionConfig:
    rounds: int = 40
    cold_size: Any = "256MiB"
    cpu: GridConfig = field(default_factory=GridConfig)
    cuda: GridConfig = field(default_factory=GridConfig)

    def grid(self, device_type: str) -> GridConfig:
        return self.cuda if device_type == "cuda" else self.cpu


@dataclass(frozen=True)
class Setting:
    """What is held equal within a round."""

    dtype: str
    threads: int
    batch: int
    context: int

    def __str__(self) -> str:
        return f"{self.dtype} threads {self.threads} batch {self.batch} context {self.context}"


def all_settings(grid: GridConfig) -> list[Setting]:
    """Every combination, thread counts next to one another."""
    axes = product(grid.dtypes, grid.batches, grid.contexts, grid.threads)
    return [Setting(dtype, threads, batch, context) for dtype, batch, context, threads in axes]


def validate(cfg: AttentionConfig, device_type: str) -> None:
    """Raises ConfigError naming the setting that cannot be used on this kind of device."""
    name, grid = f"attention.{device_type}", cfg.grid(device_type)
    if cfg.rounds < 2:
        raise ConfigError(f"attention.rounds: {cfg.rounds} is below 2, the fewest that have a median and a spread")
    parse_size(cfg.cold_size, "attention.cold_size", 2**40)
    if unknown := [dtype for dtype in grid.dtypes if dtype not in DTYPES]:
        raise ConfigError(f"{name}.dtypes: {unknown[0]!r} is not one of {', '.join(DTYPES)}")
    for key, values, legal in (
        ("threads", grid.threads, range(1, (os.cpu_count() or 1) + 1)),
        ("block_sizes", grid.block_sizes, _BLOCK_SIZES),
        ("batches", grid.batches, range(1, 2**16)),
        ("contexts", grid.contexts, range(1, 2**20)),
        ("head_dim", [grid.head_dim], range(8, 257, 8)),
        ("num_kv_heads", [grid.num_kv_heads], range(1, 2**10)),
        ("num_query_heads", [grid.num_query_heads], range(grid.num_kv_heads, 2**12, grid.num_kv_heads or 1)),
    ):
        if bad := [value for value in values if value not in legal]:
            step = f" in steps of {legal.step}" if legal.step > 1 else ""
            raise ConfigError(f"{name}.{key}: {bad[0]} is not from {legal.start} to {legal[-1]}{step}")
    for key in ("dtypes", "threads", "block_sizes", "batches", "contexts"):
        values = getattr(grid, key)
        if not values or len(set(values)) < len(values):
            raise ConfigError(f"{name}.{key}: {values} is not a list of one or more different values")
