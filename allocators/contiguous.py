"""One contiguous region per row: what `static` and `buddy` share.

A row takes a region at admission, sized for the most tokens it may ever hold, and keeps it until it
is freed. So growth never fails, nothing is ever shared, and a fork copies the whole sequence.
"""

from abc import abstractmethod

import numpy as np
from numpy.typing import ArrayLike

from kvbench.allocator import (
    Allocator,
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


class ContiguousAllocator(Allocator):
    """Bookkeeping of rows over regions; subclasses say which regions there are."""

    layout = Layout.CONTIGUOUS
    supports = frozenset({Capability.RESERVES_GROWTH})

    def __init__(self, pool: Pool) -> None:
        super().__init__(pool)
        self._base = np.zeros(pool.max_rows, dtype=np.int64)
        self._lengths = np.zeros(pool.max_rows, dtype=np.int64)
        self._capacity = np.zeros(pool.max_rows, dtype=np.int64)
        self._token_states = 0
        self._held = 0

    @abstractmethod
    def _reservation(self, max_tokens: int) -> int:
        """Slots handed to a row that may reach ``max_tokens`` tokens."""

    @abstractmethod
    def _take_regions(self, capacities: IntArray) -> IntArray | None:
        """Base slots of one region per capacity, or None with nothing changed."""

    @abstractmethod
    def _return_regions(self, bases: IntArray, capacities: IntArray) -> None:
        """Regions are free again."""

    @abstractmethod
    def _region_size(self, capacity: int) -> int:
        """Slots a region of this capacity occupies, rounding included."""

    @abstractmethod
    def _free_regions(self) -> list[tuple[int, int]]:
        """Base slot and size of every free region, and of slots that can never be used."""

    def allocate(
        self, rows: ArrayLike, num_tokens: int, *, max_tokens: int, content: IntArray | None = None
    ) -> Grant | None:
        rows = self._free_rows(rows)
        self._check_prompt(rows, num_tokens, max_tokens)
        capacities = np.full(rows.size, self._reservation(max_tokens), dtype=np.int64)
        bases = self._take_regions(capacities)
        if bases is None:
            return None
        lengths = np.full(rows.size, num_tokens, dtype=np.int64)
        self._occupy(rows, bases, lengths, capacities)
        copies = _copies(np.repeat(bases[:1], rows.size - 1), bases[1:], lengths[1:])
        return Grant(copies, bases[0] + np.arange(num_tokens))

    def append(self, rows: ArrayLike, num_tokens: ArrayLike = 1) -> Grant | None:
        rows, lengths = self._live_rows(rows, self._lengths)
        self._check_distinct(rows)
        counts = self._token_counts(num_tokens, rows)
        grown = lengths + counts
        if np.any(grown > self._capacity[rows]):
            raise AllocatorMisuse(f"rows {rows[grown > self._capacity[rows]].tolist()} outgrow their reservation")
        self._lengths[rows] = grown
        self._token_states += int(grown.sum() - lengths.sum())
        return Grant(slots=consecutive(self._base[rows] + lengths, counts))

    def grow(self, rows: IntArray, num_steps: int) -> Growth | None:
        room = self._capacity[rows] - self._lengths[rows]
        num_steps = min(num_steps, *room.tolist())
        if num_steps < 1 or not rows.size:
            return None
        before = self.usage()
        self._lengths[rows] += num_steps
        self._token_states += num_steps * rows.size
        capacities = np.broadcast_to(self._capacity[rows], (num_steps, rows.size))
        return Growth(before, np.zeros(num_steps, np.int64), capacities)

    def fork(self, parents: ArrayLike, children: ArrayLike) -> Grant | None:
        parents, lengths = self._live_rows(parents, self._lengths)
        children = self._free_rows(children)
        if parents.size != children.size:
            raise AllocatorMisuse(f"{parents.size} parents for {children.size} children")
        capacities = self._capacity[parents]
        bases = self._take_regions(capacities)
        if bases is None:
            return None
        self._occupy(children, bases, lengths, capacities)
        return Grant(_copies(self._base[parents], bases, lengths))

    def free(self, rows: ArrayLike) -> None:
        rows, lengths = self._live_rows(rows, self._lengths)
        self._check_distinct(rows)
        self._return_regions(self._base[rows], self._capacity[rows])
        self._token_states -= int(lengths.sum())
        self._held -= int(self._capacity[rows].sum())
        self._base[rows] = self._lengths[rows] = self._capacity[rows] = 0

    def slots(self, rows: ArrayLike, positions: ArrayLike) -> IntArray:
        rows, lengths = self._live_rows(rows, self._lengths)
        positions = as_indices(positions)
        if positions.shape != rows.shape or np.any((positions < 0) | (positions >= lengths)):
            raise AllocatorMisuse("a position is outside the tokens its row holds")
        return self._base[rows] + positions

    def base_slots(self, rows: ArrayLike) -> IntArray:
        rows, _ = self._live_rows(rows, self._lengths)
        return self._base[rows]

    def num_tokens(self, rows: ArrayLike) -> IntArray:
        return self._lookup(self._lengths, as_indices(rows))

    def capacity(self, rows: ArrayLike) -> IntArray:
        return self._lookup(self._capacity, as_indices(rows))

    def usage(self) -> Usage:
        rounding = self._rounding()
        return Usage(
            num_slots=self.pool.num_slots,
            token_states=self._token_states,
            vacant=self._held - self._token_states,
            rounding=rounding,
            free=self.pool.num_slots - self._held - rounding,
            withheld=0,
            mapped=self._held,
            host_held=0,
        )

    def check_integrity(self) -> None:
        live = np.flatnonzero(self._lengths)
        assert self._token_states == self._lengths.sum(), "token_states differs from a recount"
        assert self._held == self._capacity.sum(), "held slots differ from a recount"
        assert np.all(self._lengths <= self._capacity), "a row outgrew its region"
        assert not np.any(self._capacity[self._lengths == 0]), "a free row keeps a reservation"
        sizes = {int(row): self._region_size(int(self._capacity[row])) for row in live}
        assert self._rounding() == sum(sizes.values()) - self._held, "rounding differs from a recount"
        regions = [(int(self._base[row]), sizes[int(row)]) for row in live] + self._free_regions()
        owners = np.zeros(self.pool.num_slots, dtype=np.int64)
        for base, size in regions:
            assert 0 <= base <= base + size <= owners.size, f"region {base}+{size} leaves the pool"
            owners[base : base + size] += 1
        wrong = np.flatnonzero(owners != 1)
        assert wrong.size == 0, f"slot {wrong[0]} has {owners[wrong[0]]} owners"

    def _rounding(self) -> int:
        """Slots that regions in use lose to the allocator's granularity."""
        return 0

    def _occupy(self, rows: IntArray, bases: IntArray, lengths: IntArray, capacities: IntArray) -> None:
        self._base[rows] = bases
        self._lengths[rows] = lengths
        self._capacity[rows] = capacities
        self._token_states += int(lengths.sum())
        self._held += int(capacities.sum())


def _copies(sources: IntArray, destinations: IntArray, lengths: IntArray) -> tuple[Copies, ...]:
    if sources.size == 0:
        return ()
    return (Copies(Tier.DEVICE, Tier.DEVICE, np.stack([sources, destinations, lengths], axis=1)),)
