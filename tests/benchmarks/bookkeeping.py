"""Times the allocators' bookkeeping: ``python -m tests.benchmarks.bookkeeping [--rounds N]``.

For each allocator, pool size, context and batch, median and 90th percentile in microseconds of
- step: what a decode step asks for, ``append(rows)``, whose grant carries the new tokens' slots, and
  ``block_tables(rows)`` (paged) or ``base_slots(rows)``;
- admit: ``allocate`` of a 512-token prompt, whose grant carries the prompt's slots;
- free: ``free`` of such a row.
All cells are visited in turn, round after round, so that a disturbance of the machine falls on all of
them alike; use a quiet core. Contexts are spread by a block around their mean: as in a running engine,
some rows cross into a new block in every step.
"""

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import product
from time import perf_counter_ns

import numpy as np

from allocators.buddy import BuddyAllocator
from allocators.paged import PagedAllocator
from allocators.paged_swap import PagedSwapAllocator
from allocators.static import StaticAllocator
from kvbench.allocator import Allocator, Layout, Pool

MAX_ROWS = 512
MAX_TOKENS = 2048
PROMPT = 512
STEPS = 48  # per round: three blocks of tokens
ALLOCATORS = (StaticAllocator, BuddyAllocator, PagedAllocator, PagedSwapAllocator)
# The smallest pool holds 257 static regions.
POOL_SLOTS = (257 * MAX_TOKENS, 8 * 257 * MAX_TOKENS)
CONTEXTS = (256, 1024)
BATCHES = (16, 256)


@dataclass
class Cell:
    """One combination under test and its samples in nanoseconds."""

    make: Callable[[Pool], Allocator]
    num_slots: int
    context: int
    batch: int
    samples: dict[str, list[int]] = field(default_factory=lambda: {"step": [], "admit": [], "free": []})

    def __post_init__(self) -> None:
        pool = Pool(self.num_slots, MAX_ROWS, MAX_TOKENS, num_host_slots=1024)
        self.allocator = self.make(pool)

    def run(self, rng: np.random.Generator) -> None:
        rows = rng.permutation(MAX_ROWS)[: self.batch]
        lengths = self.context + rng.integers(-8, 8, self.batch)
        for row, length in zip(rows.tolist(), lengths.tolist(), strict=True):
            assert self.allocator.allocate([row], length, max_tokens=MAX_TOKENS), "the pool is too small"
        for _ in range(STEPS):
            self.samples["step"].append(self._step(rows))
        self.allocator.free(rows[:1])
        for _ in range(STEPS):
            start = perf_counter_ns()
            self.allocator.allocate(rows[:1], PROMPT, max_tokens=MAX_TOKENS)
            admitted = perf_counter_ns()
            self.allocator.free(rows[:1])
            self.samples["admit"].append(admitted - start)
            self.samples["free"].append(perf_counter_ns() - admitted)
        self.allocator.free(rows[1:])

    def _step(self, rows: np.ndarray) -> int:
        start = perf_counter_ns()
        self.allocator.append(rows)
        if self.allocator.layout is Layout.PAGED:
            self.allocator.block_tables(rows)
        else:
            self.allocator.base_slots(rows)
        return perf_counter_ns() - start


def report(cells: list[Cell]) -> Iterator[str]:
    yield f"{'microseconds: median / p90':42}{'step':>16}{'admit':>16}{'free':>16}"
    for cell in cells:
        name = type(cell.allocator).__name__.removesuffix("Allocator")
        title = f"{name:10} {cell.num_slots:>8} slots  {cell.batch:>3} x {cell.context}"
        yield f"{title:42}" + "".join(
            f"{np.median(samples) / 1e3:>8.1f} /{np.percentile(samples, 90) / 1e3:>6.1f}"
            for samples in cell.samples.values()
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20, help="visits of each cell (default 20)")
    rounds = parser.parse_args().rounds
    rng = np.random.default_rng(0)
    cells = [Cell(*combination) for combination in product(ALLOCATORS, POOL_SLOTS, CONTEXTS, BATCHES)]
    for _ in range(rounds):
        for cell in cells:
            cell.run(rng)
    print("\n".join(report(cells)))


if __name__ == "__main__":
    main()
