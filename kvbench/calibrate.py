"""The task ``calibrate``: time this machine for less than a minute and write its device profile."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pandas as pd
import psutil
import torch
from omegaconf import DictConfig
from tqdm import tqdm

from kvbench import config, device_file, job, microbenchmark, models, profile_fit, results
from kvbench.config import Config, DeviceConfig
from kvbench.device_profile import DeviceProfile
from kvbench.errors import ConfigError
from kvbench.executors.torch_executor import TorchExecutor
from kvbench.geometry import shape_of
from kvbench.job import Job
from kvbench.profile_fit import COPIES, MOVES, STEPS
from kvbench.recorder import SECONDS
from kvbench.run import Jobs
from kvbench.torch_backend import choose_device
from kvbench.workload import Workload


def validate(cfg: Config) -> None:
    if cfg.executor.name != "torch":
        raise ConfigError("executor: task=calibrate times the executor torch")
    if cfg.calibration.file is not None and not cfg.calibration.file.endswith(".yaml"):
        raise ConfigError(f"calibration.file: {cfg.calibration.file} must end in .yaml")
    if not cfg.calibration.budget_s > 0:
        raise ConfigError(f"calibration.budget_s: {cfg.calibration.budget_s} is not a number of seconds > 0")
    job.validate(cfg)


def profile_file(cfg: Config) -> Path:
    """Where the profile of ``cfg``'s device, model and dtype is written to and read from."""
    if cfg.calibration.file is not None:
        return Path(cfg.calibration.file)
    kind = choose_device(cfg.device.name).type
    return Path(cfg.results_dir) / "devices" / f"{kind}_{cfg.model.name}_{cfg.dtype.value}.yaml"


def run(cfg: DictConfig, path: Path) -> None:
    """Write the profile, and the observations it rests on to ``path``."""
    typed = config.typed(cfg)
    with tqdm(unit=" steps", disable=not typed.measure.progress, desc="calibrating", dynamic_ncols=True) as bar:
        calibration = Calibration(typed, bar.update)
        environment = results.environment(choose_device(typed.device.name))
        calibration.rounds.run_for(typed.calibration.budget_s)
    profile, observations = calibration.profile()
    file = profile_file(typed)
    device = DeviceConfig(file.stem, typed.device.num_threads, profile)
    findings = [*_errors(observations), calibration.run_error(device)]
    device_file.write(file, device, [*_origin(typed, environment), *findings])
    path.mkdir(parents=True, exist_ok=True)
    observations.to_csv(path / "observations.csv", index=False)
    print("\n".join([*findings, f"profile: device={file}", f"observations: {path / 'observations.csv'}"]))


def summarize(jobs: Jobs, directory: Path) -> None:
    """Each job has said what it wrote."""


class Calibration:
    """A machine that is timed on the job that ``cfg`` describes. tick: called after every timed step.

    rounds: of the microbenchmark; run some, then ask for the profile.
    """

    def __init__(self, cfg: Config, tick: Callable[[], object] = lambda: None) -> None:
        self._cfg = cfg
        self._built = job.build(cfg)
        executor = self._built.engine.executor
        assert isinstance(executor, TorchExecutor)
        self._device = executor.device
        self._shape = shape_of(models.configuration(cfg.model), cfg.model.kv_heads)
        self._itemsize = executor.storage.kv.element_size()
        todo = microbenchmark.actions(executor, self._built.engine.allocator, cfg.scheduler.max_batched_tokens)
        missing = [
            kinds[0] for kinds in (STEPS[:1], STEPS[1:], COPIES, MOVES) if not any(c.kind in kinds for c in todo)
        ]
        if missing:
            raise ConfigError(f"pool.size, pool.host_size: too small to time a {missing[0]}; use 64MiB or more each")
        self.rounds = microbenchmark.Rounds(executor, todo, tick)

    def profile(self, quantile: float = 0.5) -> tuple[DeviceProfile, pd.DataFrame]:
        """The profile fitted to the rounds and, for what happens outside the executor, to a run of the job; call once.

        With it the observations: a row per case, with the ``quantile`` of its times and its time by the profile.
        """
        observations = self.rounds.table(quantile)
        memory_bytes, host_memory_bytes = _memory_bytes(self._device), psutil.virtual_memory().total
        profile = profile_fit.fit(
            observations, self._shape, self._itemsize, memory_bytes=memory_bytes, host_memory_bytes=host_memory_bytes
        )
        observations["predicted_s"] = profile_fit.predict(observations, self._shape, self._itemsize, profile)
        warm_up(self._built)
        self._end_s = self._built.engine.run(self._built.groups)
        return profile_fit.add_outside(profile, _outside(self._built.recorder.steps(self._end_s))), observations

    def run_error(self, device: DeviceConfig) -> str:
        """How far the profile is off for the run that it was completed with."""
        again = job.build(simulated(self._cfg, device), drawn=same_requests(self._built))
        predicted_s = again.engine.run(again.groups)
        off = 100 * (predicted_s / self._end_s - 1)
        count = len(self._built.groups)
        return f"a run of {count} requests: {self._end_s:.2f} s, predicted {predicted_s:.2f} s ({off:+.1f} %)"


def simulated(cfg: Config, device: DeviceConfig) -> Config:
    """The same job on ``executor=roofline`` with a profile."""
    return replace(cfg, executor=replace(cfg.executor, name="roofline"), device=device)


def warm_up(built: Job) -> None:
    """Before a run whose times are compared with a profile's: its first step should cost what a later one would."""
    engine = built.engine
    if isinstance(engine.executor, TorchExecutor):
        microbenchmark.warm_up(engine.executor, engine.allocator, engine.scheduler.config.max_batched_tokens)


def same_requests(built: Job) -> Workload:
    """What ``built`` served."""
    return Workload([group.request for group in built.groups], built.record["workload"])


def _outside(steps: pd.DataFrame) -> pd.DataFrame:
    """Of each decode step of a run: its sequences, and its seconds outside the executor."""
    decodes = steps[steps["kind"] == "decode"]
    inside = decodes[[name for name in SECONDS if name != "schedule_s"]].sum(axis=1)
    return pd.DataFrame({"num_sequences": decodes["num_sequences"], "seconds": decodes["duration_s"] - inside})


def _errors(observations: pd.DataFrame) -> Iterator[str]:
    """By kind of observation: how far the cost model is off with this profile, and how far the times spread."""
    for kind, part in observations.groupby("kind"):
        off = 100 * (part["predicted_s"] / part["seconds"] - 1).abs()
        yield (
            f"{kind}: {len(part)} cases, error median {off.median():.1f} %, largest {off.max():.1f} %; "
            f"quartile range of a case's own times {100 * part['spread'].median():.1f} %"
        )


def _origin(cfg: Config, environment: dict[str, Any]) -> Iterator[str]:
    versions = ", ".join(f"{name} {version}" for name, version in environment["versions"].items() if version)
    dirty = " with changes" if environment["dirty"] else ""
    yield f"Measured by `python -m kvbench +experiment=calibrate` on {datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC."
    yield f"{environment['device']}, {environment['num_threads']} threads; {environment['platform']}"
    yield f"load average before: {environment['load_average_1min']}, on {environment['num_cpus']} CPUs"
    yield f"model {cfg.model.name}, {cfg.dtype.value}; {versions}; commit {environment['commit']}{dirty}"


def _memory_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return psutil.virtual_memory().total
