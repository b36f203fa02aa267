"""What takes turns in a round: our kernel in both layouts, torch's attention, and the limit of the memory."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kernels import BaseSlots, BlockTables, Kernels
from kernels.cpu_read import read_kv
from kvbench.attention_kernel.problem import Problem

Attend = Callable[[Tensor, Tensor], Any]


@dataclass(frozen=True)
class Candidate:
    """``run(key_cache, value_cache)`` over a pool of ``num_slots``; block_size 0: not paged.

    where: the tokens that ``run`` attends to and returns ``[batch, num_query_heads, head_dim]`` for; None: it
    does something else.
    """

    name: str
    block_size: int
    num_slots: int
    run: Attend
    where: BlockTables | BaseSlots | None


def own(problem: Problem, kernels: Kernels, block_sizes: list[int]) -> list[Candidate]:
    """The kernel under test, paged by each block size and contiguous."""
    return [_decode(problem, kernels, where) for where in _layouts(problem, block_sizes)]


def reads(problem: Problem, block_sizes: list[int]) -> list[Candidate]:
    """On the CPU, reading the same tokens in the same order and nothing else: what that order costs by itself."""
    return [_read(problem, where) for where in _layouts(problem, block_sizes)]


def _layouts(problem: Problem, block_sizes: list[int]) -> list[BlockTables | BaseSlots]:
    return [problem.base_slots(), *map(problem.block_tables, block_sizes)]


def _decode(problem: Problem, kernels: Kernels, where: BlockTables | BaseSlots) -> Candidate:
    def decode(key_cache: Tensor, value_cache: Tensor) -> Tensor:
        return kernels.decode_attention(
            problem.query, key_cache, value_cache, where, problem.lengths, scale=problem.scale, out=problem.out
        )

    name = "paged" if isinstance(where, BlockTables) else "contiguous"
    return Candidate(name, *_extent(problem, where), decode, where)


def _read(problem: Problem, where: BlockTables | BaseSlots) -> Candidate:
    def read(key_cache: Tensor, value_cache: Tensor) -> Tensor:
        return read_kv(key_cache, value_cache, where, problem.lengths)

    return Candidate("read", *_extent(problem, where), read, where=None)


def _extent(problem: Problem, where: BlockTables | BaseSlots) -> tuple[int, int]:
    """Block size (0: not paged) and slots of the pool."""
    if isinstance(where, BlockTables):
        return where.block_size, where.tables.numel() * where.block_size
    return 0, problem.batch * problem.context


def sdpa(problem: Problem) -> Candidate:
    """torch's attention on contiguous KV, the query heads of a KV head folded into the query's length."""
    shape = (problem.batch, problem.context, problem.num_kv_heads, problem.head_dim)
    query = problem.query.view(problem.batch, problem.num_kv_heads, -1, problem.head_dim)

    def attend(key_cache: Tensor, value_cache: Tensor) -> Tensor:
        key, value = (cache.view(shape).transpose(1, 2) for cache in (key_cache, value_cache))
        return scaled_dot_product_attention(query, key, value).view(problem.query.shape)

    return Candidate("sdpa", 0, problem.batch * problem.context, attend, problem.base_slots())


def memory_limit(problem: Problem) -> Candidate:
    """The same bytes, only moved: summed on the CPU, copied on a device (which moves them twice)."""
    num_slots = problem.batch * problem.context
    if problem.query.device.type == "cuda":
        copies = torch.empty(
            2, num_slots, problem.num_kv_heads, problem.head_dim, dtype=problem.query.dtype, device=problem.query.device
        )

        def copy(key_cache: Tensor, value_cache: Tensor) -> None:
            copies[0].copy_(key_cache)
            copies[1].copy_(value_cache)

        return Candidate("copy", 0, num_slots, copy, where=None)

    def read(key_cache: Tensor, value_cache: Tensor) -> list[Tensor]:
        return [cache.view(-1).view(torch.float32).sum() for cache in (key_cache, value_cache)]

    return Candidate("stream", 0, num_slots, read, where=None)
