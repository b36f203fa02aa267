"""CPU implementation: attention in LLVM vector IR through numba, data movement by torch.

Decode
    Bytes: every K and V row of the batch once, ``2 * tokens * num_kv_heads * head_dim * item_bytes``.
    Operations: ``4 * tokens * num_query_heads * head_dim``, that is ``group / 2`` per byte of float32.
    Limit: the rate at which a core streams memory, while groups are small.
    Measured on one 2.5 GHz AVX-512 core of a shared machine, medians, cold KV, batch 32, context 2048,
    9/3 heads x 64, block 16, one thread. float32: 12.3 ms contiguous, 13.1 ms in shuffled blocks, where a
    plain sum of the bytes takes 10.2 ms. bfloat16: 8.5 and 9.0 ms, sum 5.7 ms. A prototype with the KV in
    the first level of cache took 3.6 and 4.2 ms. torch's SDPA on contiguous KV takes 1.7 (float32) and 2.9
    times as long (bfloat16). Without prefetches float32 takes 1.35 times as long.
    Shuffled blocks against contiguous, float32: 1.77 (block 1), 1.33 (4), 1.06 (16), 1.01 (256); blocks in order:
    within 2 %. That is the memory's doing, not the addresses': reading the same tokens in the two orders and nothing
    else (``kernels.cpu_read``) differs by 1.11 at block 16, and with no prefetch did a plain read of shuffled runs of
    12 KiB come within 6 % of the fastest one in order. Pages of 4 KiB make it worse (``kernels.memory``).
    Fetching whole rows into the second level of cache a tile or two ahead, touching more or fewer of them, or
    splitting pairs of bfloat16 by shift and mask was no faster.

Prefill
    The same kernel, up to 16 queries per visit of a tile, so K and V come from the nearer caches: limited
    by arithmetic. Against gathering and SDPA per sequence: 5 times as fast or more for 2 to 4 tokens over
    contexts of 200 and 2000; for prompts of 160 tokens 2.9 (float32) and 1.6 times as fast (bfloat16);
    1.5 times as long for a prompt of 2048.

A kernel compiles in 1 to 3 s for each (head_dim, group, dtype, softcap or not); numba keeps it on disk.
"""

import numpy as np
import torch
from torch import Tensor

from kernels import cpu_attention, cpu_program, cpu_vectors, cpu_work
from kernels.addressing import BaseSlots, BlockTables

KINDS = {
    torch.float32: cpu_vectors.FLOAT32,
    torch.bfloat16: cpu_vectors.BFLOAT16,
    torch.float16: cpu_vectors.FLOAT16,
}


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
    check(key_cache, value_cache, where, query_starts, lengths)
    _check_query(query, key_cache, query_starts, out)
    num_slots, num_kv_heads, head_dim = key_cache.shape
    num_query_heads = query.shape[1]
    if out.numel() == 0:
        return out
    query = query.float().contiguous()
    result = out if out.dtype == torch.float32 else torch.empty_like(query)
    arguments = np.zeros((), cpu_work.ARGUMENTS)
    arguments["query"], arguments["output"] = query.data_ptr(), result.data_ptr()
    arguments["key"], arguments["value"] = key_cache.data_ptr(), value_cache.data_ptr()
    arguments["num_slots"], arguments["num_kv_heads"] = num_slots, num_kv_heads
    arguments["scale"] = scale / softcap if softcap > 0 else scale * cpu_work.LOG2_E
    arguments["softcap"] = softcap * cpu_work.LOG2_E
    num_pieces, memory = cpu_work.describe(arguments, where, query_starts, lengths, window, num_query_heads, head_dim)
    kind, group = KINDS[key_cache.dtype], num_query_heads // num_kv_heads
    kernel = cpu_attention.kernel(head_dim, group, kind, int(softcap > 0))
    cpu_program.run_one(kernel.address, arguments.ctypes.data, num_pieces, torch.get_num_threads())
    del memory
    if arguments["invalid"]:
        raise IndexError("a block table or base slot names slots outside the pool")
    return out if result is out else out.copy_(result)


def check(
    key_cache: Tensor, value_cache: Tensor, where: BlockTables | BaseSlots, query_starts: np.ndarray, lengths: Tensor
) -> None:
    """Raise ValueError on caches or sequences that the kernel, which follows raw addresses, cannot rely on."""
    if isinstance(where, BlockTables):
        _require(where.block_size >= 1, "block_size must be at least 1")
        _require(where.tables.dtype == torch.int32 and where.tables.dim() == 2, "tables must be int32 [n, m]")
    else:
        _require(where.bases.dtype == torch.int64 and where.bases.dim() == 1, "bases must be int64 [n]")
    table, _, _ = cpu_work.address_form(where)
    _require(table.is_contiguous(), "tables and bases must be contiguous")
    _require(key_cache.dtype in KINDS, f"dtype {key_cache.dtype}: use float32, bfloat16 or float16")
    _require(key_cache.dtype == value_cache.dtype, "tensors differ in dtype")
    _require(key_cache.is_cpu and value_cache.is_cpu, "kernels 'cpu' need CPU tensors")
    _require(key_cache.is_contiguous() and value_cache.is_contiguous(), "caches must be contiguous")
    _require(key_cache.shape == value_cache.shape, "shapes differ")
    _require(key_cache.shape[2] % 8 == 0, f"head_dim {key_cache.shape[2]} must be a multiple of 8")
    _require(lengths.dtype == torch.int32, "lengths must be int32")
    _require(len(table) == len(lengths) == len(query_starts) - 1, "one row per sequence")


def _check_query(query: Tensor, key_cache: Tensor, query_starts: np.ndarray, out: Tensor) -> None:
    _, num_kv_heads, head_dim = key_cache.shape
    _, num_query_heads, query_dim = query.shape
    _require(query.is_cpu and out.is_cpu, "kernels 'cpu' need CPU tensors")
    _require(query.dtype == out.dtype == key_cache.dtype, "tensors differ in dtype")
    _require(out.is_contiguous(), "out must be contiguous")
    _require(query_dim == head_dim, f"head_dim {query_dim} is not the caches' {head_dim}")
    _require(out.shape == query.shape, "shapes differ")
    _require(num_query_heads % num_kv_heads == 0, "num_query_heads must be a multiple of num_kv_heads")
    _require(query_starts[0] == 0 and query_starts[-1] == len(query), "query_starts must cover the query")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)
