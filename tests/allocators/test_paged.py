"""What is particular to paging: the watermark, copy-on-write block by block, swap, settings."""

import pytest

from allocators.paged import PagedAllocator
from allocators.paged_swap import PagedSwapAllocator
from kvbench.allocator import AllocatorConfigError, Pool, Tier
from tests.allocators.harness import Harness


def harness(num_blocks=10, block_size=4, watermark=0.0, num_host_blocks=8, max_rows=8):
    pool = Pool(num_blocks * block_size, max_rows, max_tokens=40, num_host_slots=num_host_blocks * block_size)
    return Harness(lambda p: PagedSwapAllocator(p, block_size=block_size, watermark=watermark), pool)


def free_blocks(h):
    return h.allocator.usage().free // h.allocator.block_size


@pytest.mark.parametrize(
    ("num_blocks", "watermark", "kept_back"),
    [(10, 0.01, 1), (100, 0.01, 1), (101, 0.01, 2), (100, 0.07, 7), (1, 0.01, 1), (100, 0.0, 0)],
)
def test_watermark_rounds_up_to_whole_blocks(num_blocks, watermark, kept_back):
    h = harness(num_blocks=num_blocks, watermark=watermark)
    assert h.allocator.usage().withheld == kept_back * 4


def test_watermark_is_kept_from_admissions_and_given_to_running_rows():
    h = harness(num_blocks=10, watermark=0.2)
    assert h.allocate([0], 4 * 6, 40)
    assert not h.allocate([1], 4 * 3, 40)
    assert h.allocate([1], 4 * 2, 40)
    assert h.allocator.usage().withheld == 2 * 4
    assert h.append([0], 4 * 2)
    assert h.allocator.usage().withheld == h.allocator.usage().free == 0
    assert not h.append([1])
    h.check()


@pytest.mark.parametrize("block_size", [3, 4])  # the limit is inside a block, or its end
def test_no_row_outgrows_the_limit(block_size):
    h = harness(num_blocks=28, block_size=block_size)
    assert h.allocate([0], 40, 40)
    assert h.allocate([1], 5, 40)
    h.misuse([("append", ([1, 0],), {}), ("append", ([1, 0], [1, 1]), {}), ("append", ([1], 36), {})])
    h.check()
    assert h.append([1], 35)


def test_watermark_is_kept_from_swap_in():
    h = harness(num_blocks=10, watermark=0.2)
    assert h.allocate([0], 4 * 4, 40)
    assert h.swap_out([0])
    assert h.allocate([1], 4 * 5, 40)
    assert not h.swap_in([0])
    h.free([1])
    assert h.swap_in([0])
    h.check()


def test_empty_pool_admits_to_the_last_block():
    h = harness(num_blocks=10, watermark=0.5)
    assert h.allocate([0], 40, 40)
    assert free_blocks(h) == 0
    assert h.swap_out([0]) is False  # 10 blocks, 8 host blocks
    h.check()


def test_slots_that_fill_no_block_are_rounding():
    allocator = PagedAllocator(Pool(num_slots=43, max_rows=2, max_tokens=64), block_size=16)
    usage = allocator.usage()
    assert (usage.rounding, usage.free) == (11, 32)
    assert allocator.max_admissible_tokens(1) == 32


def test_every_sharer_but_the_last_copies_its_tail():
    h = harness()
    assert h.allocate([0, 1, 2], 6, 40)
    assert free_blocks(h) == 8
    assert h.append([1])  # two more share the tail: a copy
    assert free_blocks(h) == 7
    assert h.append([0, 2])  # the last two: one copy, one in place
    assert free_blocks(h) == 6
    assert h.allocator.usage().token_states == 4 + 3 * 3
    h.check()
    assert h.append([0, 1, 2])
    assert free_blocks(h) == 6
    h.check()


def test_copy_is_one_whole_block():
    h = harness()
    h.allocate([0], 7, 40)
    h.fork([0], [1])
    grant = h.allocator.append([1])
    (copies,) = grant.copies
    tables = h.allocator.block_tables([0, 1])
    assert (copies.source, copies.destination) == (Tier.DEVICE, Tier.DEVICE)
    assert copies.ranges.tolist() == [[tables[0, 1] * 4, tables[1, 1] * 4, 4]]
    assert tables[0, 0] == tables[1, 0]


def test_full_shared_tail_is_never_copied():
    h = harness()
    h.allocate([0], 8, 40)
    h.fork([0, 0], [1, 2])
    assert h.append([0, 1, 2], [1, 5, 9])
    assert free_blocks(h) == 10 - 2 - 1 - 2 - 3
    h.check()


def test_refused_copy_on_write_with_multi_block_append_changes_nothing():
    h = harness(num_blocks=6)
    h.allocate([0, 1], 6, 40)
    assert not h.append([0, 1], [6, 11])  # 1 copy + 1 + 3 blocks, 4 free
    assert h.append([0, 1], [6, 6])
    assert free_blocks(h) == 1
    h.check()


@pytest.mark.parametrize("leave", ["free", "append", "swap_out"])
def test_ownership_of_a_shared_tail_passes_on(leave):
    h = harness()
    h.allocate([0], 5, 40)
    h.fork([0, 0], [3, 4])
    assert h.allocator.capacity([0, 3, 4]).tolist() == [8, 5, 5]
    getattr(h, leave)([0])
    assert sorted(h.allocator.capacity([3, 4]).tolist()) == [5, 8]
    h.check()


def test_swap_keeps_sharing_among_rows_and_with_those_that_stay():
    h = harness()
    h.allocate([0], 10, 40)
    h.fork([0, 0, 0], [1, 2, 3])
    assert free_blocks(h) == 7
    assert h.swap_out([0, 1])
    assert (free_blocks(h), h.allocator.usage().host_held) == (7, 3 * 4)  # 2 and 3 keep the blocks
    h.check()
    assert h.swap_out([2, 3])
    assert (free_blocks(h), h.allocator.usage().host_held) == (10, 6 * 4)
    assert h.swap_in([0])  # 1 stays: the blocks are copied, and kept on the host
    assert (free_blocks(h), h.allocator.usage().host_held) == (7, 6 * 4)
    assert h.swap_in([1, 2, 3])
    assert (free_blocks(h), h.allocator.usage().host_held) == (1, 0)
    assert h.append([0, 1, 2, 3])
    h.check()


def test_rows_are_freed_on_either_tier_at_once():
    h = harness()
    h.allocate([0, 1], 10, 40)
    h.swap_out([1])
    h.free([1, 0])
    h.check()


def test_swap_out_is_refused_without_host_room():
    h = harness(num_host_blocks=2)
    h.allocate([0], 9, 40)
    assert not h.swap_out([0])
    h.check()


@pytest.mark.parametrize(
    ("allocator", "options", "pool", "setting"),
    [
        (PagedAllocator, {"block_size": 0}, Pool(64, 2, 64), "block_size"),
        (PagedAllocator, {"block_size": 65}, Pool(64, 2, 64), "pool.size"),
        (PagedAllocator, {"watermark": 1.0}, Pool(64, 2, 64), "watermark"),
        (PagedAllocator, {"watermark": -0.1}, Pool(64, 2, 64), "watermark"),
        (PagedSwapAllocator, {}, Pool(64, 2, 64), "pool.host_size"),
        (PagedSwapAllocator, {}, Pool(64, 2, 64, num_host_slots=15), "pool.host_size"),
    ],
)
def test_settings_that_cannot_work_are_named(allocator, options, pool, setting):
    with pytest.raises(AllocatorConfigError, match=setting):
        allocator(pool, **options)


def test_audit_sees_what_the_counters_cannot():
    h = harness()
    h.allocate([0], 6, 40)
    h.allocate([1], 6, 40)
    device = h.allocator._device
    device.tables[0, 0], device.tables[1, 0] = device.tables[1, 0], device.tables[0, 0]
    h.allocator.check_integrity()  # still a sound state, if not the rows' tokens
    device.tables[0, 0] = device.tables[1, 0]
    with pytest.raises(AssertionError, match="held by 2 rows, 1 counted"):
        h.allocator.check_integrity()
    device.tables[0, 0] = 9
    with pytest.raises(AssertionError, match="block"):
        h.allocator.check_integrity()
