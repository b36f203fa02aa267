"""The part of a trace that a run replays, and how fast."""

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kvbench.errors import ConfigError
from kvbench.length_filter import FilterConfig, keeps
from kvbench.traces.trace import Trace


@dataclass
class TraceConfig:
    """``workload.trace``. The YAML files say what each key means."""

    file: str | None = None
    format: str = "auto"
    window_s: list[float] | None = None
    rate_scale: float = 1.0
    max_requests: int | None = None
    on_bad_row: str = "error"
    tokenizer: str | None = None


def select(trace: Trace, cfg: TraceConfig, keep: FilterConfig) -> tuple[Trace, dict[str, Any]]:
    """Window, then filter, then the first ``max_requests``, then rate; with the number of rows filtered out.

    window_s: arrivals in [start, stop) seconds of the trace's own time; ``start`` becomes time 0.
    rate_scale: arrival times (so all gaps) are divided by it.
    Raises ConfigError where a setting is illegal or nothing is left.
    """
    _check(cfg)
    if cfg.window_s is not None:
        trace = _window(trace, *cfg.window_s)
    kept = keeps(keep, trace.input_tokens, trace.output_tokens)
    if not kept.any():
        raise ConfigError(f"workload.filter: none of the {len(trace)} rows passes {vars(keep)}; widen it")
    selected = trace.take(kept).take(slice(cfg.max_requests))
    if selected.arrival_s is not None:
        selected = replace(selected, arrival_s=selected.arrival_s / cfg.rate_scale)
    return selected, {"rows_filtered": int(len(kept) - kept.sum())}


def _window(trace: Trace, start: float, stop: float) -> Trace:
    if trace.arrival_s is None:
        raise ConfigError("workload.trace.window_s: must be null, the file states no arrival times")
    first, last = np.searchsorted(trace.arrival_s, [start, stop])
    if first == last:
        raise ConfigError(
            f"workload.trace.window_s: no request arrives in [{start}, {stop}); the trace has arrivals from "
            f"{trace.arrival_s[0]} to {trace.arrival_s[-1]} s"
        )
    part = trace.take(slice(first, last))
    assert part.arrival_s is not None
    return replace(part, arrival_s=part.arrival_s - start)


def _check(cfg: TraceConfig) -> None:
    window = cfg.window_s
    if window is not None and (len(window) != 2 or not 0 <= window[0] < window[1]):
        raise ConfigError(f"workload.trace.window_s: {window} is not [start, stop] with 0 <= start < stop, or null")
    if not 0 < cfg.rate_scale < math.inf:
        raise ConfigError(f"workload.trace.rate_scale: {cfg.rate_scale} is not a finite number > 0")
    if cfg.max_requests is not None and cfg.max_requests < 1:
        raise ConfigError(f"workload.trace.max_requests: {cfg.max_requests} is not an integer >= 1, or null")
