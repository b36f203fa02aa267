"""The task ``attention``: decode kernels timed by block size, batch and context."""

from pathlib import Path

from omegaconf import DictConfig

from kvbench import config, results
from kvbench.attention_kernel import report, settings
from kvbench.attention_kernel.experiment import Experiment, record
from kvbench.config import Config
from kvbench.console import console
from kvbench.errors import ConfigError
from kvbench.run import Jobs, complete, is_done, recording
from kvbench.torch_backend import choose_device, load_kernels


def validate(cfg: Config) -> None:
    """Raises ConfigError on settings that cannot be measured."""
    if cfg.attention is None:
        raise ConfigError("attention: task=attention needs its settings; use +experiment=attention_kernel")
    settings.validate(cfg.attention, choose_device(cfg.device.name).type)


def run(cfg: DictConfig, path: Path) -> None:
    """Time every setting of one job, unless ``resume`` finds it done."""
    if is_done(cfg):
        return
    with recording(cfg, path) as writer:
        typed = config.typed(cfg)
        assert typed.attention is not None
        device = choose_device(typed.device.name)
        name, kernels = load_kernels(typed.executor.kernels, device)
        experiment = Experiment(typed.attention, kernels, device, typed.seed)
        samples = experiment.run(typed.measure.progress)
        writer.complete({"samples": samples}, results.environment(device), record(experiment, name))


def summarize(jobs: Jobs, directory: Path) -> None:
    runs = complete(jobs)
    if runs:
        report.compare(runs, directory, console(200))
