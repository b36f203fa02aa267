"""What a job can be asked to do (``task=...``, set by the experiments)."""

from pathlib import Path
from typing import Protocol

from omegaconf import DictConfig

from kvbench import calibrate, capacity, run, validation
from kvbench.attention_kernel import task as attention
from kvbench.config import Config, Task
from kvbench.run import Jobs


class TaskModule(Protocol):
    """What the module of a task offers."""

    def validate(self, cfg: Config) -> None:
        """What can be wrong with a job's settings and be known before the sweep starts. Raises ConfigError."""

    def run(self, cfg: DictConfig, path: Path) -> None:
        """Do one job; its directory is ``path``."""

    def summarize(self, jobs: Jobs, directory: Path) -> None:
        """Say what came of a sweep's jobs, as far as they are complete, and write it to the sweep's directory."""


TASKS: dict[Task, TaskModule] = {
    Task.run: run,
    Task.calibrate: calibrate,
    Task.validate: validation,
    Task.capacity: capacity,
    Task.attention: attention,
}
