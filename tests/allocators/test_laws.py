"""The laws of kvbench.allocator over every allocator that conf/allocator names."""

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from allocators.paged_prefix import PagedPrefixAllocator
from allocators.paged_swap import PagedSwapAllocator
from kvbench.allocator import Capability
from tests.allocators.cases import NAMES, POOLS, maker
from tests.allocators.machine import SETTINGS, machine


@pytest.mark.parametrize("name", NAMES)
def test_laws_hold_over_random_verbs(name):
    run_state_machine_as_test(machine(maker(name)), settings=SETTINGS)


@pytest.mark.parametrize("kind", [PagedSwapAllocator, PagedPrefixAllocator])
@pytest.mark.parametrize("block_size", [1, 3, 8])
def test_laws_hold_for_other_block_sizes(kind, block_size):
    def make(pool):
        return kind(pool, block_size=block_size, watermark=0.1)

    run_state_machine_as_test(machine(make), settings=SETTINGS)


@pytest.mark.parametrize("name", NAMES)
def test_verbs_on_no_rows_do_nothing(name):
    allocator = maker(name)(POOLS[0])
    before = allocator.usage()
    verbs = [lambda: allocator.append([]), lambda: allocator.fork([], [])]
    if Capability.PREFIX_CACHE in allocator.supports:
        allocator.commit([])
    if Capability.SWAP in allocator.supports:
        verbs += [lambda: allocator.swap_out([]), lambda: allocator.swap_in([])]
    for verb in verbs:
        grant = verb()
        assert grant.copies == ()
        assert grant.slots.shape == (0,)
    allocator.free([])
    assert allocator.slots([], []).shape == (0,)
    assert allocator.usage() == before


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_laws_hold_over_ten_thousand_steps(name):
    cls = machine(maker(name))
    run_state_machine_as_test(cls, settings=settings(SETTINGS, max_examples=170, stateful_step_count=100))
    assert cls.num_steps >= 10_000
