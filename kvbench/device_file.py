"""Device profiles as files: ``device=PATH.yaml`` on the command line, written by the task ``calibrate``."""

from collections.abc import Iterable
from dataclasses import asdict
from enum import Enum
from pathlib import Path
from typing import Any

import yaml

from kvbench.config import DeviceConfig
from kvbench.device_profile import DeviceProfile
from kvbench.errors import ConfigError


def write(path: Path, device: DeviceConfig, header: Iterable[str]) -> None:
    """A file that :func:`read` takes, and that could as well stand in ``conf/device/``. header: comment lines."""
    comments = "".join(f"# {line}\n" for line in header)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(comments + yaml.safe_dump(asdict(device), sort_keys=False, default_flow_style=None))


def read(path: Path, setting: str = "device") -> DeviceConfig:
    """Raises ConfigError, naming the ``setting`` that gave ``path``, on a file that is none of a device."""
    try:
        content = yaml.safe_load(path.read_text())
        profile = DeviceProfile(**content.pop("profile"))
        profile.product_s = [[float(number) for number in point] for point in profile.product_s]
        device = DeviceConfig(**content, profile=profile)
        profile.check()
    except ConfigError as error:
        raise ConfigError(f"{setting}: {path}: {error}") from None
    except (OSError, yaml.YAMLError, AttributeError, KeyError, TypeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"{setting}: {path} is not a file with name, num_threads and profile ({reason}); see "
            "conf/device/a100_40gb.yaml"
        ) from None
    return device


def overrides(path: Path) -> list[str]:
    """The settings of ``device=PATH.yaml``, for Hydra's command line."""
    device = read(path)
    return ["device=file", *(f"device.{key}={literal(value)}" for key, value in asdict(device).items())]


def literal(value: Any) -> str:
    """``value`` in the grammar of Hydra's command line."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{literal(entry)}" for key, entry in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(literal, value)) + "]"
    if isinstance(value, Enum):
        return literal(value.value)
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, str):
        return "'" + value.replace("'", "\\'") + "'"
    return repr(value)
