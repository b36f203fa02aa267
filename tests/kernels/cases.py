"""Random attention problems, laid out paged and contiguous, with everything unused poisoned."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import kernels
from kernels import BaseSlots, BlockTables


@dataclass(frozen=True)
class Shape:
    """``lengths`` tokens per sequence, of which the last ``new_tokens`` are queries."""

    lengths: tuple[int, ...]
    new_tokens: tuple[int, ...]
    group: int = 3
    num_kv_heads: int = 2
    head_dim: int = 64
    block_size: int = 16
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True)
class Problem:
    """One problem in two layouts that hold the same tokens."""

    shape: Shape
    query: Tensor
    query_starts: Tensor
    lengths: Tensor
    paged_kv: tuple[Tensor, Tensor]
    tables: BlockTables
    contiguous_kv: tuple[Tensor, Tensor]
    bases: BaseSlots

    def layout(self, name: str) -> tuple[Tensor, Tensor, BlockTables | BaseSlots]:
        if name == "paged":
            return *self.paged_kv, self.tables
        return *self.contiguous_kv, self.bases


def make(shape: Shape, seed: int = 0) -> Problem:
    generator = torch.Generator().manual_seed(seed)
    num_sequences, block_size = len(shape.lengths), shape.block_size
    max_blocks = max(1, -(-max(shape.lengths) // block_size))
    num_blocks = num_sequences * max_blocks + 2
    order = torch.randperm(num_blocks, generator=generator)[: num_sequences * max_blocks]
    tables = BlockTables(order.view(num_sequences, max_blocks).int(), block_size)
    gaps = torch.randint(0, 4, (num_sequences,), generator=generator)
    lengths = torch.tensor(shape.lengths, dtype=torch.int32)
    bases = BaseSlots((lengths.long() + gaps).cumsum(0) - lengths)

    row = (shape.num_kv_heads, shape.head_dim)
    paged = torch.full((2, num_blocks * block_size, *row), torch.nan, dtype=shape.dtype)
    contiguous = torch.full((2, int(lengths.sum() + gaps.sum()) + 3, *row), torch.nan, dtype=shape.dtype)
    for i, length in enumerate(shape.lengths):
        kv = torch.randn(2, length, *row, generator=generator).to(shape.dtype)
        paged[:, tables.slots(i, length)] = kv
        contiguous[:, bases.slots(i, length)] = kv
    starts = torch.tensor([0, *shape.new_tokens]).cumsum(0).int()
    heads = (shape.group * shape.num_kv_heads, shape.head_dim)
    query = torch.randn(int(starts[-1]), *heads, generator=generator).to(shape.dtype)
    return Problem(shape, query, starts, lengths, tuple(paged), tables, tuple(contiguous), bases)


def decode(implementation: str, problem: Problem, layout: str, **options: Any) -> Tensor:
    key_cache, value_cache, where = problem.layout(layout)
    options.setdefault("scale", problem.shape.head_dim**-0.5)
    operation = kernels.load(implementation).decode_attention
    return operation(problem.query, key_cache, value_cache, where, problem.lengths, **options)


def prefill(implementation: str, problem: Problem, layout: str, **options: Any) -> Tensor:
    key_cache, value_cache, where = problem.layout(layout)
    options.setdefault("scale", problem.shape.head_dim**-0.5)
    operation = kernels.load(implementation).prefill_attention
    arguments = (problem.query, key_cache, value_cache, where, problem.query_starts, problem.lengths)
    return operation(*arguments, **options)


def relative_error(result: Tensor, expected: Tensor) -> float:
    """Largest absolute error over largest absolute value; infinite if anything is not finite."""
    if not result.isfinite().all():
        return torch.inf
    return ((result.double() - expected.double()).abs().max() / expected.double().abs().max()).item()
