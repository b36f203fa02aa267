"""The task ``run``: a configuration measured and recorded, a sweep of them compared."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from omegaconf import DictConfig, OmegaConf
from tqdm import tqdm

from kvbench import config, job, metrics, report, results
from kvbench.errors import ConfigError
from kvbench.group import Group
from kvbench.metrics import Metrics, Objective
from kvbench.results import Run, RunWriter
from kvbench.workload import Workload

Jobs = list[tuple[Path, dict[str, Any]]]  # of a sweep: directory and configuration of each

validate = job.validate


@dataclass(frozen=True)
class Measured:
    """A job that has run: its recorder's tables, its metrics, and where it ran."""

    job: job.Job
    steps: pd.DataFrame
    requests: pd.DataFrame
    summary: Metrics
    environment: dict[str, Any]


def run(cfg: DictConfig, path: Path) -> None:
    """Run one job into the directory ``path``, unless ``resume`` finds it done."""
    if is_done(cfg):
        return
    with recording(cfg, path) as writer:
        typed = config.typed(cfg)
        record(measure(typed), typed, writer)


def summarize(jobs: Jobs, directory: Path) -> None:
    report.compare(complete(jobs), directory)


def is_done(cfg: DictConfig) -> bool:
    return cfg.resume and results.complete_run(config.plain(cfg)) is not None


def complete(jobs: Jobs) -> list[Run]:
    """A sweep's complete runs, those of earlier sweeps that ``resume`` kept included."""
    runs = []
    for path, plain in jobs:
        run = results.read(path) if (path / "run.json").exists() else None
        if run is None or run.status != "complete":
            run = results.complete_run(plain) if plain["resume"] else None
        runs.append(run)
    return [run for run in runs if run is not None]


@contextmanager
def recording(cfg: DictConfig, path: Path) -> Iterator[RunWriter]:
    """A writer of the run directory ``path``, which says what became of the run if the body raises."""
    writer = RunWriter(path, config=config.plain(cfg), config_yaml=OmegaConf.to_yaml(cfg, resolve=True))
    try:
        yield writer
    except KeyboardInterrupt:
        writer.fail("interrupted", "interrupted by the user")
        raise
    except ConfigError:
        writer.discard()
        raise
    except BaseException as error:
        writer.fail("failed", f"{type(error).__name__}: {error}")
        raise


def measure(
    cfg: config.Config,
    drawn: Workload | None = None,
    *,
    label: str = "",
    prepare: Callable[[job.Job], None] = lambda built: None,
) -> Measured:
    """Build a job and run it behind a progress bar. drawn: what to serve instead of drawing the workload.

    label: which of several runs of one job it is. prepare: called between building and running.
    """
    name = " ".join(filter(None, (cfg.allocator.name, label)))
    options: dict[str, Any] = {"disable": not cfg.measure.progress, "dynamic_ncols": True, "leave": not label}
    with _uncollected(), tqdm(unit="req", desc=name, **options) as bar:

        def show(group: Group) -> None:
            queued = built.engine.scheduler.num_queued
            bar.set_postfix(running=len(built.engine.scheduler.running), queued=queued, refresh=False)
            bar.update()

        built = job.build(cfg, show, drawn)
        bar.reset(total=len(built.groups))
        prepare(built)
        environment = results.environment(built.backend.device)
        end_s = built.engine.run(built.groups)
    steps, requests = built.recorder.steps(end_s), built.recorder.requests()
    summary = metrics.summarize(
        steps,
        requests,
        bytes_per_slot=built.backend.bytes_per_slot,
        block_size=built.engine.allocator.block_size,
        objective=Objective(cfg.measure.slo_ttft_s, cfg.measure.slo_tpot_s),
    )
    return Measured(built, steps, requests, summary, environment)


@contextmanager
def _uncollected() -> Iterator[None]:
    """Keep the garbage collector from walking over all that was made before, libraries above all: a tenth of a
    virtual run's time, and pauses of a real one.
    """
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def record(measured: Measured, cfg: config.Config, writer: RunWriter, **more: Any) -> None:
    """Complete the run directory. more: further entries of ``run.json``."""
    built, steps, requests = measured.job, measured.steps, measured.requests
    digest = metrics.tokens_digest(requests) if built.engine.executor.draws_tokens else None
    entries = {
        "window": metrics.window(steps)[1],
        "tokens_sha256": digest,
        "metrics": metrics.as_json(measured.summary),
    }
    tables = {"steps": steps, "requests": requests} if cfg.measure.samples else {}
    writer.complete(tables, measured.environment, built.record | entries | more)
