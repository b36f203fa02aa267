"""Decode and prefill attention in Triton: what is launched, and with which settings.

Let ``B`` be sequences, ``L`` tokens of each, ``H`` query heads, ``G`` KV heads, ``D`` head_dim, ``e``
bytes per element.

======== ===================================== ======================== ================================
kernel   bytes to and from memory              operations               limit
======== ===================================== ======================== ================================
decode   ``2 B L G D e`` (K and V once)        ``4 B L H D``            memory: ``H / G`` operations per
                                                                        byte in half precision
combine  ``4 B H (D + 2)`` per split, written  ``2 B H D`` per split    launch latency; ``0.8 H / G`` %
         and read                                                       of decode's bytes at 256 tokens
                                                                        per split in half precision
prefill  K and V of the context per query      ``4 H D`` per            tensor cores, CUDA cores in
         tile, mostly from L2                  visible pair             float32
======== ===================================== ======================== ================================

Settings follow from that, not from tuning:

* A K tile is 16 KiB and two tiles of K and V are in flight, 64 KiB per program: more than bandwidth
  times latency asks of a whole multiprocessor (25 KiB on an H200), and two or three programs fit one.
  Behind a block table that takes more pipeline stages, as its entries are fetched two tiles earlier.
* KV heads are decode's fastest grid axis: programs that run together read neighbouring addresses.
* Query heads of a group share one read of K and V. Tensor cores work on 16 rows; those that a small
  group leaves empty cost nothing while memory is the limit. float32 runs on CUDA cores: no padding.
* Contexts are cut into as many splits as fill the device 4 programs deep, none under 256 tokens. The
  number follows from shapes; lengths stay on the device, so nothing synchronises and CUDA graphs hold.
* Prefill takes 128 query rows per program (64 at head_dim 256), or 16 where sequences bring fewer than
  64 new tokens or the dtype is float32: what fits the registers without spilling. With a softcap, which
  needs registers and time of its own, one tile is in flight.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from kernels.addressing import BaseSlots, BlockTables
from kernels.triton_attention_kernels import LOG2_E, combine_kernel, decode_kernel, prefill_kernel
from kernels.triton_launch import AMD, Launch, num_processors

PROGRAMS_PER_PROCESSOR = 4
MAX_SPLITS = 128
MIN_SPLIT_TOKENS = 256


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
    out = _like(query) if out is None else out
    call = Attention(query, key_cache, value_cache, where, lengths, out, scale, window, softcap)
    for launch in call.decode_launches():
        launch.run()
    return out


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
    out = _like(query) if out is None else out
    call = Attention(query, key_cache, value_cache, where, lengths, out, scale, window, softcap)
    call.prefill_launch(query_starts).run()
    return out


def _like(query: Tensor) -> Tensor:
    return torch.empty_like(query, memory_format=torch.contiguous_format)


@dataclass(frozen=True)
class Attention:
    """One call, as its launches. The fields are those of :class:`kernels.Kernels`."""

    query: Tensor
    key_cache: Tensor
    value_cache: Tensor
    where: BlockTables | BaseSlots
    lengths: Tensor
    out: Tensor
    scale: float
    window: int = 0
    softcap: float = 0.0

    def __post_init__(self) -> None:
        contiguous = all(x.is_contiguous() for x in (self.key_cache, self.value_cache, self.lengths, self.out))
        if not (contiguous and self.query.stride(2) == 1):
            raise ValueError("key_cache, value_cache, lengths, out and each head of query must be contiguous")
        if isinstance(self.where, BlockTables) and self.where.tables.stride(1) != 1:
            raise ValueError("each row of the block tables must be contiguous")

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.query.shape[1] // self.key_cache.shape[1]

    def decode_launches(self) -> list[Launch]:
        """The decode kernel and, where contexts are split, the kernel that combines the splits."""
        num_sequences, num_query_heads, head_dim = self.query.shape
        num_kv_heads = self.key_cache.shape[1]
        num_splits = self._num_splits()
        shape = (num_sequences, num_query_heads, num_splits)
        partial = {
            "partial_sums": self.query.new_empty((*shape, head_dim), dtype=torch.float32),
            "partial_stats": self.query.new_empty((*shape, 2), dtype=torch.float32),
        }
        arguments = self._arguments(key_tile_bytes=16 * 1024, max_tile=128)
        rows = triton.next_power_of_2(self.group)
        decode = Launch(
            decode_kernel,
            (num_kv_heads, num_sequences, num_splits),
            {
                **arguments,
                **partial,
                "ROWS": rows if self.query.dtype == torch.float32 else max(rows, 16),
                "MIN_SPLIT_TILES": triton.cdiv(MIN_SPLIT_TOKENS, arguments["TILE"]),
                "SPLIT": num_splits > 1,
            },
            num_stages=self._num_stages(),
        )
        combine = Launch(
            combine_kernel,
            (num_query_heads, num_sequences),
            {
                **partial,
                "out": self.out,
                "num_splits": num_splits,
                "HEAD_DIM": head_dim,
                "DIMS": arguments["DIMS"],
                "SPLITS": triton.next_power_of_2(num_splits),
            },
            num_warps=8,
        )
        return [decode, combine] if num_splits > 1 else [decode]

    def prefill_launch(self, query_starts: Tensor) -> Launch:
        num_tokens, num_query_heads, head_dim = self.query.shape
        num_sequences = self.lengths.shape[0]
        half = self.query.dtype != torch.float32
        many = half and num_tokens >= 64 * num_sequences
        rows = (128 if head_dim <= 128 else 64) if many else 16
        return Launch(
            prefill_kernel,
            (num_query_heads, num_tokens // rows + num_sequences),
            {
                **self._arguments(key_tile_bytes=(16 if half else 8) * 1024, max_tile=64),
                "query_starts": query_starts,
                "num_sequences": num_sequences,
                "ROWS": rows,
            },
            num_warps=8 if many else 4,
            num_stages=self._num_prefill_stages(half),
        )

    def _num_prefill_stages(self, half: bool) -> int:
        """As many as leave registers enough: a softcap takes some, float32 products twice what half precision takes."""
        stages = self._num_stages()
        if half:
            return min(3, stages) if self.softcap > 0 else stages
        if self.softcap > 0:  # a position at a time is looked up ahead; a tile of a block or region is not
            return 1 if isinstance(self.where, BaseSlots) or self.where.block_size >= 16 else min(3, stages)
        return min(2, stages) if isinstance(self.where, BaseSlots) and self.query.shape[2] > 64 else stages

    def _num_splits(self) -> int:
        num_programs = max(1, self.query.shape[0] * self.key_cache.shape[1])
        wanted = PROGRAMS_PER_PROCESSOR * num_processors(self.query.device)
        return max(1, min(MAX_SPLITS, wanted // num_programs))

    def _num_stages(self) -> int:
        """Pipeline stages that keep two tiles of K and V in flight, behind a block table or not.

        On AMD one tile: in flight it is in registers, and 64 KiB of shared memory hold two programs then.
        """
        if AMD:
            return 3 if isinstance(self.where, BlockTables) else 2
        return 5 if isinstance(self.where, BlockTables) else 3

    def _arguments(self, key_tile_bytes: int, max_tile: int) -> dict[str, Any]:
        """What decode and prefill have in common."""
        head_dim = self.query.shape[2]
        dims = max(16, triton.next_power_of_2(head_dim))
        if head_dim <= 32:  # many tiny rows would need more registers for addresses than for data
            max_tile //= 2
        if isinstance(self.where, BlockTables):
            where, where_stride = self.where.tables, self.where.tables.stride(0)
        else:
            where, where_stride = self.where.bases, self.where.bases.stride(0)
        return {
            "out": self.out,
            "query": self.query,
            "key_cache": self.key_cache,
            "value_cache": self.value_cache,
            "where": where,
            "lengths": self.lengths,
            "score_scale": self.scale / self.softcap if self.softcap > 0 else self.scale * LOG2_E.value,
            "query_stride": self.query.stride(0),
            "query_head_stride": self.query.stride(1),
            "where_stride": where_stride,
            "NUM_KV_HEADS": self.key_cache.shape[1],
            "GROUP": self.group,
            "HEAD_DIM": head_dim,
            "DIMS": dims,
            "BLOCK_SIZE": self.where.block_size if isinstance(self.where, BlockTables) else 0,
            "TILE": min(max_tile, max(16, key_tile_bytes // (dims * self.query.element_size()))),
            "WINDOW": self.window,
            "SOFTCAP": self.softcap,
        }
