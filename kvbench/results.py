"""Run directories: written once, complete or marked otherwise, and read back."""

import hashlib
import json
import logging
import os
import platform
import shutil
import socket
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import pandas as pd
import torch
import yaml

from kvbench.errors import ConfigError

log = logging.getLogger(__name__)

SCHEMA_VERSION = 1
_VERSIONED = ("torch", "triton", "transformers", "numba", "numpy", "hydra-core")


@dataclass(frozen=True)
class Run:
    """A stored run. ``status``: ``running`` (or killed), ``complete``, ``failed`` or ``interrupted``."""

    path: Path
    record: dict[str, Any]

    @property
    def status(self) -> str:
        return self.record["status"]

    @property
    def config_hash(self) -> str:
        return self.record["config_hash"]

    def config(self) -> dict[str, Any]:
        return yaml.safe_load((self.path / "config.yaml").read_text())

    def metric(self, name: str) -> float | None:
        """The metric's value, None where the run has no such metric."""
        entry = self.record.get("metrics", {}).get(name)
        return None if entry is None else entry["value"]

    def environment(self) -> dict[str, Any]:
        return json.loads((self.path / "env.json").read_text())

    def table(self, name: str) -> pd.DataFrame:
        return pd.read_parquet(self.path / f"{name}.parquet")

    @property
    def has_samples(self) -> bool:
        """Whether its steps and requests were kept (``measure.samples``)."""
        return (self.path / "steps.parquet").exists()

    def steps(self) -> pd.DataFrame:
        return self.table("steps")

    def requests(self) -> pd.DataFrame:
        return self.table("requests")


class RunWriter:
    """Writes one run directory. ``run.json`` is replaced atomically and last: it tells what the rest is worth.

    Creating ``config.yaml`` claims the directory, so that of two processes one is refused (ConfigError).
    """

    def __init__(self, path: Path, *, config: dict[str, Any], config_yaml: str) -> None:
        self.path = path
        self._record = {
            "schema_version": SCHEMA_VERSION,
            "config_hash": config_hash(config),
            "status": "running",
        }
        path.mkdir(parents=True, exist_ok=True)
        try:
            with (path / "config.yaml").open("x") as file:
                file.write(config_yaml)
        except FileExistsError:
            raise ConfigError(f"results_dir: {path} holds a run already; results are never overwritten") from None
        self._replace(self._record)

    def complete(self, tables: Mapping[str, pd.DataFrame], env: dict[str, Any], record: dict[str, Any]) -> None:
        """tables: by name, each to be ``<name>.parquet``."""
        for name, table in tables.items():
            table.to_parquet(self.path / f"{name}.parquet", index=False)
        (self.path / "env.json").write_text(json.dumps(env, indent=2) + "\n")
        self._replace(self._record | record | {"status": "complete"})

    def fail(self, status: str, error: str) -> None:
        """status: ``failed`` or ``interrupted``. Such a run has no numbers."""
        self._replace(self._record | {"status": status, "error": error})

    def discard(self) -> None:
        """Leave nothing of a run that never began."""
        shutil.rmtree(self.path)

    def _replace(self, record: dict[str, Any]) -> None:
        temporary = self.path / "run.json.tmp"
        temporary.write_text(json.dumps(record, indent=2, allow_nan=False) + "\n")
        os.replace(temporary, self.path / "run.json")


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """``{"a": {"b": 1}}`` as ``{"a.b": 1}``."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value}
    return flat


def config_hash(config: dict[str, Any]) -> str:
    """What identifies an experiment's job: its configuration less where results go and how it is shown."""
    ignored = ("results_dir", "resume")
    kept = {key: value for key, value in config.items() if key not in ignored}
    shown = ("progress", "samples")
    kept["measure"] = {key: value for key, value in kept.get("measure", {}).items() if key not in shown}
    return hashlib.sha256(json.dumps(kept, sort_keys=True, default=str).encode()).hexdigest()[:16]


def read(path: Path) -> Run:
    """The run in directory ``path``. Raises OSError or ValueError where ``run.json`` is not a run's."""
    record = json.loads((path / "run.json").read_text())
    if not isinstance(record, dict) or not {"status", "config_hash"} <= record.keys():
        raise ValueError("not the record of a run")
    return Run(path, record)


def find(folder: Path) -> Iterator[Run]:
    """Runs in ``folder`` and below, ordered by path (numeric job names by number); damaged ones left out."""
    found = [path.parent for path in folder.rglob("run.json")]
    for path in sorted(found, key=_natural):
        try:
            yield read(path)
        except (OSError, ValueError) as error:
            log.warning("skipped %s: %s", path / "run.json", error)


def complete_run(config: dict[str, Any]) -> Run | None:
    """The newest complete run of a job's configuration."""
    wanted = config_hash(config)
    folder = Path(config["results_dir"]) / "runs" / config["experiment"]
    runs = [run for run in find(folder) if run.status == "complete" and run.config_hash == wanted]
    return runs[-1] if runs else None


def _natural(path: Path) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in path.parts]


def environment(device: torch.device) -> dict[str, Any]:
    """Where a run was made: commit, versions, device, threads, load, hashed host name."""
    return {
        **_commit(),
        "versions": {"python": platform.python_version()} | {name: _version(name) for name in _VERSIONED},
        "device": _device_name(device),
        "cuda": torch.version.cuda,
        "num_threads": torch.get_num_threads(),
        "num_cpus": os.cpu_count(),
        "load_average_1min": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "platform": platform.platform(),
        "host": hashlib.sha256(socket.gethostname().encode()).hexdigest()[:12],
    }


def _commit() -> dict[str, Any]:
    here = Path(__file__).parent

    def git(*arguments: str) -> str | None:
        done = subprocess.run(["git", "-C", str(here), *arguments], capture_output=True, text=True, check=False)
        return done.stdout.strip() if done.returncode == 0 else None

    try:
        status = git("status", "--porcelain", "--untracked-files=no")
        return {"commit": git("rev-parse", "HEAD"), "dirty": None if status is None else bool(status)}
    except FileNotFoundError:  # no git on this machine
        return {"commit": None, "dirty": None}


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
