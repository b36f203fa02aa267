"""The task ``capacity``: the largest rate at which one replica meets a service-level objective.

A replica is one tensor-parallel group of ``device.profile``. The traffic, ``workload.arrival.rate``, is spread over
replicas at random, so each sees the same process at its share of the rate; rates are tried in virtual time.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pandas as pd
from omegaconf import DictConfig

from kvbench import capacity_report, config, job
from kvbench.config import Config
from kvbench.errors import ConfigError
from kvbench.metrics import Objective
from kvbench.run import Jobs, Measured, complete, is_done, measure, record, recording


def validate(cfg: Config) -> None:
    wanted, arrival, measured = cfg.capacity, cfg.workload.arrival, cfg.measure
    if cfg.executor.name != "roofline":
        raise ConfigError("executor: task=capacity tries rates in virtual time; set executor=roofline")
    if not Objective(measured.slo_ttft_s, measured.slo_tpot_s).limits:
        raise ConfigError("measure.slo_ttft_s, measure.slo_tpot_s: task=capacity needs one of them or both, in seconds")
    if arrival.process not in ("poisson", "gamma"):
        raise ConfigError(
            f"workload.arrival.process: {arrival.process} has no rate to vary; task=capacity takes poisson or gamma"
        )
    if not 0 < wanted.attainment <= 1:
        raise ConfigError(f"capacity.attainment: {wanted.attainment} is not a share in (0, 1]")
    for name in ("lowest_rate", "tolerance", "gpu_price_per_hour"):
        value = getattr(wanted, name)
        if value is not None and not 0 < value < math.inf:
            raise ConfigError(f"capacity.{name}: {value} is not a finite number > 0")
    job.validate(cfg)


def run(cfg: DictConfig, path: Path) -> None:
    """Search, and record the run at the rate that was found; at the lowest rate where even that is too much."""
    if is_done(cfg):
        return
    typed = config.typed(cfg)
    goal, tried = typed.capacity.attainment, list[dict[str, float]]()
    kept: Measured | None = None

    def attains(rate: float) -> bool:
        nonlocal kept
        measured = measure(_at_rate(typed, rate), label=f"{rate:.3g} requests/s")
        attainment, _ = measured.summary["attainment_fraction"]
        tried.append({"rate": rate, "attainment": attainment})
        if attainment >= goal:
            _check_steady(measured.requests, rate)
        if attainment >= goal or kept is None:
            kept = measured
        return attainment >= goal

    with recording(cfg, path) as writer:
        rate = sustained_rate(attains, typed.capacity.lowest_rate, typed.capacity.tolerance)
        assert kept is not None
        if rate is not None:
            kept.summary["sustained_requests_per_s"] = (rate, "requests/s")
        record(kept, typed, writer, tried=tried)


def summarize(jobs: Jobs, directory: Path) -> None:
    capacity_report.write(complete(jobs), directory)


def sustained_rate(attains: Callable[[float], bool], lowest: float, tolerance: float) -> float | None:
    """The largest rate found to attain the goal, the next one tried being less than ``1 + tolerance`` times as large.

    Doubles from ``lowest`` until a rate fails, then bisects. None: ``lowest`` fails.
    """
    if not attains(lowest):
        return None
    low, high = lowest, 2 * lowest
    while attains(high):
        low, high = high, 2 * high
    while high > low * (1 + tolerance):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if attains(middle) else (low, middle)
    return low


def _at_rate(cfg: Config, rate: float) -> Config:
    arrival = replace(cfg.workload.arrival, rate=rate)
    return replace(cfg, workload=replace(cfg.workload, arrival=arrival))


def _check_steady(requests: pd.DataFrame, rate: float) -> None:
    """Raises ConfigError where the run says nothing about the rate: nobody left before everybody was there."""
    ends = requests["arrival_s"] + requests["latency_s"]
    if len(requests) > 1 and requests["arrival_s"].max() < ends.min():
        raise ConfigError(
            f"workload.num_requests: {len(requests)} are too few to tell what a replica sustains: at {rate:.3g} "
            "requests/s all arrive before the first one ends, and the objective is still met; raise it"
        )
