"""When requests arrive."""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvbench.errors import ConfigError
from kvbench.input_files import read_columns, seconds

PROCESSES = ("all_at_once", "poisson", "gamma", "trace")


@dataclass
class ArrivalConfig:
    """``workload.arrival``.

    process: all_at_once | poisson | gamma | trace.
    rate: requests/s, for poisson and gamma.
    cv: coefficient of variation of the gaps, for gamma (1: Poisson; larger: burstier).
    file: CSV with a column ``arrival_s``, for trace.
    """

    process: str = "all_at_once"
    rate: float | None = None
    cv: float = 1.0
    file: str | None = None


def arrival_times(cfg: ArrivalConfig, num_requests: int, rng: np.random.Generator) -> NDArray[np.float64]:
    """Seconds after the start, float64 ``[num_requests]``, not decreasing. Raises ConfigError."""
    if cfg.process == "all_at_once":
        return np.zeros(num_requests)
    if cfg.process == "trace":
        return _trace(cfg.file, num_requests)
    if cfg.process not in PROCESSES:
        raise ConfigError(f"workload.arrival.process: {cfg.process!r} is not one of {', '.join(PROCESSES)}")
    if cfg.rate is None or not 0 < cfg.rate < math.inf:
        raise ConfigError(f"workload.arrival.rate: {cfg.rate} is not a finite number of requests/s > 0")
    if not 0 < cfg.cv < math.inf:
        raise ConfigError(f"workload.arrival.cv: {cfg.cv} is not a finite number > 0")
    shape = 1.0 if cfg.process == "poisson" else cfg.cv**-2
    # A gamma variable of shape k and scale s has mean k*s and coefficient of variation k**-0.5.
    return np.cumsum(rng.gamma(shape, 1.0 / (shape * cfg.rate), num_requests))


def _trace(file: str | None, num_requests: int) -> NDArray[np.float64]:
    setting = "workload.arrival.file"
    if file is None:
        raise ConfigError(f"{setting}: give a CSV with a column arrival_s for workload.arrival.process=trace")
    times = np.array(read_columns(file, {"arrival_s": seconds}, setting)["arrival_s"])
    if len(times) < num_requests:
        raise ConfigError(
            f"{setting}: {file} has {len(times)} arrivals for {num_requests} requests; lower workload.num_requests"
        )
    return np.sort(times)[:num_requests]
