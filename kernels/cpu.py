"""CPU implementation: attention in LLVM vector IR through numba, data movement by torch.

Decode
    Bytes: every K and V row of the batch once, ``2 * tokens * num_kv_heads * head_dim * item_bytes``.
    Operations: ``4 * tokens * num_query_heads * head_dim``, that is ``group / 2`` per byte of float32.
    Limit: the rate at which a core streams memory, while groups are small.
    Measured on one 2.5 GHz AVX-512 core of a shared machine, medians, cold KV, batch 32, context 2048,
    9/3 heads x 64, block 16, one thread. float32: 11.0 ms contiguous, 12.9 ms in shuffled blocks, where a
    plain sum of the bytes takes 9.4 ms. bfloat16: 6.2 and 7.4 ms, sum 4.7 ms. A prototype with the KV in
    the first level of cache took 3.6 and 4.2 ms. torch's SDPA on contiguous KV takes about 1.5 (float32)
    and 2 to 3 times as long (bfloat16). Without prefetches float32 takes 1.35 times as long.
    Shuffled blocks against contiguous, float32, pages of 4 KiB: 1.8 (block 1), 1.14 (4), 1.13 (8), 1.02 to
    1.17 (16), 1.03 (64), 1.01 (256); blocks in order: within 2 %. On huge pages (``kernels.memory``): 1.7 (1),
    1.10 (4), 1.05 (8), 1.01 to 1.02 (16). Fetching whole rows into the second level of cache a tile or two
    ahead, touching more or fewer of them, or splitting pairs of bfloat16 by shift and mask was no faster.

Prefill
    The same kernel, up to 16 queries per visit of a tile, so K and V come from the nearer caches: limited
    by arithmetic. Against gathering and SDPA per sequence: 5 times as fast or more for 2 to 4 tokens over
    contexts of 200 and 2000; for prompts of 160 tokens 2.9 (float32) and 1.6 times as fast (bfloat16);
    1.5 times as long for a prompt of 2048.

A kernel compiles in 1 to 3 s for each (head_dim, group, dtype, softcap or not); numba keeps it on disk.
"""

import ctypes
import math

import numpy as np
import torch
from torch import Tensor

from kernels import cpu_attention, cpu_vectors, cpu_work
from kernels.addressing import BaseSlots, BlockTables
from kernels.openmp import parallel

_KINDS = {
    torch.float32: cpu_vectors.FLOAT32,
    torch.bfloat16: cpu_vectors.BFLOAT16,
    torch.float16: cpu_vectors.FLOAT16,
}
_LOG2_E = 1 / math.log(2)


def store_kv(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> None:
    written = slots.numpy() != -1
    if not written.all():
        kept = torch.from_numpy(written)
        key, value, slots = key[kept], value[kept], slots[kept]
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
    _require(query_starts.dtype == torch.int32, "query_starts must be int32")
    starts = query_starts.numpy()
    return _attention(query, key_cache, value_cache, where, starts, lengths, scale, window, softcap, out)


def copy_slots(kv: Tensor, ranges: Tensor) -> None:
    transfer_slots(kv, kv, ranges)


def transfer_slots(source_kv: Tensor, destination_kv: Tensor, ranges: Tensor) -> None:
    for source, destination, count in ranges.tolist():
        if source < 0 or destination < 0:
            raise IndexError(f"slot range {source, destination, count} starts before the pool")
        # narrow, unlike slicing, rejects a range that ends beyond the pool
        destination_kv.narrow(2, destination, count).copy_(source_kv.narrow(2, source, count))


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
    """Decode is a prefill of one token per sequence; see ``Kernels.prefill_attention``."""
    out = torch.empty_like(query, memory_format=torch.contiguous_format) if out is None else out
    table, table_width, block_size = _address_form(where)
    _check(query, key_cache, value_cache, table, query_starts, lengths, out)
    num_slots, num_kv_heads, head_dim = key_cache.shape
    num_query_heads = query.shape[1]
    if out.numel() == 0:
        return out
    query = query.float().contiguous()
    result = out if out.dtype == torch.float32 else torch.empty_like(query)
    pieces = cpu_work.plan(query_starts, lengths.numpy(), window)
    num_partials = int(pieces[-1, cpu_work.PARTIAL] + pieces[-1, cpu_work.NUM_QUERIES])
    partial = torch.empty(num_partials * num_query_heads * head_dim)
    state = torch.empty(num_partials * num_query_heads * 2)
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
    kind, group = _KINDS[key_cache.dtype], num_query_heads // num_kv_heads
    kernel = cpu_attention.kernel(head_dim, group, kind, int(softcap > 0))
    parallel(kernel.ctypes, address, min(torch.get_num_threads(), len(pieces)))
    if arguments.invalid:
        raise IndexError("a block table or base slot names slots outside the pool")
    return out if result is out else out.copy_(result)


def _address_form(where: BlockTables | BaseSlots) -> tuple[Tensor, int, int]:
    """Table of addresses, its width, block size (0: contiguous)."""
    if isinstance(where, BlockTables):
        _require(where.block_size >= 1, "block_size must be at least 1")
        _require(where.tables.dtype == torch.int32 and where.tables.dim() == 2, "tables must be int32 [n, m]")
        return where.tables, where.tables.shape[1], where.block_size
    _require(where.bases.dtype == torch.int64 and where.bases.dim() == 1, "bases must be int64 [n]")
    return where.bases, 0, 0


def _check(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    table: Tensor,
    query_starts: np.ndarray,
    lengths: Tensor,
    out: Tensor,
) -> None:
    """The kernel follows raw addresses: everything that it relies on is checked here or in the kernel."""
    _require(key_cache.dtype in _KINDS, f"dtype {key_cache.dtype}: use float32, bfloat16 or float16")
    _require(query.dtype == value_cache.dtype == out.dtype == key_cache.dtype, "tensors differ in dtype")
    _require(key_cache.is_cpu and value_cache.is_cpu and query.is_cpu, "kernels 'cpu' need CPU tensors")
    _require(key_cache.is_contiguous() and value_cache.is_contiguous(), "caches must be contiguous")
    _require(table.is_contiguous() and out.is_contiguous(), "tables, bases and out must be contiguous")
    _require(key_cache.shape == value_cache.shape and out.shape == query.shape, "shapes differ")
    _, num_kv_heads, head_dim = key_cache.shape
    _, num_query_heads, query_dim = query.shape
    _require(query_dim == head_dim and head_dim % 8 == 0, f"head_dim {head_dim} must be a multiple of 8")
    _require(num_query_heads % num_kv_heads == 0, "num_query_heads must be a multiple of num_kv_heads")
    _require(lengths.dtype == torch.int32, "lengths must be int32")
    _require(len(table) == len(lengths) == len(query_starts) - 1, "one row per sequence")
    _require(query_starts[0] == 0 and query_starts[-1] == len(query), "query_starts must cover the query")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)
