"""A sweep as a whole: checked before its first job starts, reported when it ends."""

import sys
from pathlib import Path
from typing import Any, ClassVar

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, open_dict
from omegaconf.errors import OmegaConfBaseException

from kvbench import config
from kvbench.config import Task
from kvbench.errors import ConfigError, explain
from kvbench.run import Jobs
from kvbench.tasks import TASKS


class Sweep(Callback):
    """Hydra callback. ``started`` is the process's sweep, once it passed its checks."""

    started: ClassVar["Sweep | None"] = None

    def __init__(self) -> None:
        self.directory = Path()
        self.jobs: Jobs = []  # run directory and configuration of each

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Compose and validate every job. A bad one ends the program (exit code 2) before any work."""
        try:
            self._check(config)
        except (ConfigError, HydraException, OmegaConfBaseException) as error:
            print(f"error: {explain(error)}", file=sys.stderr)
            raise SystemExit(2) from error  # Hydra turns other exceptions of callbacks into warnings
        Sweep.started = self

    on_run_start = on_multirun_start  # hydra.mode=RUN: a sweep of one

    def _check(self, base: DictConfig) -> None:
        self.directory = Path(base.hydra.sweep.dir)
        for number, composed in enumerate(_compose_all(base)):
            typed = config.typed(composed)
            TASKS[typed.task].validate(typed)
            with open_dict(composed):
                composed.hydra.job.num = number
            path = Path(composed.hydra.sweep.dir) / str(composed.hydra.sweep.subdir)
            self.jobs.append((path, config.plain(composed)))
            check_writable(Path(composed.results_dir))
        if len({plain["task"] for _, plain in self.jobs}) > 1:
            raise ConfigError("task: a sweep has one task; start a sweep for each")

    def report(self) -> None:
        """Let the sweep's task say what came of its jobs."""
        (name,) = {plain["task"] for _, plain in self.jobs}
        TASKS[Task(name)].summarize(self.jobs, self.directory)


def _compose_all(base: DictConfig) -> list[DictConfig]:
    """The configuration of every job of Hydra's basic sweeper; of the base alone for other sweepers."""
    loader = GlobalHydra.instance().config_loader()
    overrides = list(base.hydra.overrides.task)
    jobs = [overrides]
    if base.hydra.sweeper._target_.endswith("BasicSweeper"):
        params = [f"{key}={value}" for key, value in (base.hydra.sweeper.params or {}).items()]
        parsed = OverridesParser.create(config_loader=loader).parse_overrides(params + overrides)
        jobs = BasicSweeper.split_arguments(parsed, None)[0]
    return [loader.load_sweep_config(base, job_overrides) for job_overrides in jobs]


def check_writable(results_dir: Path) -> None:
    """Raises ConfigError where results could not be written."""
    probe = results_dir / ".writable"
    try:
        results_dir.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ConfigError(f"results_dir: {results_dir} is not writable ({error.strerror})") from None
