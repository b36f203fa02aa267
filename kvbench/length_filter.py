"""Which requests a workload of lengths keeps."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvbench.errors import ConfigError

Counts = NDArray[np.int64]
BLOCK = 2**16


@dataclass
class FilterConfig:
    """``workload.filter``: bounds in tokens, both ends included; null: no bound. total: input + output."""

    min_input: int | None = None
    min_output: int | None = None
    max_input: int | None = None
    max_total: int | None = None


def check(cfg: FilterConfig) -> None:
    """Raises ConfigError on a bound below 1."""
    for key, bound in vars(cfg).items():
        if bound is not None and bound < 1:
            raise ConfigError(f"workload.filter.{key}: {bound} is not an integer >= 1, or null")


def keeps(cfg: FilterConfig, inputs: Counts, outputs: Counts) -> NDArray[np.bool_]:
    """Whether each pair passes, bool ``[n]``. inputs, outputs: int64 ``[n]``."""
    kept = np.ones(len(inputs), dtype=bool)
    if cfg.min_input is not None:
        kept &= inputs >= cfg.min_input
    if cfg.min_output is not None:
        kept &= outputs >= cfg.min_output
    if cfg.max_input is not None:
        kept &= inputs <= cfg.max_input
    if cfg.max_total is not None:
        kept &= inputs + outputs <= cfg.max_total
    return kept


def first_kept(cfg: FilterConfig, draw: Callable[[int], tuple[Counts, Counts]], count: int) -> tuple[Counts, Counts]:
    """The first ``count`` pairs that pass, of those that ``draw(n)`` gives ``n`` at a time.

    Drawn in blocks of one size, so that asking for more pairs does not change the first ones.
    Raises ConfigError where hardly any pair passes.
    """
    kept_inputs: list[Counts] = []
    kept_outputs: list[Counts] = []
    num_kept = 0
    while num_kept < count:
        inputs, outputs = draw(BLOCK)
        kept = keeps(cfg, inputs, outputs)
        if not kept.any():
            raise ConfigError(f"workload.filter: none of {BLOCK:,} draws passes {vars(cfg)}; widen it")
        kept_inputs.append(inputs[kept])
        kept_outputs.append(outputs[kept])
        num_kept += int(kept.sum())
    return np.concatenate(kept_inputs)[:count], np.concatenate(kept_outputs)[:count]
