"""Random interleavings of all verbs, and of misuse, as a hypothesis state machine."""

from collections.abc import Callable
from typing import ClassVar

import numpy as np
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvbench.allocator import Allocator, Capability, Layout, Pool
from tests.allocators.cases import POOLS
from tests.allocators.harness import Harness

SETTINGS = settings(
    max_examples=10,
    stateful_step_count=40,
    deadline=None,
    database=None,
    derandomize=True,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


class AllocatorMachine(RuleBasedStateMachine):
    make: ClassVar[Callable[[Pool], Allocator]]
    pools: ClassVar[list[Pool]] = POOLS
    num_steps: ClassVar[int] = 0

    @initialize(data=st.data())
    def build(self, data):
        self.harness = Harness(type(self).make, data.draw(st.sampled_from(self.pools)))

    @precondition(lambda self: self.harness.idle())
    @rule(data=st.data())
    def allocate(self, data):
        rows = _some(data, self.harness.idle()[:4])
        max_tokens = data.draw(st.integers(1, self.harness.pool.max_tokens))
        self.harness.allocate(rows, data.draw(st.integers(1, max_tokens)), max_tokens)

    @precondition(lambda self: self.harness.idle() and self.harness.allocator.usage().free)
    @rule(data=st.data())
    def allocate_what_is_free(self, data):
        num_tokens = min(self.harness.allocator.usage().free, self.harness.pool.max_tokens)
        self.harness.allocate(_some(data, self.harness.idle()[:2]), num_tokens, num_tokens)

    @precondition(lambda self: self._caches() and self.harness.idle())
    @rule(data=st.data(), topic=st.integers(0, 2), blocks=st.integers(1, 8), is_written=st.booleans())
    def allocate_text(self, data, topic, blocks, is_written):
        """Prompts of few texts, some with a beginning in common, and perhaps an end of their own."""
        pool, size = self.harness.pool, self.harness.allocator.block_size
        text = ([min(topic, 1)] * (2 * size) + [topic] * (6 * size))[: min(blocks * size, pool.max_tokens)]
        num_tokens = data.draw(st.integers(len(text), min(len(text) + size, pool.max_tokens)))
        rows = _some(data, self.harness.idle()[:2])
        if self.harness.allocate(rows, num_tokens, pool.max_tokens, text) and is_written:
            self.harness.commit(rows)

    @precondition(lambda self: self._caches() and self.harness.live())
    @rule(data=st.data())
    def commit(self, data):
        self.harness.commit(_some(data, self.harness.live()))

    @precondition(lambda self: self._caches() and self.harness.live())
    @rule()
    def commit_all(self):
        self.harness.commit(self.harness.live())

    @precondition(lambda self: self.harness.live())
    @rule(data=st.data())
    def decode(self, data):
        rows = [row for row in self.harness.live() if self._room(row)]
        if rows:
            self.harness.append(_some(data, rows))

    @precondition(lambda self: self.harness.live())
    @rule(data=st.data())
    def decode_all(self, data):
        rows = [row for row in self.harness.live() if self._room(row)]
        self.harness.append(data.draw(st.permutations(rows)))

    @precondition(lambda self: self.harness.live())
    @rule(data=st.data())
    def append_many(self, data):
        rows = [row for row in self.harness.live() if self._room(row)]
        if rows:
            rows = _some(data, rows)
            self.harness.append(rows, [data.draw(st.integers(1, self._room(row))) for row in rows])

    @precondition(lambda self: self.harness.live())
    @rule(data=st.data(), num_steps=st.integers(1, 20))
    def grow(self, data, num_steps):
        rows = [row for row in self.harness.live() if self._room(row)]
        if rows:
            rows = _some(data, rows)
            self.harness.grow(rows, min(num_steps, *map(self._room, rows)))

    @precondition(lambda self: self.harness.live() and self.harness.idle())
    @rule(data=st.data())
    def fork(self, data):
        children = _some(data, self.harness.idle()[:3])
        parents = [data.draw(st.sampled_from(self.harness.live())) for _ in children]
        self.harness.fork(parents, children)

    @precondition(lambda self: self.harness.rows)
    @rule(data=st.data())
    def free(self, data):
        self.harness.free(_some(data, list(self.harness.rows)))

    @precondition(lambda self: self._swaps() and self.harness.live())
    @rule(data=st.data())
    def swap_out(self, data):
        self.harness.swap_out(_some(data, self.harness.live()))

    @precondition(lambda self: self._swaps() and self.harness.live(on_host=True))
    @rule(data=st.data())
    def swap_in(self, data):
        self.harness.swap_in(_some(data, self.harness.live(on_host=True)))

    @rule()
    def misuse(self):
        self.harness.misuse(misuses(self.harness))

    @invariant()
    def laws_hold(self):
        if hasattr(self, "harness"):
            type(self).num_steps += 1
            self.harness.check()

    def teardown(self):
        # After a failure, teardown must not fail too and hide it.
        if hasattr(self, "harness") and self.harness.sound:
            self.harness.free(list(self.harness.rows))
            self.harness.check()
            for num_rows in (1, 2, self.harness.pool.max_rows):
                self.harness.check_admissible(num_rows)

    def _caches(self) -> bool:
        return Capability.PREFIX_CACHE in self.harness.allocator.supports

    def _swaps(self) -> bool:
        return Capability.SWAP in self.harness.allocator.supports

    def _room(self, row: int) -> int:
        return self.harness.rows[row].max_tokens - len(self.harness.rows[row].tokens)


class CacheMachine(AllocatorMachine):
    """Only what makes, finds and evicts content, in pools that are soon full."""

    pools: ClassVar[list[Pool]] = [
        Pool(num_slots=69, max_rows=6, max_tokens=40),
        Pool(num_slots=43, max_rows=4, max_tokens=31),
    ]
    misuse = allocate_what_is_free = append_many = swap_out = swap_in = None


def machine(
    make: Callable[[Pool], Allocator], base: type[AllocatorMachine] = AllocatorMachine
) -> type[AllocatorMachine]:
    return type("Machine", (base,), {"make": staticmethod(make), "num_steps": 0})


def misuses(harness: Harness):
    """Calls that break the interface in the harness' present state, as (verb, args, kwargs)."""
    pool, idle, live, swapped = harness.pool, harness.idle(), harness.live(), harness.live(on_host=True)
    absent = idle + swapped
    for bad in ([-1], [pool.max_rows], [0.5], [[0]], [-pool.max_rows]):
        yield "append", (bad,), {}
        yield "free", (bad,), {}
        yield "commit", (bad,), {}
        yield "slots", (bad, [0]), {}
        yield "num_tokens", (bad,), {}
    for row in absent[:2]:
        yield "append", ([*live, row],), {}
        yield "commit", ([*live, row],), {}
        yield "slots", ([row], [0]), {}
    for row in idle[:1]:
        yield "free", ([*live, row],), {}
        yield "swap_out", ([*live, row],), {}
        yield "swap_in", ([*swapped, row],), {}
        yield "fork", ([row], [row]), {}
        yield "allocate", ([row, row], 1), {"max_tokens": 1}
        yield "allocate", ([row], 0), {"max_tokens": 1}
        yield "allocate", ([row], 2), {"max_tokens": 1}
        yield "allocate", ([row], 1), {"max_tokens": pool.max_tokens + 1}
        yield "allocate", ([row, pool.max_rows], 1), {"max_tokens": 1}
        if Capability.PREFIX_CACHE in harness.allocator.supports:
            size = harness.allocator.block_size
            for content in ([1] * 2, [0.5]):
                yield "allocate", ([row], size), {"max_tokens": size, "content": np.array(content)}
            yield "num_cached_tokens", (size, np.array([1, 2])), {}
    yield "allocate", ([], 1), {"max_tokens": 1}
    if Capability.PREFIX_CACHE not in harness.allocator.supports:
        yield "commit", (live,), {}
    yield "max_admissible_tokens", (0,), {}
    for row in live[:2]:
        length = len(harness.rows[row].tokens)
        yield "append", ([row, row],), {}
        yield "append", ([row], 0), {}
        if length == pool.max_tokens:
            yield "append", ([row],), {}
        yield "append", ([row], [1, 1]), {}
        yield "append", (live, [pool.max_tokens + 1 - length] * len(live)), {}
        if Capability.RESERVES_GROWTH in harness.allocator.supports:
            yield "append", ([row], int(harness.allocator.capacity([row])[0]) - length + 1), {}
        yield "slots", ([row], [length]), {}
        yield "slots", ([row], [-1]), {}
        yield "slots", ([row, row], [0]), {}
        yield "free", ([row, row],), {}
        yield "fork", ([row], [row]), {}
        yield "fork", ([row, row], idle[:1] * 2), {}
        yield "fork", ([row], []), {}
        yield "swap_in", ([row],), {}
        yield "allocate", ([*idle[:1], row], 1), {"max_tokens": 1}
        yield "base_slots" if harness.allocator.layout is Layout.PAGED else "block_tables", ([row],), {}
    for row in swapped[:1]:
        yield "swap_out", ([*live, row],), {}
        yield "block_tables", ([row],), {}
        yield "allocate", ([row], 1), {"max_tokens": 1}


def _some(data, rows: list[int]) -> list[int]:
    """A non-empty subset of the rows, in any order."""
    return data.draw(st.lists(st.sampled_from(rows), min_size=1, unique=True))
