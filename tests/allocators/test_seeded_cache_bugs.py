"""Seeded bugs of an allocator that finds content again; see `test_seeded_bugs`."""

import pytest

from allocators.paged_prefix import CachingTier, PagedPrefixAllocator
from tests.allocators.machine import CacheMachine
from tests.allocators.test_seeded_bugs import assert_caught


class KeyOutlivesItsContent(CachingTier):
    def make_room(self, count):
        keys = dict(self._block_of)
        granted = super().make_room(count)
        self._block_of = keys | self._block_of
        return granted


class NewestGivesWay(CachingTier):
    def make_room(self, count):
        self._idle = type(self._idle)(reversed(self._idle.items()))
        granted = super().make_room(count)
        self._idle = type(self._idle)(reversed(self._idle.items()))
        return granted


class HeadGivesWayBeforeTail(CachingTier):
    def release(self, rows):
        known = list(self._idle)
        super().release(rows)
        new = [block for block in self._idle if block not in known]
        self._idle = type(self._idle).fromkeys(known + new[::-1])


class MakesRoomForAllAtOnce(CachingTier):
    def make_room(self, count):
        return super().make_room(self.num_available if self.num_free < count <= self.num_available else count)


class FoundBlockStaysIdle(CachingTier):
    def place_behind(self, found, rows, num_tokens):
        idle = self._idle.copy()
        slots = super().place_behind(found, rows, num_tokens)
        for block in found.tolist():
            if block in idle:
                self._idle[block] = None
        return slots


class FoundBlockIsNotReferenced(CachingTier):
    def place_behind(self, found, rows, num_tokens):
        slots = super().place_behind(found, rows, num_tokens)
        self.references[found] -= rows.size
        return slots


class LastRowForgetsContent(CachingTier):
    def release(self, rows):
        super().release(rows)
        num_free = self.num_free
        self.make_room(self.num_available)
        assert num_free <= self.num_free


class CommitsAtAdmission(PagedPrefixAllocator):
    def allocate(self, rows, num_tokens, *, max_tokens, content=None):
        grant = super().allocate(rows, num_tokens, max_tokens=max_tokens, content=content)
        if grant is not None:
            super().commit(rows)
        return grant


class NothingIsLeftToCompute(PagedPrefixAllocator):
    def _find(self, num_tokens, keys):
        return self._device.find(keys)


class IdleBlocksCostNothing(PagedPrefixAllocator):
    def _num_admissible_blocks(self):
        return super()._num_admissible_blocks() + self._device.num_idle


class IdleBlocksAreNotAvailable(PagedPrefixAllocator):
    def _num_admissible_blocks(self):
        return super()._num_admissible_blocks() - self._device.num_idle


TIERS = [
    KeyOutlivesItsContent,
    NewestGivesWay,
    HeadGivesWayBeforeTail,
    MakesRoomForAllAtOnce,
    FoundBlockStaysIdle,
    FoundBlockIsNotReferenced,
    LastRowForgetsContent,
]
ALLOCATORS = [
    CommitsAtAdmission,
    NothingIsLeftToCompute,
    IdleBlocksCostNothing,
    IdleBlocksAreNotAvailable,
]


@pytest.mark.parametrize("tier", TIERS)
def test_laws_catch_seeded_bug_in_blocks(tier, monkeypatch):
    monkeypatch.setattr("allocators.paged_prefix.CachingTier", tier)
    assert_caught(PagedPrefixAllocator, CacheMachine, block_size=4, watermark=0.05)


@pytest.mark.parametrize("allocator_class", ALLOCATORS)
def test_laws_catch_seeded_bug_in_allocator(allocator_class):
    assert_caught(allocator_class, CacheMachine, block_size=4, watermark=0.05)


@pytest.mark.slow
def test_nothing_is_caught_without_a_bug():
    with pytest.raises(pytest.fail.Exception):
        assert_caught(PagedPrefixAllocator, CacheMachine, block_size=4, watermark=0.05)
