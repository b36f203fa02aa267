"""One tier's blocks: block tables, reference counts and a free list, all numpy arrays.

A row's tokens fill its blocks in order, so only its last block, its *tail*, can be partly empty.
Rows may share blocks. Whoever writes into a partly filled shared tail copies it first, so all
sharers of a block agree on how much of it is filled, and for all of them it is the tail. Its vacant
slots are counted once, for the one row that *owns* the tail.
"""

import numpy as np

from allocators import compiled
from kvbench.allocator import IntArray, consecutive


class BlockTier:
    """``num_blocks`` blocks of ``block_size`` slots and the rows that live on them.

    tables: int32 ``[max_rows, max_blocks]``, block of each ``block_size`` tokens; 0 beyond the row's.
    lengths: int64 ``[max_rows]``, tokens per row; 0 for a row that is not on this tier.
    extents: int64 ``[max_rows]``, slots in the row's blocks: ``lengths`` rounded up to whole blocks.
    references: int32 ``[num_blocks]``, how many rows hold each block.
    owns_tail: bool ``[max_rows]``; exactly one sharer of each partly filled block has it set.
    vacant: empty slots in the blocks that are held.
    mapped: blocks held, counted once per row.
    """

    def __init__(self, num_blocks: int, block_size: int, max_rows: int, max_tokens: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.tables = np.zeros((max_rows, -(-max_tokens // block_size)), dtype=np.int32)
        self.lengths = np.zeros(max_rows, dtype=np.int64)
        self.extents = np.zeros(max_rows, dtype=np.int64)
        self.references = np.zeros(num_blocks, dtype=np.int32)
        self.owns_tail = np.zeros(max_rows, dtype=bool)
        self.vacant = 0
        self.mapped = 0
        self.num_free = num_blocks
        # A stack whose top is `_free[num_free - 1]`: block 0 is taken first.
        self._free = np.arange(num_blocks)[::-1].copy()
        # What the compiled verbs read and write, `_free` up to `num_free`.
        self._arrays = (self.lengths, self.extents, self.tables, self.references, self.owns_tail, self._free)

    @property
    def num_available(self) -> int:
        """Blocks that can be taken."""
        return self.num_free

    @property
    def num_held(self) -> int:
        return self.num_blocks - self.num_available

    @property
    def shares(self) -> bool:
        """Whether any block is held by more than one row."""
        return self.mapped != self.num_held

    def make_room(self, count: int) -> bool:
        """Bring ``count`` blocks into the free list, if so many are available; otherwise change nothing."""
        return count <= self.num_free

    def take(self, count: int) -> IntArray:
        """Pop free blocks with one reference each. A view: valid until blocks are returned."""
        self.num_free -= count
        blocks = self._free[self.num_free : self.num_free + count]
        self.references[blocks] = 1
        return blocks

    def blocks_of(self, rows: IntArray) -> tuple[IntArray, IntArray]:
        """All blocks of the rows in order, int64 ``[sum(counts)]``, and the counts per row."""
        counts = self.extents[rows] // self.block_size
        columns = np.arange(counts.max(initial=0))
        blocks = self.tables[rows[:, None], columns][columns < counts[:, None]]
        return blocks.astype(np.int64), counts

    def slots_at(self, rows: IntArray, positions: IntArray) -> IntArray:
        """Slot of token ``positions[i]``, which it must hold, of ``rows[i]``."""
        columns, offsets = np.divmod(positions, self.block_size)
        slots: IntArray = self.tables[rows, columns] * np.int64(self.block_size) + offsets
        return slots

    def tails_of(self, rows: IntArray) -> IntArray:
        return self.tables[rows, self.extents[rows] // self.block_size - 1].astype(np.int64)

    def room_in_tails(self, rows: IntArray) -> IntArray:
        return self.extents[rows] - self.lengths[rows]

    def place(self, rows: IntArray, num_tokens: int) -> IntArray:
        """Put a new group on this tier: the rows share the blocks, and the slots, of ``num_tokens`` tokens."""
        slots = np.empty(num_tokens, dtype=np.int64)
        count = compiled.place(rows, *self._arrays, self.num_free, self.block_size, slots)
        self.num_free -= count
        self.mapped += count * rows.size
        self.vacant += count * self.block_size - num_tokens
        return slots

    def append_one(self, rows: IntArray, counts: IntArray, max_tokens: int) -> IntArray | None:
        """A decode step without exceptions: the slot of each row's next token.

        None, with nothing changed, if the ``counts`` of new tokens are not all 1, if the rows are not live,
        distinct and shorter than ``max_tokens``, if one of them would write into a shared block, or if free
        blocks do not suffice.
        """
        slots = np.empty(rows.size, dtype=np.int64)
        count = compiled.append_one(rows, counts, *self._arrays, self.num_free, self.block_size, max_tokens, slots)
        if count < 0:
            return None
        self.num_free -= count
        self.mapped += count
        self.vacant += count * self.block_size - rows.size
        return slots

    def grow(self, rows: IntArray, num_steps: int, max_tokens: int) -> tuple[IntArray, IntArray]:
        """Up to ``num_steps`` decode steps that copy nothing, of rows that stay within ``max_tokens``.

        Blocks taken up to each step, int64 ``[steps]``, and the slots of each row's blocks, ``[steps, n]``.
        """
        taken = np.empty(num_steps, dtype=np.int64)
        capacities = np.empty((num_steps, rows.size), dtype=np.int64)
        done, count = compiled.grow(rows, *self._arrays, self.num_free, self.block_size, max_tokens, capacities, taken)
        self.num_free -= count
        self.mapped += count
        self.vacant += count * self.block_size - done * rows.size
        return taken[:done], capacities[:done]

    def share(self, parents: IntArray, children: IntArray) -> None:
        """Children hold their parents' blocks; the parents keep owning their tails."""
        blocks, counts = self.blocks_of(parents)
        width = counts.max(initial=0)
        np.add.at(self.references, blocks, 1)
        self.tables[children, :width] = self.tables[parents, :width]
        self.lengths[children] = self.lengths[parents]
        self.extents[children] = self.extents[parents]
        self.mapped += blocks.size

    def writers_to_copy(self, rows: IntArray) -> IntArray:
        """Those of the rows, all about to be appended to, that must copy their tail first.

        If every sharer of a block is among them, the block's owner writes in place.
        """
        tails = self.tails_of(rows)
        shared = (self.references[tails] > 1) & (self.room_in_tails(rows) > 0)
        rows = rows[shared]
        if rows.size == 0:
            return rows
        blocks, inverse, num_writers = np.unique(tails[shared], return_inverse=True, return_counts=True)
        all_write = (num_writers == self.references[blocks])[inverse]
        return rows[~(all_write & self.owns_tail[rows])]

    def copy_tails(self, rows: IntArray) -> tuple[IntArray, IntArray]:
        """Give each row a tail of its own: the blocks to copy from and to, int64 ``[n]`` each."""
        tails = self.tails_of(rows)
        copies = self.take(rows.size).copy()
        np.subtract.at(self.references, tails, 1)
        self.tables[rows, self.extents[rows] // self.block_size - 1] = copies
        self.vacant += int(self.room_in_tails(rows).sum())
        left = tails[self.owns_tail[rows]]
        self.owns_tail[rows] = True
        self.pass_on(left)
        return tails, copies

    def extend(self, rows: IntArray, num_new: IntArray) -> None:
        """Map ``num_new[i]`` (>= 1) free blocks after those of ``rows[i]``."""
        total = int(num_new.sum())
        columns = consecutive(self.extents[rows] // self.block_size, num_new)
        self.tables[np.repeat(rows, num_new), columns] = self.take(total)
        self.extents[rows] += num_new * self.block_size
        self.owns_tail[rows] = True
        self.mapped += total
        self.vacant += total * self.block_size

    def receive(self, rows: IntArray, source: "BlockTier") -> tuple[IntArray, IntArray]:
        """Map the rows as on ``source``, sharing included: the blocks to copy from and to, int64."""
        blocks, counts = source.blocks_of(rows)
        moved, inverse, num_sharers = np.unique(blocks, return_inverse=True, return_counts=True)
        new = self.take(moved.size).copy()
        self.references[new] = num_sharers
        held = np.arange(counts.max(initial=0)) < counts[:, None]
        tables = np.zeros(held.shape, dtype=np.int32)
        tables[held] = new[inverse]
        self.tables[rows, : held.shape[1]] = tables
        self.lengths[rows] = source.lengths[rows]
        self.extents[rows] = source.extents[rows]
        self.mapped += blocks.size
        owners = self._first_with_tail(rows)
        self.owns_tail[owners] = True
        self.vacant += int(self.room_in_tails(owners).sum())
        return moved, new

    def release(self, rows: IntArray) -> None:
        """Drop the rows; blocks nobody else holds are free, owned tails others hold pass on."""
        count, vacant = compiled.release(rows, *self._arrays, self.num_free, self.block_size)
        if count >= 0:
            self.num_free += count
            self.mapped -= count
            self.vacant -= vacant
            return
        blocks, counts = self.blocks_of(rows)
        owners = rows[self.owns_tail[rows]]
        tails, room = self.tails_of(owners), self.room_in_tails(owners)
        np.subtract.at(self.references, blocks, 1)
        unused = blocks[self.references[blocks] == 0]
        if self.shares:
            unused = np.unique(unused)
        self._free[self.num_free : self.num_free + unused.size] = unused
        self.num_free += unused.size
        self.mapped -= blocks.size
        self.tables[rows, : counts.max(initial=0)] = 0
        self.lengths[rows] = self.extents[rows] = 0
        self.owns_tail[rows] = False
        still_held = self.references[tails] > 0
        self.vacant -= int(room[~still_held].sum())
        self.pass_on(tails[still_held & (room > 0)])

    def pass_on(self, tails: IntArray) -> None:
        """Give each of these partly filled blocks, which lost its owner, to a row that holds it."""
        if tails.size:
            candidates = np.flatnonzero(self.lengths)
            candidates = candidates[np.isin(self.tails_of(candidates), tails)]
            self.owns_tail[self._first_with_tail(candidates)] = True

    def _first_with_tail(self, rows: IntArray) -> IntArray:
        """One row per distinct tail."""
        _, first = np.unique(self.tails_of(rows), return_index=True)
        return rows[first]

    def audit(self) -> None:
        """AssertionError unless every block is free or held by as many rows as it counts."""
        rows = np.flatnonzero(self.lengths)
        blocks, counts = self.blocks_of(rows)
        holders = np.bincount(blocks, minlength=self.num_blocks)
        free = np.bincount(self._unheld(), minlength=self.num_blocks)
        for block in np.flatnonzero((holders != self.references) | (free + (holders > 0) != 1)):
            raise AssertionError(
                f"block {block}: held by {holders[block]} rows, {self.references[block]} counted, "
                f"{free[block]} times available"
            )
        assert self.mapped == counts.sum(), f"mapped {self.mapped} blocks, recount {counts.sum()}"
        extents = -(-self.lengths // self.block_size) * self.block_size
        assert np.array_equal(self.extents, extents), "a row's blocks differ from what its tokens need"
        used = np.arange(self.tables.shape[1]) < self.extents[:, None] // self.block_size
        assert not self.tables[~used].any(), "a block table goes on beyond its row's tokens"
        self._audit_tails(rows)

    def _unheld(self) -> IntArray:
        """Blocks that nobody holds."""
        return self._free[: self.num_free]

    def _audit_tails(self, rows: IntArray) -> None:
        owners = rows[self.owns_tail[rows]]
        vacant = self.room_in_tails(owners).sum()
        assert self.vacant == vacant, f"{self.vacant} vacant slots, recount {vacant}"
        assert not np.delete(self.owns_tail, rows).any(), "a row that holds nothing owns a tail"
        rows = rows[self.room_in_tails(rows) > 0]
        tails, room = self.tails_of(rows), self.room_in_tails(rows)
        partial, sharers = np.unique(tails, return_counts=True)
        owned = np.sort(tails[self.owns_tail[rows]])
        assert np.array_equal(partial, owned), "a partly filled block has no owner or several"
        assert np.array_equal(sharers, self.references[partial]), "a partly filled block is not a tail"
        fills = np.unique(np.stack([tails, room]), axis=1)
        assert fills.shape[1] == partial.size, "sharers of a block differ in how full it is"
