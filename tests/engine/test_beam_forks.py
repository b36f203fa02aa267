"""Beams of all groups are forked at once; where the pool refuses, only the groups it has no room for start over."""

import numpy as np
import pytest
from numpy.typing import ArrayLike

from allocators.paged import PagedAllocator
from kvbench.allocator import Grant
from kvbench.config import Reservation, SchedulerConfig
from kvbench.request import Request, Sampling
from tests.engine.harness import ALLOCATORS
from tests.engine.test_engine_laws import check_pool, outputs, play

NUM_SLOTS = 1024


class CountingAllocator(PagedAllocator):
    """Notes how many children each fork was asked for."""

    asked: list[int]

    def fork(self, parents: ArrayLike, children: ArrayLike) -> Grant | None:
        self.asked.append(np.size(children))
        return super().fork(parents, children)


class ReluctantAllocator(PagedAllocator):
    """Refuses a fork of more than two children, and every fifth one."""

    num_asked = 0

    def fork(self, parents: ArrayLike, children: ArrayLike) -> Grant | None:
        self.num_asked += 1
        if np.size(children) > 2 or self.num_asked % 5 == 0:
            return None
        return super().fork(parents, children)


def requests() -> list[Request]:
    beam = Sampling("beam", beam_width=4, ignore_eos=True)
    return [Request(index, np.arange(3 + index, dtype=np.int32), 0.0, 20, beam) for index in range(3)]


def test_one_fork_serves_all_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    CountingAllocator.asked = []
    monkeypatch.setitem(ALLOCATORS, "counting", (CountingAllocator, Reservation.max))
    run = play("counting", requests(), NUM_SLOTS, SchedulerConfig(), block_size=4)
    assert len(CountingAllocator.asked) <= 18, "at most one per step that neither bears nor ends the beams"
    assert max(CountingAllocator.asked) > 3, "children of several groups"
    check_pool(run, NUM_SLOTS)


def test_a_refused_fork_costs_only_its_own_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ALLOCATORS, "reluctant", (ReluctantAllocator, Reservation.max))
    willing = play("paged", requests(), NUM_SLOTS, SchedulerConfig(), block_size=4)
    refused = play("reluctant", requests(), NUM_SLOTS, SchedulerConfig(), block_size=4)
    assert outputs(refused) == outputs(willing)
    steps = refused.recorder.steps(refused.end_s)
    assert (steps["num_preemptions"] > 0).any()
    assert (steps["num_preemptions"] < 3).all(), "some groups' own forks were granted"
    check_pool(refused, NUM_SLOTS)
