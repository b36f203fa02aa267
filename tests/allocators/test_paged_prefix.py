"""What is particular to content that is kept: who finds what, who gives way, and what it costs."""

import numpy as np
import pytest

from allocators.paged_prefix import PagedPrefixAllocator
from kvbench.allocator import Pool
from tests.allocators.harness import Harness

A, B, C = [1] * 40, [2] * 40, [3] * 40


def harness(num_blocks=10, block_size=4, watermark=0.0, max_rows=8):
    pool = Pool(num_blocks * block_size, max_rows, max_tokens=40)
    return Harness(lambda p: PagedPrefixAllocator(p, block_size=block_size, watermark=watermark), pool)


def serve(h, row, text, num_tokens):
    """Compute a prompt and be done with it."""
    assert h.allocate([row], num_tokens, 40, text[:num_tokens])
    h.commit([row])
    h.free([row])
    h.check()


def found(h, row, text, num_tokens):
    """Tokens that a prompt of the text finds."""
    before = h.num_written
    keys = np.array(h._beginning(text[:num_tokens])[3::4])
    assert before == h.num_written
    return h.allocator.num_cached_tokens(num_tokens, keys)


@pytest.mark.parametrize("block_size", [1, 4])
def test_all_but_the_last_token_may_be_found(block_size):
    h = harness(num_blocks=40 // block_size, block_size=block_size)
    serve(h, 0, A, 12)
    assert h.allocate([1], 12, 40, A[:12])
    assert h.allocator.usage().cached == block_size, "the last block is computed again"
    h.check()


def test_content_is_found_while_a_row_holds_it_and_after():
    h = harness()
    assert h.allocate([0], 10, 40, A[:10])
    assert found(h, 1, A, 13) == 0, "it is not written yet"
    h.commit([0])
    assert found(h, 1, A, 13) == 8
    h.free([0])
    assert h.allocator.usage().cached == 8
    assert found(h, 1, A, 13) == 8
    assert found(h, 1, A, 8) == 4
    assert found(h, 1, A[:6] + B, 13) == 4
    assert found(h, 1, B, 13) == 0


def test_a_row_freed_before_it_is_written_offers_nothing_and_leaves_nothing_to_its_successor():
    h = harness()
    assert h.allocate([0], 12, 40, A[:12])
    h.free([0])
    assert h.allocator.usage().cached == 0
    assert h.allocate([0], 12, 40)
    h.commit([0])
    assert found(h, 1, A, 13) == 0
    h.check()


def test_what_is_appended_and_what_has_no_key_is_not_kept():
    h = harness()
    assert h.allocate([0], 14, 40, A[:9])
    h.append([0], 10)
    h.commit([0])
    h.free([0])
    assert h.allocator.usage().cached == 8


def test_a_forked_row_keeps_content_alive():
    h = harness()
    assert h.allocate([0], 12, 40, A[:12])
    h.commit([0])
    h.fork([0], [1])
    h.free([0])
    assert h.allocator.usage().cached == 0
    assert found(h, 2, A, 13) == 12
    h.free([1])
    assert h.allocator.usage().cached == 12


def test_the_longest_unused_gives_way_first_and_of_a_prompt_its_end():
    h = harness(num_blocks=7)
    serve(h, 0, A, 12)
    serve(h, 0, B, 12)
    serve(h, 0, A, 5)
    assert h.allocator.usage().cached == 24
    for row, num_blocks, left in ((1, 2, (8, 12)), (2, 2, (4, 8)), (3, 2, (4, 0)), (4, 1, (0, 0))):
        assert h.allocate([row], 4 * num_blocks, 40)
        assert (found(h, 5, A, 13), found(h, 5, B, 13)) == left
    assert h.allocator.usage().free == 0
    h.check()


def test_of_two_rows_that_computed_the_same_the_first_keeps_it_and_nothing_is_kept_behind_the_other():
    """What the second holds behind it would be lost, as soon as the first's blocks give way."""
    h = harness()
    assert h.allocate([0], 8, 40, A[:8])
    assert h.allocate([1], 16, 40, A[:16])
    h.commit([0])
    h.commit([1])
    assert found(h, 2, A, 17) == 8
    h.free([0])
    h.free([1])
    assert h.allocator.usage().cached == 8
    h.check()


def test_a_decode_step_takes_the_room_of_content_as_if_it_were_empty():
    h = harness(num_blocks=6)
    serve(h, 0, A, 16)
    assert h.allocate([0, 1], 8, 40, B[:8])
    h.commit([0])
    h.free([1])
    for _ in range(16):
        assert h.append([0])
        h.check()
    assert not h.append([0])


def test_found_content_that_nobody_holds_counts_against_the_watermark():
    h = harness(num_blocks=10, watermark=0.2)
    serve(h, 0, A, 20)
    assert h.allocate([0], 16, 40)
    assert not h.allocate([1], 20, 40, A[:20])
    assert h.allocate([1], 16, 40, A[:16])
    h.commit([1])
    assert not h.allocate([2], 4, 40)
    h.check()


def test_content_that_is_held_costs_an_admission_nothing():
    h = harness(num_blocks=6, watermark=0.1)
    assert h.allocate([0], 16, 40, A[:16])
    assert not h.allocate([1], 17, 40, A[:17])
    h.commit([0])
    assert h.allocate([1], 17, 40, A[:17])
    h.check()
