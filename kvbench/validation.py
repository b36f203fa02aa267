"""The task ``validate``: the same requests on a real executor and in virtual time, step by step beside each other.

All requests arrive at once, so that no clock decides anything: every step of the two runs must be equal, and only
their times may differ. A shared host is now and then half as fast, for seconds and for minutes, which would count as
the model's error. So the machine is calibrated in turns with its real runs, a round of the microbenchmark before each
of them, and both have the least of their times, step by step and case by case: what others do only ever adds to them.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import hydra
import numpy as np
import pandas as pd
from omegaconf import DictConfig, OmegaConf
from rich import box
from rich.table import Table

from kvbench import calibrate, config, device_file, job, metrics, results
from kvbench.calibrate import Calibration
from kvbench.config import Config, DeviceConfig
from kvbench.console import console
from kvbench.errors import ConfigError
from kvbench.job import Job
from kvbench.metrics import Metrics
from kvbench.microbenchmark import MIN_ROUNDS
from kvbench.plan import Seconds
from kvbench.recorder import SECONDS
from kvbench.report import labels
from kvbench.run import Jobs, Measured, measure, record, recording
from kvbench.workload import Workload

TIMES = ("start_s", "duration_s", *SECONDS)
COUNTERS = ("status", "prompt_tokens", "output_tokens", "num_preemptions", "num_recomputed_tokens", "num_swapped_slots")
COMPARED = ("output_tokens_per_s", "ttft_mean_s", "ttft_p50_s", "ttft_p99_s", "normalized_latency_s")
FILE = "validation.json"


def validate(cfg: Config) -> None:
    if cfg.executor.name != "torch":
        raise ConfigError("executor: task=validate compares executor=torch, which is to be set, with roofline")
    if cfg.workload.arrival.process != "all_at_once":
        raise ConfigError("workload.arrival.process: task=validate needs all_at_once, lest the clock decide who runs")
    if not cfg.workload.ignore_eos:
        raise ConfigError("workload.ignore_eos: task=validate needs true; virtual time draws no EOS")
    if cfg.resume:
        raise ConfigError("resume: task=validate measures anew each time; set it to false")
    if cfg.calibration.repeats < 1:
        raise ConfigError(f"calibration.repeats: {cfg.calibration.repeats} is not an integer >= 1")
    if cfg.calibration.file is not None:
        device_file.read(Path(cfg.calibration.file), "calibration.file")
    job.validate(cfg)


def run(cfg: DictConfig, path: Path) -> None:
    """Records of a real run and the virtual one in ``path``/torch and ``path``/roofline, and what differs in
    ``path``/validation.json.
    """
    typed = config.typed(cfg)
    calibration = _calibration(typed) if typed.calibration.file is None else None

    def prepare(built: Job) -> None:
        if calibration:
            calibration.rounds.run()
        calibrate.warm_up(built)

    again = [measure(typed, prepare=prepare, label="torch").steps for _ in range(typed.calibration.repeats - 1)]
    real = _recorded(cfg, path / "torch", prepare=prepare)
    device = _measured(calibration, typed, path) if calibration else device_file.read(calibrate.profile_file(typed))
    virtual = _recorded(_simulated(cfg, device), path / "roofline", calibrate.same_requests(real.job))
    compared = compare(real, virtual, again)
    (path / FILE).write_text(json.dumps({"run": typed.allocator.name} | compared, indent=2) + "\n")


def summarize(jobs: Jobs, directory: Path) -> None:
    paths = [path for path, _ in jobs if (path / FILE).exists()]
    if not paths:
        return
    runs = [run for path in paths for run in results.find(path / "torch")]
    frame = pd.DataFrame([json.loads((path / FILE).read_text()) for path in paths]).assign(run=labels(runs))
    frame.to_csv(directory / "validation.csv", index=False)
    output = console(230)
    output.print(_table(frame))
    output.print(f"table: {directory / 'validation.csv'}", soft_wrap=True)


def compare(real: Measured, virtual: Measured, again: Sequence[pd.DataFrame]) -> dict[str, Any]:
    """Whether every step and every request's counters are equal, and the times of both; JSON types.

    again: steps of further real runs. They are the same, so that each step has the least of its times.
    """
    steps = [measured.steps.drop(columns=list(TIMES)) for measured in (real, virtual)]
    requests = [measured.requests[list(COUNTERS)] for measured in (real, virtual)]
    least_s = np.min([run["duration_s"] for run in (real.steps, *again)], axis=0)
    times = {"torch": retimed(real, least_s), "roofline": virtual.summary}
    compared = {f"{name}_{side}": summary[name][0] for name in COMPARED for side, summary in times.items()}
    errors = {f"{name}_error": compared[f"{name}_roofline"] / compared[f"{name}_torch"] - 1 for name in COMPARED}
    return {
        "num_steps": len(real.steps),
        "num_preemptions": real.summary["num_preemptions"][0],
        "first_different_step": first_difference(*steps),
        "requests_equal": requests[0].equals(requests[1]),
        **compared,
        **errors,
    }


def retimed(run: Measured, duration_s: Seconds) -> Metrics:
    """Metrics of a run whose requests all arrived at its start, had its steps taken ``duration_s``, ``[steps]``."""
    before = np.append(run.steps["start_s"], run.steps["start_s"].iloc[-1] + run.steps["duration_s"].iloc[-1])
    after = before[0] + np.append(0.0, np.cumsum(duration_s))
    steps = run.steps.assign(start_s=after[:-1], duration_s=duration_s)
    measured = run.requests[["ttft_s", "latency_s"]].astype(float)
    times = {name: np.interp(measured[name], before, after) for name in measured}
    slower = times["latency_s"] / measured["latency_s"]
    requests = run.requests.assign(**times, normalized_latency_s=run.requests["normalized_latency_s"] * slower)
    return metrics.summarize(steps, requests, bytes_per_slot=run.job.backend.bytes_per_slot, block_size=0)


def first_difference(a: pd.DataFrame, b: pd.DataFrame) -> int | None:
    """The first row in which two tables of the same columns differ, None where they are equal."""
    shared = min(len(a), len(b))
    differs = (a.iloc[:shared].to_numpy() != b.iloc[:shared].to_numpy()).any(axis=1)
    if differs.any():
        return int(differs.argmax())
    return None if len(a) == len(b) else shared


def _table(frame: pd.DataFrame) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1))
    table.add_column("run", no_wrap=True)
    for title in ("steps", "pre-\nempt.", "every step\nequal", "counters\nequal"):
        table.add_column(title, justify="right")
    for name in COMPARED:
        table.add_column(f"{name.removesuffix('_s')}\ntorch | roofline | error", justify="right")
    for row in frame.to_dict("records"):
        first = row["first_different_step"]
        same = "yes" if pd.isna(first) else f"until {first:.0f}"
        times = (
            f"{row[f'{name}_torch']:.3g} | {row[f'{name}_roofline']:.3g} | {100 * row[f'{name}_error']:+.1f} %"
            for name in COMPARED
        )
        counters = "yes" if row["requests_equal"] else "no"
        table.add_row(row["run"], str(row["num_steps"]), str(row["num_preemptions"]), same, counters, *times)
    return table


def _recorded(
    cfg: DictConfig, path: Path, drawn: Workload | None = None, prepare: Callable[[Job], None] = lambda built: None
) -> Measured:
    """Run ``cfg``, with ``drawn`` requests if there are any, and record it in ``path``."""
    typed = config.typed(cfg)
    with recording(cfg, path) as writer:
        measured = measure(typed, drawn, label=typed.executor.name, prepare=prepare)
        record(measured, typed, writer)
    return measured


def _simulated(cfg: DictConfig, device: DeviceConfig) -> DictConfig:
    both = OmegaConf.merge(cfg, {"executor": {"name": "roofline"}})
    both.device = OmegaConf.structured(device)
    return both  # type: ignore[return-value]


def _calibration(cfg: Config) -> Calibration:
    """The job of the experiment ``calibrate`` on the same machine, model and executor.

    The rounds that are run at once are the first, which does not count, and those that the repeats are too few for.
    """
    composed = hydra.compose("config", ["+experiment=calibrate", *_same_machine(cfg)])
    calibration = Calibration(config.typed(composed))
    for _ in range(1 + max(0, MIN_ROUNDS - cfg.calibration.repeats)):
        calibration.rounds.run()
    return calibration


def _measured(calibration: Calibration, cfg: Config, path: Path) -> DeviceConfig:
    """The profile that came of the rounds, and what it rests on in ``path``."""
    profile, observations = calibration.profile(quantile=0.0)
    path.mkdir(parents=True, exist_ok=True)
    observations.to_csv(path / "observations.csv", index=False)
    return DeviceConfig(calibrate.profile_file(cfg).stem, cfg.device.num_threads, profile)


def _same_machine(cfg: Config) -> list[str]:
    """Settings of the model and how it is executed, for the command line."""
    settings = {f"model.{field.name}": getattr(cfg.model, field.name) for field in fields(cfg.model)}
    settings |= {f"executor.{field.name}": getattr(cfg.executor, field.name) for field in fields(cfg.executor)}
    settings |= {"device.name": cfg.device.name, "device.num_threads": cfg.device.num_threads, "dtype": cfg.dtype}
    return [f"{key}={device_file.literal(value)}" for key, value in settings.items()]
