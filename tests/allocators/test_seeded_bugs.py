"""Seeded bugs: the random laws must catch each, with the allocator's own audit switched off.

So a law that stops seeing a bug fails here, and no law rests on `check_integrity` being right.
"""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from allocators.blocks import BlockTier
from allocators.buddy import BuddyAllocator
from allocators.paged_swap import PagedSwapAllocator
from allocators.static import StaticAllocator
from kvbench.allocator import Grant
from tests.allocators.machine import SETTINGS, AllocatorMachine, machine


class NoReferenceOnFork(BlockTier):
    def share(self, parents, children):
        super().share(parents, children)
        np.subtract.at(self.references, self.blocks_of(parents)[0], 1)


class FreeLeaksABlock(BlockTier):
    def release(self, rows):
        super().release(rows)
        if self.num_held:
            self.num_free -= 1


class FreeIgnoresSharers(BlockTier):
    def release(self, rows):
        self.references[self.blocks_of(rows)[0]] = 1
        super().release(rows)


class WritesIntoSharedTail(BlockTier):
    def writers_to_copy(self, rows):
        return rows[:0]


class LastSharerCopiesToo(BlockTier):
    def writers_to_copy(self, rows):
        shared = (self.references[self.tails_of(rows)] > 1) & (self.room_in_tails(rows) > 0)
        return rows[shared]


class CopyMiscountsTokens(BlockTier):
    def copy_tails(self, rows):
        vacant = self.vacant
        moved = super().copy_tails(rows)
        self.vacant = vacant
        return moved


class OwnershipIsLost(BlockTier):
    def pass_on(self, tails):
        pass


class ForkOwnsSharedTail(BlockTier):
    def share(self, parents, children):
        super().share(parents, children)
        self.owns_tail[children] = True


class TableIsNotCleared(BlockTier):
    def release(self, rows):
        tables = self.tables.copy()
        super().release(rows)
        self.tables[:] = tables


class SwapLosesSharing(BlockTier):
    def receive(self, rows, source):
        if source.blocks_of(rows)[0].size > self.num_free:
            return super().receive(rows, source)
        moves = [super(SwapLosesSharing, self).receive(rows[[i]], source) for i in range(rows.size)]
        return tuple(np.concatenate(blocks) for blocks in zip(*moves, strict=True))


class CopiesAreDropped(PagedSwapAllocator):
    def append(self, rows, num_tokens=1):
        grant = super().append(rows, num_tokens)
        return None if grant is None else Grant(slots=grant.slots)


class CopiesReadTheWrongBlock(PagedSwapAllocator):
    def append(self, rows, num_tokens=1):
        grant = super().append(rows, num_tokens)
        for copies in grant.copies if grant else ():
            copies.ranges[:, 0] = copies.ranges[:, 1]
        return grant


class RefusalChangesState(PagedSwapAllocator):
    def append(self, rows, num_tokens=1):
        grant = super().append(rows, num_tokens)
        if grant is None:
            super().append(rows[:1])
        return grant


class WatermarkIgnored(PagedSwapAllocator):
    def _num_admissible_blocks(self):
        return self._device.num_free


class WatermarkStarvesEmptyPool(PagedSwapAllocator):
    def _num_admissible_blocks(self):
        return self._device.num_free - self._watermark


class SlotsEscape(PagedSwapAllocator):
    def slots(self, rows, positions):
        rows, positions = np.asarray(rows), np.asarray(positions)
        size = self.block_size
        return self._device.tables[rows, positions // size] * size + positions % size


class GrantsSlotsOfTheBlockBeforeItsCopy(PagedSwapAllocator):
    def append(self, rows, num_tokens=1):
        grant = super().append(rows, num_tokens)
        for copies in grant.copies if grant else ():
            for old, new, size in copies.ranges.tolist():
                grant.slots[(grant.slots >= new) & (grant.slots < new + size)] -= new - old
        return grant


class GrantsSlotsInTheWrongOrder(BuddyAllocator):
    def append(self, rows, num_tokens=1):
        grant = super().append(rows, num_tokens)
        grant.slots = np.sort(grant.slots)
        return grant


class BuddyNeverMerges(BuddyAllocator):
    def _merge(self, base, order):
        self._free[order][base] = None


class BuddyOverlaps(BuddyAllocator):
    def _split(self, order):
        base = super()._split(order)
        if order:
            self._free[order - 1][base] = None
        return base


class ForkCopiesOneTokenShort(StaticAllocator):
    def fork(self, parents, children):
        grant = super().fork(parents, children)
        for copies in grant.copies if grant else ():
            copies.ranges[:, 2] -= 1
        return grant


class GroupPromptIsNotReplicated(StaticAllocator):
    def allocate(self, rows, num_tokens, **options):
        grant = super().allocate(rows, num_tokens, **options)
        return None if grant is None else Grant(slots=grant.slots)


class GrowsBeyondReservation(BuddyAllocator):
    def append(self, rows, num_tokens=1):
        self._capacity += self._lengths > 0
        try:
            return super().append(rows, num_tokens)
        finally:
            self._capacity -= self._lengths > 0


TIERS = [
    NoReferenceOnFork,
    FreeLeaksABlock,
    FreeIgnoresSharers,
    WritesIntoSharedTail,
    LastSharerCopiesToo,
    CopyMiscountsTokens,
    OwnershipIsLost,
    ForkOwnsSharedTail,
    TableIsNotCleared,
    SwapLosesSharing,
]
ALLOCATORS = [
    CopiesAreDropped,
    CopiesReadTheWrongBlock,
    RefusalChangesState,
    WatermarkIgnored,
    WatermarkStarvesEmptyPool,
    SlotsEscape,
    BuddyNeverMerges,
    BuddyOverlaps,
    ForkCopiesOneTokenShort,
    GroupPromptIsNotReplicated,
    GrantsSlotsOfTheBlockBeforeItsCopy,
    GrantsSlotsInTheWrongOrder,
    GrowsBeyondReservation,
]


def assert_caught(allocator_class, base=AllocatorMachine, **options):
    unaudited = type("Unaudited", (allocator_class,), {"check_integrity": lambda self: None})
    many = settings(SETTINGS, max_examples=100, report_multiple_bugs=False)
    with pytest.raises(AssertionError):
        run_state_machine_as_test(machine(lambda pool: unaudited(pool, **options), base), settings=many)


@pytest.mark.parametrize("tier", TIERS)
def test_laws_catch_seeded_bug_in_blocks(tier, monkeypatch):
    monkeypatch.setattr("allocators.paged.BlockTier", tier)
    monkeypatch.setattr("allocators.paged_swap.BlockTier", tier)
    assert_caught(PagedSwapAllocator, block_size=4, watermark=0.05)


@pytest.mark.parametrize("allocator_class", ALLOCATORS)
def test_laws_catch_seeded_bug_in_allocator(allocator_class):
    options = {"block_size": 4, "watermark": 0.05} if issubclass(allocator_class, PagedSwapAllocator) else {}
    assert_caught(allocator_class, **options)


@pytest.mark.parametrize(
    ("allocator_class", "options"),
    [(PagedSwapAllocator, {"block_size": 4, "watermark": 0.05}), (BuddyAllocator, {}), (StaticAllocator, {})],
)
@pytest.mark.slow
def test_nothing_is_caught_without_a_bug(allocator_class, options):
    with pytest.raises(pytest.fail.Exception):
        assert_caught(allocator_class, **options)
