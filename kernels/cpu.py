"""CPU implementation."""

import math

import numpy as np
import torch
from torch import Tensor

from kernels import cpu_attention, cpu_vectors
from kernels.addressing import BaseSlots, BlockTables
from kernels.openmp import parallel

_KINDS = {
    torch.float32: cpu_vectors.FLOAT32,
    torch.bfloat16: cpu_vectors.BFLOAT16,
    torch.float16: cpu_vectors.FLOAT16,
}


def store_kv(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> None:
    key_cache.index_copy_(0, slots, key)
    value_cache.index_copy_(0, slots, value)


def decode_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    where: BlockTables | BaseSlots,
    lengths: Tensor,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    out: Tensor | None = None,
) -> Tensor:
    starts = torch.arange(len(query) + 1, dtype=torch.int32)
    return _attention(query, key_cache, value_cache, where, starts, lengths, scale, window, softcap, out)


def prefill_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    where: BlockTables | BaseSlots,
    query_starts: Tensor,
    lengths: Tensor,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    out: Tensor | None = None,
) -> Tensor:
    return _attention(query, key_cache, value_cache, where, query_starts, lengths, scale, window, softcap, out)


def _attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    where: BlockTables | BaseSlots,
    query_starts: Tensor,
    lengths: Tensor,
    scale: float,
    window: int,
    softcap: float,
    out: Tensor | None,
) -> Tensor:
    num_slots, num_kv_heads, head_dim = key_cache.shape
    num_query_heads = query.shape[1]
    group = num_query_heads // num_kv_heads
    factor = scale / softcap if softcap > 0 else scale / math.log(2)
    scaled = query.float() * factor
    out = torch.empty_like(query) if out is None else out
    result = out if out.dtype == torch.float32 else torch.empty_like(scaled)

    pieces = cpu_attention.plan(query_starts.numpy(), lengths.numpy(), window)
    num_partials = int(pieces[-1, cpu_attention.PARTIAL] + pieces[-1, cpu_attention.NUM_QUERIES])
    partial = torch.empty(num_partials * num_query_heads * head_dim)
    state = torch.empty(num_partials * num_query_heads * 2)
    counters = np.zeros(2, np.int64)
    paged = isinstance(where, BlockTables)
    arguments = np.zeros(2, cpu_attention.ARGUMENTS)
    arguments[:] = (
        scaled.data_ptr(),
        key_cache.data_ptr(),
        value_cache.data_ptr(),
        where.tables.data_ptr() if paged else where.bases.data_ptr(),
        result.data_ptr(),
        pieces.ctypes.data,
        partial.data_ptr(),
        state.data_ptr(),
        counters.ctypes.data,
        len(pieces),
        where.tables.shape[1] if paged else 0,
        where.block_size if paged else 0,
        num_slots,
        num_kv_heads,
        window,
        0,
        softcap / math.log(2),
    )
    arguments[1]["counter"] += 8
    attend = cpu_attention.attention(head_dim, group, _KINDS[key_cache.dtype], softcap > 0)
    address = arguments.ctypes.data
    threads = torch.get_num_threads()
    parallel(attend.ctypes, address, threads)
    parallel(cpu_attention.merge(head_dim, group).ctypes, address + arguments.itemsize, threads)
    if arguments[0]["invalid"]:
        raise IndexError("a block table or base slot names slots outside the pool")
    return out if result is out else out.copy_(result)


def copy_slots(kv: Tensor, ranges: Tensor) -> None:
    transfer_slots(kv, kv, ranges)


def transfer_slots(source_kv: Tensor, destination_kv: Tensor, ranges: Tensor) -> None:
    for source, destination, count in ranges.tolist():
        destination_kv[:, :, destination : destination + count] = source_kv[:, :, source : source + count]
