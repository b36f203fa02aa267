"""The command line: ``python -m kvbench [+experiment=NAME] [key=value ...]``."""

import os
import sys
import traceback
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from kvbench import device_file
from kvbench.errors import ConfigError, explain
from kvbench.help import help_text
from kvbench.sweep import Sweep
from kvbench.tasks import TASKS

CONFIG_DIR = Path(__file__).resolve().parent.parent / "conf"

_BAD_INPUT = (ConfigError, HydraException, OmegaConfBaseException)


def main() -> None:
    """Entry point. Exit codes: 0 done, 1 a run failed, 2 bad input, 130 interrupted."""
    if {"--help", "-h"} & set(sys.argv[1:]):
        print(help_text(CONFIG_DIR))
        return
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # let errors reach us instead of exiting with 1
    code = 0
    try:
        sys.argv[1:] = [part for argument in sys.argv[1:] for part in _expand(argument)]
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
    """``model=PATH_OR_HUB_ID`` is short for ``model=hf model.path=...``, and ``device=PATH.yaml`` for what it holds.

    Every run is a multirun already.
    """
    if argument in ("-m", "--multirun"):
        return []
    key, _, value = argument.partition("=")
    if key == "device" and value.endswith(".yaml"):
        return device_file.overrides(Path(value))
    if key == "model" and ("/" in value or Path(value).is_dir()):
        return ["model=hf", f"model.path={value}"]
    return [argument]


@hydra.main(version_base="1.3", config_path=str(CONFIG_DIR), config_name="config")
def run_job(cfg: DictConfig) -> None:
    """One job of a sweep; Hydra calls it once per combination of overrides."""
    TASKS[cfg.task].run(cfg, Path(HydraConfig.get().runtime.output_dir))
