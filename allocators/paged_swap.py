"""Paged allocation with a host tier that whole rows can be swapped to and from."""

import numpy as np
from numpy.typing import ArrayLike

from allocators.blocks import BlockTier
from allocators.paged import PagedAllocator
from kvbench.allocator import (
    AllocatorConfigError,
    Capability,
    Grant,
    IntArray,
    Pool,
    Tier,
    Usage,
    as_indices,
)


class PagedSwapAllocator(PagedAllocator):
    """`PagedAllocator` whose rows can be moved to ``pool.num_host_slots // block_size`` host blocks.

    Rows that move together keep sharing. A block shared with rows that stay is copied for those that
    move and kept for those that stay, in both directions.
    """

    supports = PagedAllocator.supports | {Capability.SWAP}

    def __init__(self, pool: Pool, *, block_size: int = 16, watermark: float = 0.01) -> None:
        super().__init__(pool, block_size=block_size, watermark=watermark)
        num_host_blocks = pool.num_host_slots // block_size
        if num_host_blocks == 0:
            raise AllocatorConfigError(
                f"swap needs host blocks, and pool.host_size holds {pool.num_host_slots} slots: set it to at "
                f"least one block of {block_size} slots, or use an allocator without swap"
            )
        self._host = BlockTier(num_host_blocks, block_size, pool.max_rows, pool.max_tokens)

    def free(self, rows: ArrayLike) -> None:
        rows = as_indices(rows)
        on_host = self._lookup(self._host.lengths, rows) > 0
        self._live_rows(rows[~on_host], self._device.lengths)
        self._check_distinct(rows)
        for tier, held in ((self._device, rows[~on_host]), (self._host, rows[on_host])):
            if held.size:
                tier.release(held)

    def swap_out(self, rows: ArrayLike) -> Grant | None:
        rows, _ = self._live_rows(rows, self._device.lengths)
        self._check_distinct(rows)
        if _num_distinct_blocks(self._device, rows) > self._host.num_free:
            return None
        moved = self._host.receive(rows, self._device)
        self._device.release(rows)
        return Grant(self._copies(Tier.DEVICE, Tier.HOST, *moved))

    def swap_in(self, rows: ArrayLike) -> Grant | None:
        rows, _ = self._live_rows(rows, self._host.lengths)
        self._check_distinct(rows)
        if _num_distinct_blocks(self._host, rows) > self._num_admissible_blocks():
            return None
        moved = self._device.receive(rows, self._host)
        self._host.release(rows)
        return Grant(self._copies(Tier.HOST, Tier.DEVICE, *moved))

    def num_tokens(self, rows: ArrayLike) -> IntArray:
        rows = as_indices(rows)
        return self._lookup(self._device.lengths, rows) + self._host.lengths[rows]

    def capacity(self, rows: ArrayLike) -> IntArray:
        rows = as_indices(rows)
        return super().capacity(rows) + self._host.lengths[rows]

    def usage(self) -> Usage:
        return super().usage()._replace(host_held=self._host.num_held * self.block_size)

    def check_integrity(self) -> None:
        super().check_integrity()
        self._host.audit()
        assert not np.any((self._device.lengths > 0) & (self._host.lengths > 0)), "a row is on both tiers"


def _num_distinct_blocks(tier: BlockTier, rows: IntArray) -> int:
    blocks, _ = tier.blocks_of(rows)
    return np.unique(blocks).size
