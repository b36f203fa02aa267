"""The command line in this process, and what it refuses."""

import sys
from pathlib import Path

import pytest
from hydra.core.global_hydra import GlobalHydra

from kvbench import config, job, results
from kvbench import main as cli
from kvbench.errors import explain
from kvbench.sweep import Sweep
from kvbench.tasks import TASKS
from tests.composed import composed


class Cli:
    def __init__(self, results_dir: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
        self.results_dir, self._monkeypatch, self._capfd = results_dir, monkeypatch, capfd

    def __call__(self, *arguments: str) -> tuple[int, str, str]:
        """Exit code, standard output and standard error of ``python -m kvbench``."""
        GlobalHydra.instance().clear()
        Sweep.started = None
        argv = ["kvbench", f"results_dir={self.results_dir}", *arguments]
        self._monkeypatch.setattr(sys, "argv", argv)
        with pytest.raises(SystemExit) as exit_info:
            cli.main()
        captured = self._capfd.readouterr()
        return int(exit_info.value.code or 0), captured.out, captured.err

    def runs(self) -> list[results.Run]:
        return list(results.find(self.results_dir))


def refusal(*arguments: str) -> str:
    """What the command says of a job that it refuses: the job alone, composed, validated and built."""
    try:
        cfg = config.typed(composed(*(part for argument in arguments for part in cli._expand(argument))))
        TASKS[cfg.task].validate(cfg)
        job.build(cfg)
    except cli._BAD_INPUT as error:
        return explain(error)
    pytest.fail("accepted")
