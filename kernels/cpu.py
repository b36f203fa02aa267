"""CPU implementation."""

import ctypes
import math

import numpy as np
import torch
from torch import Tensor

from kernels import cpu_attention, cpu_vectors, cpu_work
from kernels.addressing import BaseSlots, BlockTables
from kernels.openmp import parallel

_LOG2_E = 1 / math.log(2)
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
    starts = np.arange(len(query) + 1, dtype=np.int32)
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
    return _attention(
        query, key_cache, value_cache, where, query_starts.numpy(), lengths, scale, window, softcap, out
    )


def _attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    where: BlockTables | BaseSlots,
    query_starts: np.ndarray,
    lengths: Tensor,
    scale: float,
    window: int,
    softcap: float,
    out: Tensor | None,
) -> Tensor:
    num_slots, num_kv_heads, head_dim = key_cache.shape
    num_query_heads = query.shape[1]
    out = torch.empty_like(query) if out is None else out
    result = out if out.dtype == torch.float32 else torch.empty_like(out, dtype=torch.float32)
    query = query.float()
    pieces = cpu_work.plan(query_starts, lengths.numpy(), window)
    num_partials = int(pieces[-1, cpu_work.PARTIAL] + pieces[-1, cpu_work.NUM_QUERIES])
    partial = torch.empty(num_partials * num_query_heads * head_dim)
    state = torch.empty(num_partials * num_query_heads * 2)
    if isinstance(where, BlockTables):
        table, table_width, block_size = where.tables, where.tables.shape[1], where.block_size
    else:
        table, table_width, block_size = where.bases, 0, 0
    arguments = cpu_work.Arguments(
        query=query.data_ptr(),
        key=key_cache.data_ptr(),
        value=value_cache.data_ptr(),
        tables=table.data_ptr(),
        output=result.data_ptr(),
        pieces=pieces.ctypes.data,
        partial=partial.data_ptr(),
        state=state.data_ptr(),
        num_pieces=len(pieces),
        table_width=table_width,
        block_size=block_size,
        num_slots=num_slots,
        num_kv_heads=num_kv_heads,
        window=window,
        scale=scale / softcap if softcap > 0 else scale * _LOG2_E,
        softcap=softcap * _LOG2_E,
    )
    address = ctypes.addressof(arguments)
    arguments.counter = address + cpu_work.Arguments.next_piece.offset
    kind = _KINDS[key_cache.dtype]
    kernel = cpu_attention.kernel(head_dim, num_query_heads // num_kv_heads, kind, int(softcap > 0))
    parallel(kernel.ctypes, address, torch.get_num_threads())
    if arguments.invalid:
        raise IndexError("a block table or base slot names slots outside the pool")
    return out if result is out else out.copy_(result)


def copy_slots(kv: Tensor, ranges: Tensor) -> None:
    transfer_slots(kv, kv, ranges)


def transfer_slots(source_kv: Tensor, destination_kv: Tensor, ranges: Tensor) -> None:
    for source, destination, count in ranges.tolist():
        destination_kv[:, :, destination : destination + count] = source_kv[:, :, source : source + count]
