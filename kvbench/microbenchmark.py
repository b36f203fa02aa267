"""Real steps and real copies of a machine, timed one by one: what a device profile is fitted to.

Steps are planned by hand on the rows of a real allocator, so that batch and context are what a table of cases
says, and run by the executor that runs everything else. Rounds visit every case in turn: drift of the machine's
speed falls on all of them alike, and a case's time is its median over the rounds, or its least.
"""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray

from kvbench.allocator import Allocator, Copies, IntArray, Layout, Tier, consecutive
from kvbench.executors.torch_executor import TorchExecutor
from kvbench.plan import SampleSpec, StepPlan

BATCHES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)
CONTEXTS = (16, 128, 512)
PREFILLS = ((1, 2), (1, 8), (1, 16), (1, 32), (2, 32), (1, 64), (1, 128), (4, 32), (1, 256), (4, 128), (1, 512))
# Ranges, slots of each: blocks of a token and of 16, and regions. Few ranges would find their KV in the cache.
RANGES = ((16, 1), (64, 1), (4, 16), (16, 16), (32, 16), (128, 16), (1, 256), (4, 256))
MIN_ROUNDS = 3


@dataclass(frozen=True)
class Case:
    """A step of ``num_sequences`` rows that bring ``num_new`` tokens each to ``context`` with them; or copies."""

    kind: str  # prefill | decode | copy | swap_out | swap_in
    num_sequences: int = 0
    num_new: int = 0
    context: int = 0
    num_ranges: int = 0
    num_slots: int = 0  # of all ranges

    @property
    def num_tokens(self) -> int:
        return self.num_sequences * self.num_new

    @property
    def kv_tokens(self) -> int:
        return self.num_sequences * self.context

    @property
    def pairs(self) -> float:
        """A new token attends to those before it and to itself."""
        return self.num_sequences * self.num_new * (2 * self.context - self.num_new + 1) / 2


Action = Callable[[], object]


def actions(executor: TorchExecutor, allocator: Allocator, max_batched_tokens: int) -> dict[Case, Action]:
    """What can be timed within the pool, its rows, the longest sequence and the largest prefill.

    In this order no copy finds in the cache what another one left there.
    """
    pool, storage = allocator.pool, executor.storage
    steps = [Case("decode", b, 1, c) for c in CONTEXTS for b in BATCHES]
    steps += [Case("prefill", b, n, n) for b, n in PREFILLS if b * n <= max_batched_tokens]
    todo: dict[Case, Action] = {}
    for case in steps:
        if case.num_sequences <= pool.max_rows and case.context <= pool.max_tokens:
            plan = _plan(allocator, case)
            if plan is not None:
                todo[case] = partial(executor.run, plan)
    shared = min(pool.num_slots, pool.num_host_slots)
    for kind, source, destination, num_slots, offset in (
        ("copy", Tier.DEVICE, Tier.DEVICE, pool.num_slots // 2, pool.num_slots // 2),
        ("swap_out", Tier.DEVICE, Tier.HOST, shared, 0),
        ("swap_in", Tier.HOST, Tier.DEVICE, shared, 0),
    ):
        for count, length in RANGES:
            if count * length <= num_slots:
                copies = Copies(source, destination, _ranges(count, length, num_slots, offset))
                todo[Case(kind, num_ranges=count, num_slots=count * length)] = partial(storage.copy, copies)
    return todo


def warm_up(executor: TorchExecutor, allocator: Allocator, max_batched_tokens: int) -> None:
    """One prefill as large as a run's may be: the first in a process pages in its memory, a quarter of its time."""
    num_tokens = min(128, allocator.pool.max_tokens)
    for count in range(min(max_batched_tokens // num_tokens, allocator.pool.max_rows), 0, -1):
        plan = _plan(allocator, Case("prefill", count, num_tokens, num_tokens))
        if plan is not None:
            executor.run(plan)
            return


class Rounds:
    """Times of the cases so far. tick: called after every case."""

    def __init__(self, executor: TorchExecutor, todo: dict[Case, Action], tick: Action) -> None:
        self._device, self._todo, self._tick = executor.device, todo, tick
        self._samples: dict[Case, list[float]] = {case: [] for case in todo}
        executor.storage.kv.fill_(0.1)  # what was never written is NaN

    def run(self) -> None:
        """Time every case once. The first round warms up and does not count."""
        for case, action in self._todo.items():
            self._samples[case].append(_seconds(self._device, action))
            self._tick()

    def run_for(self, budget_s: float) -> None:
        """Rounds until another would end later; ``MIN_ROUNDS`` in any case."""
        start = time.perf_counter()
        elapsed, rounds = 0.0, -1
        while rounds < MIN_ROUNDS or elapsed * (rounds + 2) / (rounds + 1) < budget_s:
            self.run()
            rounds, elapsed = rounds + 1, time.perf_counter() - start

    def table(self, quantile: float = 0.5) -> pd.DataFrame:
        """One row per case: its features, ``seconds`` (the ``quantile`` over rounds), ``spread`` (quartile range over
        median), ``rounds``.
        """
        return pd.DataFrame([_row(case, np.array(times[1:]), quantile) for case, times in self._samples.items()])


def _seconds(device: torch.device, action: Action) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    action()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def _row(case: Case, times: NDArray[np.float64], quantile: float) -> dict[str, object]:
    seconds, low, median, high = np.quantile(times, (quantile, 0.25, 0.5, 0.75))
    features = {"num_tokens": case.num_tokens, "kv_tokens": case.kv_tokens, "pairs": case.pairs}
    timing = {"seconds": seconds, "spread": (high - low) / median, "rounds": len(times)}
    return asdict(case) | features | timing


def _plan(allocator: Allocator, case: Case) -> StepPlan | None:
    """The case's step on rows of its own; None where the pool has no room for them."""
    rows = np.arange(case.num_sequences)
    placed = 0
    while placed < len(rows) and allocator.allocate(rows[placed : placed + 1], case.context, max_tokens=case.context):
        placed += 1
    plan = _step(allocator, case, rows) if placed == len(rows) else None
    allocator.free(rows[:placed])
    return plan


def _step(allocator: Allocator, case: Case, rows: IntArray) -> StepPlan:
    num_new, lengths = np.full(len(rows), case.num_new), np.full(len(rows), case.context)
    positions = consecutive(lengths - num_new, num_new)
    paged = allocator.layout is Layout.PAGED
    return StepPlan(
        copies=(),
        late_copies=(),
        rows=rows,
        num_new=num_new,
        num_decode=len(rows) if case.num_new == 1 else 0,
        tokens=np.ones(case.num_tokens, np.int32),
        positions=positions,
        slots=allocator.slots(np.repeat(rows, num_new), positions),
        lengths=lengths,
        sample=SampleSpec.greedy(len(rows)),
        block_tables=allocator.block_tables(rows) if paged else None,
        block_size=allocator.block_size,
        base_slots=None if paged else allocator.base_slots(rows),
    )


def _ranges(count: int, length: int, num_slots: int, offset: int) -> IntArray:
    """``count`` scattered ranges of the first ``num_slots``, each to slots ``offset`` further on."""
    first = np.random.default_rng(count).permutation(num_slots // length)[:count] * length
    return np.stack([first, first + offset, np.full(count, length)], axis=1)
