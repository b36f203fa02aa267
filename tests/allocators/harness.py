"""An allocator beside a slow model that knows only token histories and simulates the data.

Each verb is run on the allocator and then, if it was granted, as the engine would: copies in order on
an array that stands for the pool, then one distinct integer per new token written at the slot granted
for it. A row
whose storage does not read back as its history exposes an allocator that shared, copied or handed out
the wrong slots. The model knows no free list, reference count or region; of paged allocators it knows
the block size, and says exactly which appends must copy, what may be refused and what swapping shares;
of those that keep content, what every admission must find (`tests.allocators.cache_model`).

Prompts of equal text are equal integers: one for each text that a prompt can begin with. So content found
in the wrong place does not read back either.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np

from kvbench.accounting import note_growth
from kvbench.allocator import Allocator, AllocatorMisuse, Capability, Grant, Layout, Pool, Tier, Usage
from tests.allocators.cache_model import CacheModel
from tests.allocators.state import state_of


@dataclass
class Row:
    tokens: list[int]
    max_tokens: int
    host_blocks: list[tuple[int, int]] | None = None  # (swap-out, device block then), if swapped out


class Harness:
    """Verbs return whether they were granted; AssertionError when a law is broken."""

    def __init__(self, make: Callable[[Pool], Allocator], pool: Pool) -> None:
        self.allocator = make(pool)
        self.pool = pool
        self.rows: dict[int, Row] = {}
        self.data = {
            Tier.DEVICE: np.full(pool.num_slots, -1, dtype=np.int64),
            Tier.HOST: np.full(pool.num_host_slots, -1, dtype=np.int64),
        }
        self.cache = CacheModel(self.allocator)
        self.texts: dict[tuple[int, ...], int] = {}  # the integer of each beginning of a prompt
        self.num_written = 0
        self.num_swap_outs = 0
        self.sound = True  # the last verb has passed its checks
        self.initial_usage = self.allocator.usage()

    def live(self, on_host: bool = False) -> list[int]:
        return [row for row, state in self.rows.items() if (state.host_blocks is not None) == on_host]

    def idle(self) -> list[int]:
        return [row for row in range(self.pool.max_rows) if row not in self.rows]

    def allocate(self, rows: Sequence[int], num_tokens: int, max_tokens: int, text: Sequence[int] = ()) -> bool:
        """text: what the leading tokens are, if anybody may know it. Full blocks of it have keys."""
        before = self.allocator.usage()
        beginning = self._beginning(text)
        keys = beginning[self.allocator.block_size - 1 :: self.allocator.block_size] if beginning else []
        found = self.cache.found(num_tokens, keys) if keys else []
        num_idle = self.cache.num_idle(found)
        content = np.array(keys, dtype=np.int64)
        num_cached = self.allocator.num_cached_tokens(num_tokens, content)
        assert num_cached == len(found) * self.allocator.block_size, "found other content than is there"
        grant = self._verb("allocate", rows, num_tokens, max_tokens=max_tokens, content=content if keys else None)
        self._check_admission(grant, before, not self.live(), num_tokens, len(found) - num_idle)
        if grant is None:
            fits = max_tokens <= self.allocator.max_admissible_tokens(len(rows))
            assert self.rows or not fits, "an empty pool refused a group it declared admissible"
            return False
        assert grant.num_cached_tokens == num_cached, "granted other content than was announced"
        tokens = beginning + self._new_tokens(num_tokens - len(beginning))
        for row in rows:
            self.rows[row] = Row(list(tokens), max_tokens)
        self._write(grant, tokens[num_cached:])
        self._run_copies(grant)
        if keys:
            self.cache.admit(rows, keys)
        self._observe(before, found)
        return True

    def commit(self, rows: Sequence[int]) -> None:
        before = self.allocator.usage()
        self._verb("commit", rows)
        assert self.allocator.usage() == before, "a commit changed what is held"
        self.cache.commit(rows)

    def append(self, rows: Sequence[int], counts: Sequence[int] | int = 1) -> bool:
        before = self.allocator.usage()
        per_row = np.broadcast_to(counts, len(rows)).tolist()
        num_new, num_copies = self._block_needs(rows, per_row)
        grant = self._verb("append", rows, counts)
        if grant is None:
            assert Capability.RESERVES_GROWTH not in self.allocator.supports, "growth was reserved"
            needed = (num_new + num_copies) * self.allocator.block_size
            assert needed > before.free, "an append that fits was refused"
            return False
        assert sum(len(copies.ranges) for copies in grant.copies) == num_copies, "needless or no copies"
        self._run_copies(grant)
        tokens = self._new_tokens(sum(per_row))
        self._write(grant, tokens)
        for row, end, count in zip(rows, accumulate(per_row), per_row, strict=True):
            self.rows[row].tokens += tokens[end - count : end]
        self._observe(before)
        return True

    def grow(self, rows: Sequence[int], num_steps: int) -> None:
        """Steps at once are steps one by one, and stop only where the next would need more than an append."""
        self.sound = False
        twin, before = deepcopy(self.allocator), self.allocator.usage()
        growth = self.allocator.grow(np.array(rows, dtype=np.int64), num_steps)
        noted = np.empty((growth.num_steps if growth else 0, 5))
        if growth:
            note_growth(noted, growth.taken, len(rows), *growth.before)
        for i in range(len(noted)):
            grant = twin.append(rows)
            assert grant is not None, "a refused step was taken"
            assert not grant.copies, "a step that copies was taken"
            usage = twin.usage()
            pool = [usage.token_states, usage.vacant, usage.free, usage.mapped, usage.cached]
            assert growth.before == before
            assert noted[i].tolist() == pool, f"the pool after step {i}"
            assert growth.free[i] == usage.free
            assert usage.withheld == min(before.withheld, usage.free), "the watermark's slots are not the last to go"
            assert growth.capacities[i].tolist() == twin.capacity(rows).tolist()
            tokens = self._new_tokens(len(rows))
            self._write(grant, tokens)
            for row, token in zip(rows, tokens, strict=True):
                self.rows[row].tokens.append(token)
        assert state_of(self.allocator) == state_of(twin), "another state than step by step"
        if growth is None or growth.num_steps < num_steps:
            self._check_stop(twin, rows)
        self._observe(before)

    def _check_stop(self, twin: Allocator, rows: Sequence[int]) -> None:
        try:
            grant = twin.append(rows)
        except AllocatorMisuse:
            return
        assert grant is None or grant.copies or type(twin).grow is Allocator.grow, "growth stopped for no reason"

    def fork(self, parents: Sequence[int], children: Sequence[int]) -> bool:
        grant = self._verb("fork", parents, children)
        if grant is None:
            assert Capability.FORK_SHARES not in self.allocator.supports, "a sharing fork was refused"
            return False
        self._run_copies(grant)
        for parent, child in zip(parents, children, strict=True):
            self.rows[child] = Row(list(self.rows[parent].tokens), self.rows[parent].max_tokens)
        return True

    def free(self, rows: Sequence[int]) -> None:
        before = self.allocator.usage()
        self._verb("free", rows)
        for row in rows:
            del self.rows[row]
        self.cache.drop(rows)
        self._observe(before)
        if rows and not self.rows:
            usage = self.allocator.usage()._replace(cached=0)
            assert usage == self.initial_usage, "slots leaked: all rows are free"

    def swap_out(self, rows: Sequence[int]) -> bool:
        blocks = {row: self._blocks(row) for row in rows}
        grant = self._verb("swap_out", rows)
        if grant is None:
            needed = len(set().union(*blocks.values())) * self.allocator.block_size
            host_free = self.pool.num_host_slots - self.allocator.usage().host_held
            assert needed > host_free, "a swap_out that fits was refused"
            return False
        self._run_copies(grant)
        self.num_swap_outs += 1
        for row in rows:
            self.rows[row].host_blocks = [(self.num_swap_outs, block) for block in blocks[row]]
        return True

    def swap_in(self, rows: Sequence[int]) -> bool:
        before, empty = self.allocator.usage(), not self.live()
        num_blocks = len({block for row in rows for block in self.rows[row].host_blocks or ()})
        grant = self._verb("swap_in", rows)
        if grant is None:
            available = before.free - (0 if empty else before.withheld)
            assert num_blocks * self.allocator.block_size > available, "a swap_in that fits was refused"
            return False
        self._run_copies(grant)
        for row in rows:
            self.rows[row].host_blocks = None
        assert len({block for row in rows for block in self._blocks(row)}) == num_blocks, "sharing changed"
        if not empty:
            assert self.allocator.usage().withheld == before.withheld, "swap_in used the watermark"
        return True

    def check_admissible(self, num_rows: int) -> None:
        """In the empty pool, `max_admissible_tokens` is exactly how far a group can grow."""
        assert not self.rows, "the pool is not empty"
        most = self.allocator.max_admissible_tokens(num_rows)
        rows = list(range(num_rows))
        if most:
            self.allocate(rows, most, most)  # in an empty pool, which must not refuse it
            self.free(rows)
        for reach in (most, most + 1):
            if 0 < reach <= self.pool.max_tokens:
                # Admitted one by one: as a group they would share the prompt.
                grown = all(self.allocate([row], 1, reach) for row in rows)
                grown = grown and (reach == 1 or self.append(rows, reach - 1))
                assert grown == (reach == most), f"{num_rows} rows of {reach}: {grown}, admissible {most}"
                self.free(list(self.rows))

    def misuse(self, calls: Iterable[tuple[str, tuple, dict]]) -> None:
        """Each call (verb, args, kwargs) must raise AllocatorMisuse and change nothing."""
        self.sound = False
        before = state_of(self.allocator)
        for verb, args, kwargs in calls:
            try:
                result = getattr(self.allocator, verb)(*args, **kwargs)
            except AllocatorMisuse:
                assert state_of(self.allocator) == before, f"a misused {verb}{args} changed the allocator"
            else:
                raise AssertionError(f"misuse {verb}{args} returned {result}")

    def check(self) -> None:
        """Every law that holds between verbs."""
        self.allocator.check_integrity()
        rows = list(range(self.pool.max_rows))
        lengths = [len(self.rows[row].tokens) if row in self.rows else 0 for row in rows]
        assert self.allocator.num_tokens(rows).tolist() == lengths
        for row in self.live():
            tokens = self.rows[row].tokens
            slots = self.allocator.slots([row] * len(tokens), range(len(tokens)))
            assert self.data[Tier.DEVICE][slots].tolist() == tokens, f"row {row} reads other tokens"
        self._check_layout()
        self._check_usage()
        self.sound = True

    def _verb(self, verb: str, *args: Any, **kwargs: Any) -> Grant | None:
        self.sound = False
        before = state_of(self.allocator)
        grant = getattr(self.allocator, verb)(*args, **kwargs)
        if grant is None and verb not in ("free", "commit"):
            assert state_of(self.allocator) == before, f"a refused {verb} changed the allocator"
        if grant is not None and verb not in ("allocate", "append"):
            assert grant.slots.size == 0, f"{verb} grants slots, and adds no tokens"
        return grant

    def _blocks(self, row: int) -> list[int]:
        return self.allocator.block_tables([row])[0].tolist()

    def _block_needs(self, rows: Sequence[int], counts: list[int]) -> tuple[int, int]:
        """Blocks that appending must add, and blocks it must copy: of all who write into one shared
        block every one does, but for the last if nobody else holds it."""
        if self.allocator.layout is not Layout.PAGED:
            return 0, 0
        size = self.allocator.block_size
        lengths = [len(self.rows[row].tokens) for row in rows]
        num_new = sum(-(-(n + k) // size) + -n // size for n, k in zip(lengths, counts, strict=True))
        holders = Counter(block for row in self.live() for block in self._blocks(row))
        writers = Counter(self._blocks(row)[-1] for row, n in zip(rows, lengths, strict=True) if n % size)
        return num_new, sum(k - (k == holders[block]) for block, k in writers.items())

    def _beginning(self, text: Sequence[int]) -> list[int]:
        """An integer for each of the text's tokens, which tells all that stands before it as well."""
        starts = [tuple(text[: i + 1]) for i in range(len(text))]
        return [self.texts.setdefault(start, -2 - len(self.texts)) for start in starts]

    def _observe(self, before: Usage, found: Sequence[int] = ()) -> None:
        if Capability.PREFIX_CACHE in self.allocator.supports:
            self.cache.observe(self.live(), before.free // self.allocator.block_size, found)

    def _new_tokens(self, count: int) -> list[int]:
        self.num_written += count
        return list(range(self.num_written - count, self.num_written))

    def _write(self, grant: Grant, tokens: list[int]) -> None:
        assert grant.slots.dtype == np.int64
        assert grant.slots.shape == (len(tokens),), "not a slot for each new token"
        self.data[Tier.DEVICE][grant.slots] = tokens

    def _run_copies(self, grant: Grant) -> None:
        for copies in grant.copies:
            source, destination = self.data[copies.source], self.data[copies.destination]
            assert len(copies.ranges), "an empty Copies"
            for start, target, size in copies.ranges.tolist():
                assert size > 0, "an empty copy"
                assert 0 <= start <= len(source) - size, "a copy reads outside its tier"
                assert 0 <= target <= len(destination) - size, "a copy writes outside its tier"
                destination[target : target + size] = source[start : start + size].copy()

    def _check_admission(
        self, grant: Grant | None, before: Usage, empty: bool, num_tokens: int, num_shared: int
    ) -> None:
        """num_shared: blocks of the tokens that other rows hold."""
        if grant is not None and not empty:
            assert self.allocator.usage().withheld == before.withheld, "an admission used the watermark"
        if grant is None and self.allocator.layout is Layout.PAGED:
            needed = (-(-num_tokens // self.allocator.block_size) - num_shared) * self.allocator.block_size
            assert needed > before.free - before.withheld, "an admission that fits was refused"

    def _check_layout(self) -> None:
        """What a kernel would read by block table or base slot."""
        rows = self.live()
        histories = [np.array(self.rows[row].tokens) for row in rows]
        positions = [np.arange(len(tokens)) for tokens in histories]
        if self.allocator.layout is Layout.CONTIGUOUS:
            slots = [base + p for base, p in zip(self.allocator.base_slots(rows), positions, strict=True)]
        else:
            size = self.allocator.block_size
            tables = self.allocator.block_tables(rows)
            assert tables.dtype == np.int32
            num_blocks = [-(-len(tokens) // size) for tokens in histories]
            assert tables.shape == (len(rows), max(num_blocks, default=0))
            for table, count in zip(tables, num_blocks, strict=True):
                assert not table[count:].any(), "a block table is not padded with 0"
            slots = [
                table[p // size].astype(np.int64) * size + p % size for table, p in zip(tables, positions, strict=True)
            ]
        for row, row_slots, tokens in zip(rows, slots, histories, strict=True):
            assert np.array_equal(self.data[Tier.DEVICE][row_slots], tokens), f"row {row} misread"

    def _check_usage(self) -> None:
        usage = self.allocator.usage()
        on_device, live = self.live(), list(self.rows)
        slots = [
            int(slot)
            for row in on_device
            for slot in self.allocator.slots([row] * len(self.rows[row].tokens), range(len(self.rows[row].tokens)))
        ]
        assert usage.num_slots == self.pool.num_slots
        assert usage.token_states == len(set(slots)), "token_states differs from a recount"
        parts = (usage.token_states, usage.vacant, usage.rounding, usage.free)
        assert min(parts) >= 0, f"a negative part in {usage}"
        assert sum(parts) == usage.num_slots, f"the parts do not sum to the pool: {usage}"
        room = self.allocator.capacity(live) - self.allocator.num_tokens(live)
        assert room.min(initial=0) >= 0
        assert room.sum() == usage.vacant, "vacant slots differ from the rows' capacities"
        assert 0 <= usage.withheld <= usage.free
        assert 0 <= usage.cached <= usage.free
        assert (usage.mapped == usage.held) == (len(slots) == len(set(slots))), "mapped is off"
        assert usage.mapped - usage.held >= len(slots) - len(set(slots)), "mapped misses sharing"
        host_blocks = {block for row in self.live(on_host=True) for block in self.rows[row].host_blocks or ()}
        assert usage.host_held == len(host_blocks) * getattr(self.allocator, "block_size", 0), "host miscounted"
