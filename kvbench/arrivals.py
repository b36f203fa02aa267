"""When requests arrive."""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvbench.errors import ConfigError
from kvbench.input_files import read_columns, seconds

FILE = "workload.arrival.file"
PROCESSES = ("all_at_once", "poisson", "gamma", "trace")


@dataclass
class ArrivalConfig:
    """``workload.arrival``.

    process: all_at_once | poisson | gamma | trace.
    rate: requests/s, for poisson and gamma.
    cv: coefficient of variation of the gaps, for gamma (1: Poisson; larger: burstier).
    file: CSV with a column ``arrival_s``, for trace; None: the arrivals of ``workload.trace``.
    """

    process: str = "all_at_once"
    rate: float | None = None
    cv: float = 1.0
    file: str | None = None


def arrival_times(
    cfg: ArrivalConfig,
    num_requests: int | None,
    rng: np.random.Generator,
    *,
    duration_s: float | None = None,
    own: NDArray[np.float64] | None = None,
) -> NDArray[np.float64]:
    """Seconds after the start, float64 ``[n]``, not decreasing: the first ``num_requests`` of those before
    ``duration_s``; None: no such limit.

    own: arrivals of the workload's trace. A longer run begins with the arrivals of a shorter one, and the
    gaps of two rates differ by their ratio only. Raises ConfigError.
    """
    if cfg.process not in PROCESSES:
        raise ConfigError(f"workload.arrival.process: {cfg.process!r} is not one of {', '.join(PROCESSES)}")
    if cfg.process == "trace":
        times = own if cfg.file is None and own is not None else _file(cfg.file)
        if duration_s is None and num_requests is not None and len(times) < num_requests:
            raise ConfigError(
                f"{FILE}: {cfg.file or 'the trace'} has {len(times)} arrivals for {num_requests} requests; "
                "lower workload.num_requests"
            )
    elif cfg.process == "all_at_once":
        times = np.zeros(_required(num_requests, "with workload.arrival.process=all_at_once"))
    else:
        times = _renewal(cfg, num_requests, duration_s, rng)
    if duration_s is not None:
        times = times[: np.searchsorted(times, duration_s)]
        if not len(times):
            raise ConfigError(f"workload.duration_s: no request arrives within {duration_s} s; raise it or the rate")
    return times[:num_requests]


def _renewal(
    cfg: ArrivalConfig, num_requests: int | None, duration_s: float | None, rng: np.random.Generator
) -> NDArray[np.float64]:
    """Arrivals with independent gaps: ``num_requests``; without that, as many as reach ``duration_s``."""
    if cfg.rate is None or not 0 < cfg.rate < math.inf:
        raise ConfigError(f"workload.arrival.rate: {cfg.rate} is not a finite number of requests/s > 0")
    if not 0 < cfg.cv < math.inf:
        raise ConfigError(f"workload.arrival.cv: {cfg.cv} is not a finite number > 0")
    # A standard gamma variable of shape k has mean k and coefficient of variation k**-0.5.
    shape = 1.0 if cfg.process == "poisson" else cfg.cv**-2
    if num_requests is not None or duration_s is None:
        size = _required(num_requests, "or workload.duration_s")
        return np.cumsum(rng.standard_gamma(shape, size)) / (shape * cfg.rate)
    gaps = rng.standard_gamma(shape, math.ceil(cfg.rate * duration_s) + 1)
    while (times := np.cumsum(gaps) / (shape * cfg.rate))[-1] < duration_s:
        gaps = np.concatenate([gaps, rng.standard_gamma(shape, len(gaps))])
    return times


def _required(num_requests: int | None, when: str) -> int:
    if num_requests is None:
        raise ConfigError(f"workload.num_requests: null is not legal here; give the number of requests, {when}")
    return num_requests


def _file(file: str | None) -> NDArray[np.float64]:
    if file is None:
        raise ConfigError(f"{FILE}: give a CSV with a column arrival_s for workload.arrival.process=trace")
    return np.sort(read_columns(file, {"arrival_s": seconds}, FILE)["arrival_s"])
