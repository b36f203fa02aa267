"""Paged allocation whose admissions find prompts that were computed before by their content."""

from collections import OrderedDict

import numpy as np
from numpy.typing import ArrayLike

from allocators.blocks import BlockTier
from allocators.paged import PagedAllocator
from kvbench.allocator import AllocatorMisuse, Capability, Grant, IntArray, Pool, Usage, as_indices


class CachingTier(BlockTier):
    """Blocks that can be kept under a key of their content, also when no row holds them any more.

    A kept block that no row holds is *idle*: outside the free list, but available. Idle blocks are evicted into
    the list when it runs short: first those idle for longest, and of those that became so at once the last of
    their prompt. Nothing is written to a kept block, which is full, before it is evicted.

    Whoever holds a kept block holds those before it in its prompt, and lets go of it no later. So a block that
    is kept is always reached by the keys before its own.
    """

    def __init__(self, num_blocks: int, block_size: int, max_rows: int, max_tokens: int) -> None:
        super().__init__(num_blocks, block_size, max_rows, max_tokens)
        self._block_of: dict[int, int] = {}  # by key
        self._key_of: dict[int, int] = {}  # by block
        self._column = np.full(num_blocks, -1)  # where in its prompt a kept block stands; -1: not kept
        self._idle: OrderedDict[int, None] = OrderedDict()  # blocks, the next to be evicted first

    @property
    def num_idle(self) -> int:
        return len(self._idle)

    @property
    def num_available(self) -> int:
        return self.num_free + len(self._idle)

    def find(self, keys: IntArray) -> IntArray:
        """The blocks kept under the leading keys, up to the first key without one."""
        blocks = []
        for key in keys.tolist():
            block = self._block_of.get(key)
            if block is None:
                break
            blocks.append(block)
        return np.array(blocks, dtype=np.int64)

    def keep(self, row: int, keys: IntArray) -> None:
        """Keep the row's leading blocks under ``keys``, up to the first whose content another block has already.

        Those behind it would become unreachable if that other block, which this row does not hold, is evicted.
        """
        blocks = self.tables[row, : keys.size].tolist()
        for column, (block, key) in enumerate(zip(blocks, keys.tolist(), strict=True)):
            if self._block_of.setdefault(key, block) != block:
                return
            self._key_of[block] = key
            self._column[block] = column

    def place_behind(self, found: IntArray, rows: IntArray, num_tokens: int) -> IntArray:
        """As `place`, with the ``found`` blocks as the first of the group: the slots of the tokens behind them."""
        for block in found.tolist():
            self._idle.pop(block, None)
        num_cached = found.size * self.block_size
        num_new = -(-(num_tokens - num_cached) // self.block_size)
        self.make_room(num_new)
        if not found.size:
            return self.place(rows, num_tokens)
        first, siblings = rows[:1], rows[1:]
        self.tables[first, : found.size] = found
        self.references[found] += 1
        self.extents[first] = num_cached
        self.mapped += found.size
        self.extend(first, np.array([num_new]))
        self.lengths[first] = num_tokens
        self.vacant -= num_tokens - num_cached
        self.share(np.repeat(first, siblings.size), siblings)
        positions = np.arange(num_cached, num_tokens)
        return self.slots_at(np.repeat(first, positions.size), positions)

    def make_room(self, count: int) -> bool:
        if count > self.num_available:
            return False
        while self.num_free < count:
            block, _ = self._idle.popitem(last=False)
            del self._block_of[self._key_of.pop(block)]
            self._column[block] = -1
            self._free[self.num_free] = block
            self.num_free += 1
        return True

    def make_room_for_step(self, rows: IntArray) -> bool:
        """Whether there is room for a token more of each row, none of which has to copy."""
        return self.make_room(int(np.count_nonzero(self.room_in_tails(rows) == 0)))

    def grow(self, rows: IntArray, num_steps: int, max_tokens: int) -> tuple[IntArray, IntArray]:
        num_steps = min(num_steps, max_tokens - int(self.lengths[rows].max(initial=0)))
        taken, capacities = super().grow(rows, num_steps, max_tokens)
        if self.writers_to_copy(rows).size:
            return taken, capacities
        while taken.size < num_steps and self.make_room_for_step(rows):
            more, later = super().grow(rows, num_steps - taken.size, max_tokens)
            taken = np.append(taken, taken[-1:].sum() + more)
            capacities = np.append(capacities, later, axis=0)
        return taken, capacities

    def release(self, rows: IntArray) -> None:
        before = self.num_free
        super().release(rows)
        released = self._free[before : self.num_free].copy()
        columns = self._column[released]
        blank = released[columns < 0]
        self.num_free = before + blank.size
        self._free[before : self.num_free] = blank
        last_first = np.argsort(-columns, kind="stable")[: released.size - blank.size]
        self._idle.update(dict.fromkeys(released[last_first].tolist()))

    def audit(self) -> None:
        super().audit()
        kept = np.flatnonzero(self._column >= 0)
        assert self._key_of.keys() == set(kept.tolist()), "a block has a key or a column, not both"
        assert self._block_of == {key: block for block, key in self._key_of.items()}, "keys and blocks differ"
        assert self._idle.keys() == set(kept[self.references[kept] == 0].tolist()), "a kept block is lost or held"

    def _unheld(self) -> IntArray:
        return np.concatenate([super()._unheld(), np.array(list(self._idle), dtype=np.int64)])


class PagedPrefixAllocator(PagedAllocator):
    """`PagedAllocator` that keeps the full blocks of committed prompts while nobody needs their room.

    Kept blocks count as free. What a row generates is not kept: an admission names its content by the prompt
    alone, and tokens to come have no name yet.
    """

    supports = PagedAllocator.supports | {Capability.PREFIX_CACHE}
    _device: CachingTier

    def __init__(self, pool: Pool, *, block_size: int = 16, watermark: float = 0.01) -> None:
        super().__init__(pool, block_size=block_size, watermark=watermark)
        self._uncommitted: dict[int, IntArray] = {}  # by row: the keys of its prompt's blocks

    def allocate(
        self, rows: ArrayLike, num_tokens: int, *, max_tokens: int, content: IntArray | None = None
    ) -> Grant | None:
        rows = self._free_rows(rows)
        self._check_prompt(rows, num_tokens, max_tokens)
        device, keys = self._device, self._keys(num_tokens, content)
        found = self._find(num_tokens, keys)
        num_idle = np.count_nonzero(device.references[found] == 0)
        num_new = -(-num_tokens // self.block_size) - found.size
        if num_new + num_idle > self._num_admissible_blocks():
            return None
        slots = device.place_behind(found, rows, num_tokens)
        if keys.size:
            self._uncommitted |= dict.fromkeys(rows.tolist(), keys)
        return Grant((), slots, num_tokens - slots.size)

    def _append(self, rows: IntArray, lengths: IntArray, counts: IntArray) -> Grant | None:
        device = self._device
        if (counts > 1).any() or device.writers_to_copy(rows).size:
            return super()._append(rows, lengths, counts)
        # An ordinary decode step, for which the free list was too short.
        if not device.make_room_for_step(rows):
            return None
        slots = device.append_one(rows, counts, self.pool.max_tokens)
        assert slots is not None
        return Grant((), slots)

    def num_cached_tokens(self, num_tokens: int, content: IntArray) -> int:
        return self._find(num_tokens, self._keys(num_tokens, content)).size * self.block_size

    def commit(self, rows: ArrayLike) -> None:
        rows, _ = self._live_rows(rows, self._device.lengths)
        for row in rows.tolist():
            keys = self._uncommitted.pop(row, None)
            if keys is not None:
                self._device.keep(row, keys)

    def free(self, rows: ArrayLike) -> None:
        super().free(rows)
        for row in as_indices(rows).tolist():
            self._uncommitted.pop(row, None)

    def usage(self) -> Usage:
        return super().usage()._replace(cached=self._device.num_idle * self.block_size)

    def check_integrity(self) -> None:
        super().check_integrity()
        assert self._device.lengths[list(self._uncommitted)].all(), "content of a row that is gone"

    def _tier(self, num_blocks: int) -> CachingTier:
        return CachingTier(num_blocks, self.block_size, self.pool.max_rows, self.pool.max_tokens)

    def _keys(self, num_tokens: int, content: IntArray | None) -> IntArray:
        keys = as_indices([] if content is None else content)
        if keys.size > num_tokens // self.block_size:
            raise AllocatorMisuse(f"{keys.size} keys for the full blocks of {num_tokens} tokens")
        return keys

    def _find(self, num_tokens: int, keys: IntArray) -> IntArray:
        """The kept blocks that the tokens begin with. At least one token is left to compute."""
        return self._device.find(keys[: (num_tokens - 1) // self.block_size])
