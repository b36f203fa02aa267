"""One attention problem over KV that is not in any cache."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels import BaseSlots, BlockTables
from kernels.memory import advise_huge_pages
from kvbench.attention_kernel.settings import GridConfig, Setting
from kvbench.models import DTYPES


class ColdKV:
    """A buffer of random KV, handed out region by region so that no call finds its own in a cache."""

    def __init__(self, num_bytes: int, dtype: torch.dtype, device: torch.device) -> None:
        size = num_bytes // dtype.itemsize
        self._buffer = advise_huge_pages(torch.empty(size, dtype=dtype, device=device)).normal_()
        self._next = 0

    def take(self, num_slots: int, num_kv_heads: int, head_dim: int) -> Tensor:
        """The next region: a layer's K and V, ``[2, num_slots, num_kv_heads, head_dim]``."""
        size = 2 * num_slots * num_kv_heads * head_dim
        if self._next + size > self._buffer.numel():
            self._next = 0
        region = self._buffer[self._next : self._next + size]
        self._next += size
        return region.view(2, num_slots, num_kv_heads, head_dim)


@dataclass(frozen=True)
class Problem:
    """Sequences of ``context`` tokens, one new token each, the last one included.

    query, out: ``[batch, num_query_heads, head_dim]``. lengths: int32 ``[batch]``.
    """

    batch: int
    context: int
    num_kv_heads: int
    query: Tensor
    out: Tensor
    lengths: Tensor

    @classmethod
    def of(cls, setting: Setting, grid: GridConfig, device: torch.device) -> "Problem":
        shape = (setting.batch, grid.num_query_heads, grid.head_dim)
        query = torch.randn(shape, device=device).to(DTYPES[setting.dtype])
        lengths = torch.full((setting.batch,), setting.context, dtype=torch.int32, device=device)
        return cls(setting.batch, setting.context, grid.num_kv_heads, query, torch.empty_like(query), lengths)

    @property
    def head_dim(self) -> int:
        return self.query.shape[2]

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5

    @property
    def kv_bytes(self) -> int:
        """K and V of every token, once."""
        return 2 * self.batch * self.context * self.num_kv_heads * self.head_dim * self.query.dtype.itemsize

    def num_blocks(self, block_size: int) -> int:
        """Blocks of one sequence."""
        return -(-self.context // block_size)

    def block_tables(self, block_size: int) -> BlockTables:
        """Blocks of all sequences in one random order."""
        count = self.batch * self.num_blocks(block_size)
        order = torch.randperm(count, dtype=torch.int32, device=self.query.device)
        return BlockTables(order.view(self.batch, -1), block_size)

    def base_slots(self) -> BaseSlots:
        return BaseSlots(torch.arange(self.batch, device=self.query.device) * self.context)


def padded_slots(grid: GridConfig) -> int:
    """Slots of the largest problem in the block size that needs most."""
    block = max(grid.block_sizes)
    return max(grid.batches) * max(-(-context // size) * size for context in grid.contexts for size in (1, block))
