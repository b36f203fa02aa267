"""The Triton implementation of :class:`kernels.Kernels`."""

import torch

from kernels.triton_attention import decode_attention, prefill_attention
from kernels.triton_data import copy_slots, store_kv, transfer_slots
from kernels.triton_launch import INTERPRETED

__all__ = ["copy_slots", "decode_attention", "prefill_attention", "store_kv", "transfer_slots"]

if not (torch.cuda.is_available() or INTERPRETED):
    raise ImportError("no CUDA device (TRITON_INTERPRET=1, set before the start, interprets on the CPU)")
