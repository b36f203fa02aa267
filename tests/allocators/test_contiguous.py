"""What is particular to regions: buddies that split and merge, static remainders, copied forks."""

import pytest

from allocators.buddy import BuddyAllocator
from allocators.static import StaticAllocator
from kvbench.allocator import AllocatorConfigError, AllocatorMisuse, Pool
from tests.allocators.harness import Harness


def sizes(allocator):
    """Free regions as {size: bases}."""
    return {1 << order: sorted(bases) for order, bases in enumerate(allocator._free) if bases}


@pytest.mark.parametrize("num_slots", [1, 7, 96, 100, 1000, 1023, 1024, 1025])
def test_buddy_splits_any_pool_and_merges_back(num_slots):
    h = Harness(BuddyAllocator, Pool(num_slots, max_rows=64, max_tokens=num_slots))
    initial = sizes(h.allocator)
    assert sum(size * len(bases) for size, bases in initial.items()) == num_slots
    for row in range(64):
        size = 1 + row * 7 % max(1, num_slots // 8)
        h.allocate([row], 1, size)
    h.check()
    rows = list(h.rows)
    assert rows
    for row in rows[::2] + rows[1::2]:
        h.free([row])
        h.check()
    assert sizes(h.allocator) == initial


def test_buddy_rounds_up_to_a_power_of_two():
    h = Harness(BuddyAllocator, Pool(num_slots=100, max_rows=4, max_tokens=100))
    h.allocate([0], 3, 33)
    usage = h.allocator.usage()
    assert (usage.token_states, usage.vacant, usage.rounding, usage.free) == (3, 30, 31, 36)
    assert h.allocator.capacity([0]).tolist() == [33]
    with pytest.raises(AllocatorMisuse, match="outgrow"):
        h.allocator.append([0], 31)


def test_buddy_refuses_a_region_that_free_slots_in_pieces_cannot_form():
    h = Harness(BuddyAllocator, Pool(num_slots=64, max_rows=4, max_tokens=64))
    for row in range(4):
        h.allocate([row], 1, 16)
    h.free([1, 3])
    assert h.allocator.usage().free == 32
    assert not h.allocate([1], 1, 17)
    h.free([0])
    assert h.allocate([1], 1, 17)
    h.check()


def test_buddy_takes_a_group_whole_or_not_at_all():
    h = Harness(BuddyAllocator, Pool(num_slots=100, max_rows=8, max_tokens=64))
    assert not h.allocate([0, 1, 2, 3], 1, 32)  # three regions of 32 at most
    assert h.allocate([0, 1, 2], 1, 32)
    h.check()


def test_buddy_forks_rows_of_different_reservations_together():
    h = Harness(BuddyAllocator, Pool(num_slots=96, max_rows=8, max_tokens=64))
    h.allocate([0], 5, 8)
    h.allocate([1], 20, 32)
    assert h.fork([0, 1], [2, 3])  # 8, then 32: the larger must be cut first
    assert h.allocator.capacity([2, 3]).tolist() == [8, 32]
    assert not h.fork([0, 1], [4, 5])
    h.check()


def test_static_remainder_is_free_and_never_usable():
    h = Harness(StaticAllocator, Pool(num_slots=107, max_rows=8, max_tokens=50))
    assert h.allocate([0, 1], 10, 10)
    assert h.allocator.usage().free == 7
    assert not h.allocate([2], 1, 1)
    assert not h.fork([0], [2])
    h.check()


def test_static_fork_copies_the_whole_sequence():
    h = Harness(StaticAllocator, Pool(num_slots=107, max_rows=8, max_tokens=50))
    h.allocate([4], 10, 20)
    h.append([4], 3)
    base = int(h.allocator.base_slots([4])[0])
    grant = h.allocator.fork([4], [0])
    assert grant is not None
    (copies,) = grant.copies
    assert copies.ranges.tolist() == [[base, int(h.allocator.base_slots([0])[0]), 13]]


def test_static_pool_smaller_than_a_region_is_refused():
    with pytest.raises(AllocatorConfigError, match=r"pool\.size"):
        StaticAllocator(Pool(num_slots=49, max_rows=8, max_tokens=50))
