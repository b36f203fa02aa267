"""Memory on the host, and what goes from it to a device."""

import ctypes
import mmap
from functools import cache
from typing import Any

import torch
from torch import Tensor

_HUGE_PAGE_BYTES = 2 * 1024 * 1024


@cache
def _madvise() -> Any:
    function = ctypes.CDLL(None, use_errno=True).madvise
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return function


def advise_huge_pages(tensor: Tensor) -> Tensor:
    """Ask the system to back a new CPU tensor, not yet written, with huge pages; the tensor.

    Blocks in random order cost more translations of addresses than tokens in a row do: with pages of
    4 KiB that is most of the difference between the two. Without effect where the system has none to give.
    """
    advice = getattr(mmap, "MADV_HUGEPAGE", None)  # Linux only
    if advice is None or not tensor.is_cpu:
        return tensor
    start = -(-tensor.data_ptr() // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
    stop = tensor.data_ptr() + tensor.nbytes
    if stop - start >= _HUGE_PAGE_BYTES:
        _madvise()(start, (stop - start) // _HUGE_PAGE_BYTES * _HUGE_PAGE_BYTES, advice)
    return tensor


def upload(host: Tensor, device: torch.device) -> Tensor:
    """Copy a small host tensor to the device without making the host wait for the stream; itself on the CPU."""
    if device.type != "cuda":
        return host
    return host.pin_memory().to(device, non_blocking=True)
