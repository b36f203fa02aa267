"""From sizes as people write them to slots."""

import re

import psutil
import torch

from kvbench.errors import ConfigError

_UNITS = {"": 1, "b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30}
_SIZE = re.compile(r"\s*([0-9]*\.?[0-9]+)\s*([a-z]*)\s*", re.IGNORECASE)


def parse_size(value: object, setting: str, available_bytes: int) -> int:
    """Bytes from ``1500000``, ``"1.5GiB"`` (KiB, MiB, GiB = 2^30) or a fraction of ``available_bytes``.

    A float strictly between 0 and 1 is a fraction; ``0`` is zero bytes. Raises ConfigError naming ``setting``.
    """
    legal = f"{setting}: {value!r} is not a size: use bytes, a number with KiB/MiB/GiB, or a fraction like 0.5"
    match = _SIZE.fullmatch(str(value))
    if match is None or match[2].lower() not in _UNITS or isinstance(value, bool):
        raise ConfigError(legal)
    number, unit = float(match[1]), match[2].lower()
    if not unit and 0 < number < 1:
        return int(number * available_bytes)
    if not unit and not number.is_integer():
        raise ConfigError(legal)
    return int(number * _UNITS[unit])


def available_bytes(device: torch.device) -> int:
    """Memory of the device that nobody uses now."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return psutil.virtual_memory().available
