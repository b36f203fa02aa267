"""Threads, how many examples a property is tried on, and the command line as a fixture."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:  # most tests need neither the command line nor what it imports
    from tests.cli import Cli

# Processes that test side by side share the cores. Read when torch is imported, which is later.
if workers := os.environ.get("PYTEST_XDIST_WORKER_COUNT"):
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // int(workers))))

# The quick suite tries few; `make test-all` asks for the other profile.
settings.register_profile("quick", max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("thorough", settings.get_profile("quick"), max_examples=100)
settings.load_profile("quick")


@pytest.fixture
def run_and_draw(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> "Cli":
    from tests.cli import Cli

    return Cli(tmp_path / "results", monkeypatch, capfd)


@pytest.fixture
def run(run_and_draw: "Cli", monkeypatch: pytest.MonkeyPatch) -> "Cli":
    """The command without its picture, which takes longer than a run of a tiny model."""
    monkeypatch.setattr("kvbench.plots.comparison", lambda runs, names, stem: stem.with_suffix(".png"))
    return run_and_draw
