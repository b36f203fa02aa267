"""The task ``validate``: the same requests on a real executor and in virtual time, step by step beside each other.

All requests arrive at once, so that no clock decides anything: every step of the two runs must be equal, and only
their times may differ.
"""

import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import pandas as pd
from omegaconf import DictConfig, OmegaConf
from rich import box
from rich.table import Table

from kvbench import calibrate, config, device_file, job
from kvbench.config import Config, DeviceConfig
from kvbench.console import console
from kvbench.errors import ConfigError
from kvbench.job import Job
from kvbench.metrics import Metrics
from kvbench.recorder import SECONDS
from kvbench.run import Jobs, Measured, measure, record, recording

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
    job.validate(cfg)


def run(cfg: DictConfig, path: Path) -> None:
    """Records of a real run and the virtual one in ``path``/torch and ``path``/roofline, and what differs in
    ``path``/validation.json.
    """
    typed = config.typed(cfg)
    device = _profile(typed)
    paced = [_paced(typed, device) for _ in range(typed.calibration.repeats - 1)]
    with recording(cfg, path / "torch") as writer:
        real, pace = _paced(typed, device)
        record(real, typed, writer)
    virtual = _virtual(_simulated(cfg, device), path / "roofline", real)
    compared = compare(real, virtual, [(measured.summary, pace) for measured, pace in [(real, pace), *paced]])
    (path / FILE).write_text(json.dumps({"run": typed.allocator.name} | compared, indent=2) + "\n")


def summarize(jobs: Jobs, directory: Path) -> None:
    found = [json.loads((path / FILE).read_text()) for path, _ in jobs if (path / FILE).exists()]
    if not found:
        return
    frame = pd.DataFrame(found)
    frame.to_csv(directory / "validation.csv", index=False)
    output = console(230)
    output.print(_table(frame))
    output.print(f"table: {directory / 'validation.csv'}", soft_wrap=True)


def compare(real: Measured, virtual: Measured, repeated: Sequence[tuple[Metrics, float]]) -> dict[str, Any]:
    """Whether every step and every request's counters are equal, and the times of both; JSON types.

    repeated: metrics and pace of all real runs. Their medians count: one run of this length is 10 % off on a busy
    host. ``..._error`` compares with what was measured, ``..._error_at_pace`` with what it would have been at the
    pace of the calibration.
    """
    steps = [measured.steps.drop(columns=list(TIMES)) for measured in (real, virtual)]
    requests = [measured.requests[list(COUNTERS)] for measured in (real, virtual)]
    compared: dict[str, float] = {}
    for name in COMPARED:
        predicted = virtual.summary[name][0]
        measured = statistics.median(summary[name][0] for summary, _ in repeated)
        at_pace = statistics.median(_at_pace(name, summary[name][0], pace) for summary, pace in repeated)
        compared |= {f"{name}_torch": measured, f"{name}_roofline": predicted}
        compared |= {f"{name}_error": predicted / measured - 1, f"{name}_error_at_pace": predicted / at_pace - 1}
    return {
        "num_steps": len(real.steps),
        "num_preemptions": real.summary["num_preemptions"][0],
        "first_different_step": first_difference(*steps),
        "requests_equal": requests[0].equals(requests[1]),
        "pace": statistics.median(pace for _, pace in repeated),
        **compared,
    }


def _at_pace(name: str, measured: float, pace: float) -> float:
    """A rate, or a time, of a run whose steps took ``pace`` times what the profile says, had they taken just that."""
    return measured * pace if name.endswith("_per_s") else measured / pace


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
    table.add_column("pace", justify="right")
    for name in COMPARED:
        table.add_column(f"{name.removesuffix('_s')}\ntorch | roofline | error (at pace)", justify="right")
    for row in frame.to_dict("records"):
        first = row["first_different_step"]
        same = "yes" if pd.isna(first) else f"until {first:.0f}"
        times = (
            f"{row[f'{name}_torch']:.3g} | {row[f'{name}_roofline']:.3g} | {100 * row[f'{name}_error']:+.0f} % "
            f"({100 * row[f'{name}_error_at_pace']:+.0f} %)"
            for name in COMPARED
        )
        counters = "yes" if row["requests_equal"] else "no"
        pace = f"{row['pace']:.2f}"
        table.add_row(row["run"], str(row["num_steps"]), str(row["num_preemptions"]), same, counters, pace, *times)
    return table


def _paced(cfg: Config, device: DeviceConfig) -> tuple[Measured, float]:
    """A real run, and the machine's pace around it: the mean of before and after."""
    paces: list[float] = []

    def prepare(built: Job) -> None:
        calibrate.warm_up(built)
        paces.append(calibrate.pace(built, cfg, device))

    measured = measure(cfg, label="torch", prepare=prepare)
    paces.append(calibrate.pace(measured.job, cfg, device))
    return measured, statistics.mean(paces)


def _virtual(cfg: DictConfig, path: Path, real: Measured) -> Measured:
    """Serve the requests of ``real`` in virtual time, and record it in ``path``."""
    typed = config.typed(cfg)
    with recording(cfg, path) as writer:
        measured = measure(typed, calibrate.same_requests(real.job), label="roofline")
        record(measured, typed, writer)
    return measured


def _simulated(cfg: DictConfig, device: DeviceConfig) -> DictConfig:
    both = OmegaConf.merge(cfg, {"executor": {"name": "roofline"}})
    both.device = OmegaConf.structured(device)
    return both  # type: ignore[return-value]


def _profile(cfg: Config) -> DeviceConfig:
    """This machine's profile; calibrates in a process of its own where there is none yet."""
    file = calibrate.profile_file(cfg)
    if not file.exists():
        command = [sys.executable, "-m", "kvbench", "+experiment=calibrate", *_same_machine(cfg, file)]
        if subprocess.run(command, check=False).returncode != 0:
            raise ConfigError(f"calibration.file: {file} does not exist, and to calibrate failed")
    return device_file.read(file)


def _same_machine(cfg: Config, file: Path) -> list[str]:
    """Settings of the model and how it is executed, for the command line."""
    settings = {f"model.{field.name}": getattr(cfg.model, field.name) for field in fields(cfg.model)}
    settings |= {f"executor.{field.name}": getattr(cfg.executor, field.name) for field in fields(cfg.executor)}
    settings |= {"device.name": cfg.device.name, "device.num_threads": cfg.device.num_threads, "dtype": cfg.dtype}
    settings |= {"results_dir": cfg.results_dir, "calibration.file": str(file)}
    settings |= {"measure.progress": cfg.measure.progress, "calibration.budget_s": cfg.calibration.budget_s}
    return [f"{key}={device_file.literal(value)}" for key, value in settings.items()]
