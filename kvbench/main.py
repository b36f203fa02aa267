"""The command line: ``python -m kvbench [+experiment=NAME] [key=value ...]``."""

import os
import sys
import traceback
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from tqdm import tqdm

from kvbench import config, job, metrics, results
from kvbench.attention_kernel.experiment import Experiment, record
from kvbench.attention_kernel.settings import AttentionConfig
from kvbench.errors import ConfigError, explain
from kvbench.group import Group
from kvbench.help import help_text
from kvbench.sweep import Sweep, complete_run

CONFIG_DIR = Path(__file__).resolve().parent.parent / "conf"

_BAD_INPUT = (ConfigError, HydraException, OmegaConfBaseException)


def main() -> None:
    """Entry point. Exit codes: 0 done, 1 a run failed, 2 bad input, 130 interrupted."""
    if {"--help", "-h"} & set(sys.argv[1:]):
        print(help_text(CONFIG_DIR))
        return
    sys.argv[1:] = [part for argument in sys.argv[1:] for part in _expand(argument)]
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # let errors reach us instead of exiting with 1
    code = 0
    try:
        run_job()
    except KeyboardInterrupt:
        print("interrupted: finished runs are kept, resume=true runs what is missing", file=sys.stderr)
        code = 130
    except Exception as error:
        if isinstance(error, _BAD_INPUT) or (Sweep.started is None and isinstance(error, ValueError)):
            print(f"error: {explain(error)}", file=sys.stderr)  # Hydra raises bare ValueErrors as it composes
            code = 2
        else:
            traceback.print_exc()
            code = 1
    if Sweep.started is not None:
        Sweep.started.report()
    sys.exit(code)


def _expand(argument: str) -> list[str]:
    """``model=PATH_OR_HUB_ID`` is short for ``model=hf model.path=...``; every run is a multirun already."""
    if argument in ("-m", "--multirun"):
        return []
    key, _, value = argument.partition("=")
    if key == "model" and ("/" in value or Path(value).is_dir()):
        return ["model=hf", f"model.path={value}"]
    return [argument]


@hydra.main(version_base="1.3", config_path=str(CONFIG_DIR), config_name="config")
def run_job(cfg: DictConfig) -> None:
    """One job of a sweep; Hydra calls it once per combination of overrides."""
    plain = config.plain(cfg)
    if cfg.resume and complete_run(plain) is not None:
        return
    path = Path(HydraConfig.get().runtime.output_dir)
    writer = results.RunWriter(path, config=plain, config_yaml=OmegaConf.to_yaml(cfg, resolve=True))
    try:
        typed = config.typed(cfg)
        if typed.attention is None:
            measure(typed, writer)
        else:
            time_attention(typed, typed.attention, writer)
    except KeyboardInterrupt:
        writer.fail("interrupted", "interrupted by the user")
        raise
    except ConfigError:
        writer.discard()
        raise
    except BaseException as error:
        writer.fail("failed", f"{type(error).__name__}: {error}")
        raise


def measure(cfg: config.Config, writer: results.RunWriter) -> None:
    """Run one job and write its records."""
    with tqdm(unit="req", disable=not cfg.measure.progress, desc=cfg.allocator.name, dynamic_ncols=True) as bar:

        def show(group: Group) -> None:
            queued = built.engine.scheduler.num_queued
            bar.set_postfix(running=len(built.engine.scheduler.running), queued=queued, refresh=False)
            bar.update()

        built = job.build(cfg, show)
        bar.reset(total=len(built.groups))
        environment = results.environment(built.device)
        end_s = built.engine.run(built.groups)
    steps, requests = built.recorder.steps(end_s), built.recorder.requests()
    tables = {"steps": steps, "requests": requests}
    writer.complete(tables, environment, built.record | scalars(built, steps, requests))


def time_attention(cfg: config.Config, attention: AttentionConfig, writer: results.RunWriter) -> None:
    """Run one job that times kernels, and write its records."""
    device = job.choose_device(cfg.device.name)
    name, kernels = job.load_kernels(cfg.executor.kernels, device)
    experiment = Experiment(attention, kernels, device, cfg.seed)
    samples = experiment.run(cfg.measure.progress)
    writer.complete({"samples": samples}, results.environment(device), record(experiment, name))


def scalars(built: job.Job, steps: Any, requests: Any) -> dict[str, Any]:
    summary = metrics.summarize(
        steps, requests, bytes_per_slot=built.bytes_per_slot, block_size=built.engine.allocator.block_size
    )
    return {
        "window": metrics.window(steps)[1],
        "tokens_sha256": metrics.tokens_digest(requests),
        "metrics": metrics.as_json(summary),
    }
