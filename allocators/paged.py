"""Paged allocation: fixed-size blocks on demand, shared by reference count, copied on write."""

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

from allocators.blocks import BlockTier
from kvbench.allocator import (
    Allocator,
    AllocatorConfigError,
    AllocatorMisuse,
    Capability,
    Copies,
    Grant,
    Growth,
    IntArray,
    Layout,
    Pool,
    Tier,
    Usage,
    as_indices,
    consecutive,
)


class PagedAllocator(Allocator):
    """Every row maps its tokens through a block table; a block holds ``block_size`` slots.

    block_size: slots per block. Slots of the pool that do not fill a block (fewer than
        ``block_size``) can never be used and count as rounding.
    watermark: fraction of the blocks, rounded up, that admissions and swap-ins leave free for running
        rows to grow into. An empty device may be filled whole, so that what fits is never starved.

    What a verb costs depends on its rows, not on the pool's size. The ordinary decode step and the
    admission are compiled (`allocators.compiled`): on a 2.5 GHz core, a decode step of 256 rows (append
    and block tables) takes less than 30 us, the admission of a 512-token prompt about 10 us
    (``tests/benchmarks/bookkeeping.py``).
    """

    layout = Layout.PAGED
    supports = frozenset({Capability.FORK_SHARES})

    def __init__(self, pool: Pool, *, block_size: int = 16, watermark: float = 0.01) -> None:
        super().__init__(pool)
        if block_size < 1:
            raise AllocatorConfigError(f"block_size must be at least 1, got {block_size}")
        if not 0 <= watermark < 1:
            raise AllocatorConfigError(f"watermark must be a fraction in [0, 1), got {watermark}")
        if pool.num_slots < block_size:
            raise AllocatorConfigError(
                f"pool.size holds {pool.num_slots} slots, less than one block: raise pool.size or lower "
                f"block_size from {block_size} to at most {pool.num_slots}"
            )
        self.block_size = block_size
        self._ones = np.ones(pool.max_rows, dtype=np.int64)
        self._device = self._tier(pool.num_slots // block_size)
        # Rounded up, but not by the noise of a product that is whole: 0.07 * 100 is 7.000000000000001.
        self._watermark = max(math.ceil(watermark * self._device.num_blocks - 1e-9), int(watermark > 0))

    def allocate(
        self, rows: ArrayLike, num_tokens: int, *, max_tokens: int, content: IntArray | None = None
    ) -> Grant | None:
        rows = self._free_rows(rows)
        self._check_prompt(rows, num_tokens, max_tokens)
        if -(-num_tokens // self.block_size) > self._num_admissible_blocks():
            return None
        return Grant((), self._device.place(rows, num_tokens))

    def append(self, rows: ArrayLike, num_tokens: ArrayLike = 1) -> Grant | None:
        rows, device = as_indices(rows), self._device
        counts = self._ones[: rows.size] if isinstance(num_tokens, int) and num_tokens == 1 else num_tokens
        if isinstance(counts, np.ndarray) and counts.shape == rows.shape:
            slots = device.append_one(rows, as_indices(counts), self.pool.max_tokens)
            if slots is not None:
                return Grant((), slots)
        rows, lengths = self._live_rows(rows, device.lengths)
        self._check_distinct(rows)
        counts = self._token_counts(num_tokens, rows)
        if np.any(lengths + counts > self.pool.max_tokens):
            raise AllocatorMisuse(f"a row would outgrow max_tokens={self.pool.max_tokens}")
        return self._append(rows, lengths, counts)

    def _append(self, rows: IntArray, lengths: IntArray, counts: IntArray) -> Grant | None:
        device = self._device
        num_new = -((device.extents[rows] - lengths - counts) // self.block_size)
        growing = num_new > 0
        copying = device.writers_to_copy(rows) if device.shares else rows[:0]
        if not device.make_room(copying.size + int(num_new[growing].sum())):
            return None
        copies = self._copies(Tier.DEVICE, Tier.DEVICE, *device.copy_tails(copying)) if copying.size else ()
        device.extend(rows[growing], num_new[growing])
        device.lengths[rows] += counts
        device.vacant -= int(counts.sum())
        return Grant(copies, device.slots_at(np.repeat(rows, counts), consecutive(lengths, counts)))

    def grow(self, rows: IntArray, num_steps: int) -> Growth | None:
        before = self.usage()
        taken, capacities = self._device.grow(rows, num_steps, self.pool.max_tokens)
        return Growth(before, taken * self.block_size, capacities) if taken.size else None

    def fork(self, parents: ArrayLike, children: ArrayLike) -> Grant | None:
        parents, _ = self._live_rows(parents, self._device.lengths)
        children = self._free_rows(children)
        if parents.size != children.size:
            raise AllocatorMisuse(f"{parents.size} parents for {children.size} children")
        self._device.share(parents, children)
        return Grant()

    def free(self, rows: ArrayLike) -> None:
        rows, _ = self._live_rows(rows, self._device.lengths)
        self._check_distinct(rows)
        self._device.release(rows)

    def slots(self, rows: ArrayLike, positions: ArrayLike) -> IntArray:
        rows, positions = as_indices(rows), as_indices(positions)
        if rows.size != positions.size:
            raise AllocatorMisuse(f"{positions.size} positions for {rows.size} rows")
        held = (positions >= 0) & (positions < self._lookup(self._device.lengths, rows))
        if not held.all():
            raise AllocatorMisuse(f"rows {rows[~held].tolist()} hold no token {positions[~held].tolist()}")
        return self._device.slots_at(rows, positions)

    def block_tables(self, rows: ArrayLike) -> NDArray[np.int32]:
        rows, lengths = self._live_rows(rows, self._device.lengths)
        longest = int(lengths[lengths.argmax()]) if rows.size else 0
        return self._device.tables[:, : -(-longest // self.block_size)][rows]

    def num_tokens(self, rows: ArrayLike) -> IntArray:
        return self._lookup(self._device.lengths, as_indices(rows))

    def capacity(self, rows: ArrayLike) -> IntArray:
        rows, device = as_indices(rows), self._device
        lengths = self._lookup(device.lengths, rows)
        return np.where(device.owns_tail[rows], device.extents[rows], lengths)

    def max_admissible_tokens(self, num_rows: int) -> int:
        if num_rows < 1:
            raise AllocatorMisuse(f"a group has at least one row, got {num_rows}")
        if num_rows > self.pool.max_rows:
            return 0
        return min(self._device.num_blocks // num_rows * self.block_size, self.pool.max_tokens)

    def usage(self) -> Usage:
        device = self._device
        held = device.num_held * self.block_size
        return Usage(
            num_slots=self.pool.num_slots,
            token_states=held - device.vacant,
            vacant=device.vacant,
            rounding=self.pool.num_slots % self.block_size,
            free=device.num_available * self.block_size,
            withheld=min(self._watermark, device.num_available) * self.block_size,
            mapped=device.mapped * self.block_size,
            host_held=0,
        )

    def check_integrity(self) -> None:
        self._device.audit()

    def _tier(self, num_blocks: int) -> BlockTier:
        """The device's blocks."""
        return BlockTier(num_blocks, self.block_size, self.pool.max_rows, self.pool.max_tokens)

    def _num_admissible_blocks(self) -> int:
        """Blocks that an admission may take."""
        device = self._device
        return device.num_available if device.mapped == 0 else device.num_available - self._watermark

    def _copies(self, source: Tier, destination: Tier, blocks: IntArray, new_blocks: IntArray) -> tuple[Copies, ...]:
        """Copies of whole blocks, as slot ranges."""
        if blocks.size == 0:
            return ()
        size = np.full(blocks.size, self.block_size, dtype=np.int64)
        ranges = np.stack([blocks * self.block_size, new_blocks * self.block_size, size], axis=1)
        return (Copies(source, destination, ranges),)
