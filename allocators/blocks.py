"""One tier's blocks: block tables, reference counts and a free list, all numpy arrays.

A row's tokens fill its blocks in order, so only its last block, its *tail*, can be partly empty.
Rows may share blocks. Whoever writes into a partly filled shared tail copies it first, so all
sharers of a block agree on how much of it is filled, and for all of them it is the tail. Its vacant
slots are counted once, for the one row that *owns* the tail.
"""

import numpy as np
from numpy.typing import NDArray

from kvbench.allocator import IntArray


class BlockTier:
    """``num_blocks`` blocks of ``block_size`` slots and the rows that live on them.

    tables: int32 ``[max_rows, max_blocks]``, block of each ``block_size`` tokens; 0 beyond the row's.
    lengths: int64 ``[max_rows]``, tokens per row; 0 for a row that is not on this tier.
    limits: int64 ``[max_rows]``, tokens up to which a row's blocks (or ``max_tokens``) let it grow.
    references: int32 ``[num_blocks]``, how many rows hold each block.
    owns_tail: bool ``[max_rows]``; exactly one sharer of each partly filled block has it set.
    vacant: empty slots in the blocks that are held.
    mapped: blocks held, counted once per row.
    """

    def __init__(self, num_blocks: int, block_size: int, max_rows: int, max_tokens: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.max_tokens = max_tokens
        self.tables = np.zeros((max_rows, -(-max_tokens // block_size)), dtype=np.int32)
        self.lengths = np.zeros(max_rows, dtype=np.int64)
        self.limits = np.zeros(max_rows, dtype=np.int64)
        self.references = np.zeros(num_blocks, dtype=np.int32)
        self.owns_tail = np.zeros(max_rows, dtype=bool)
        self.vacant = 0
        self.mapped = 0
        self.num_free = num_blocks
        # A stack whose top is `_free[num_free - 1]`: block 0 is taken first.
        self._free = np.arange(num_blocks, dtype=np.int32)[::-1].copy()

    @property
    def num_held(self) -> int:
        return self.num_blocks - self.num_free

    @property
    def shares(self) -> bool:
        """Whether any block is held by more than one row."""
        return self.mapped != self.num_held

    def num_blocks_of(self, rows: IntArray) -> IntArray:
        return -(-self.lengths[rows] // self.block_size)

    def take(self, count: int) -> NDArray[np.int32]:
        """Pop free blocks with one reference each. A view: valid until blocks are returned."""
        self.num_free -= count
        blocks = self._free[self.num_free : self.num_free + count]
        self.references[blocks] = 1
        return blocks

    def blocks_of(self, rows: IntArray) -> tuple[IntArray, IntArray]:
        """All blocks of the rows in order, int64 ``[sum(counts)]``, and the counts per row."""
        counts = self.num_blocks_of(rows)
        columns = np.arange(counts.max(initial=0))
        blocks = self.tables[rows[:, None], columns][columns < counts[:, None]]
        return blocks.astype(np.int64), counts

    def tails_of(self, rows: IntArray) -> NDArray[np.int32]:
        return self.tables[rows, (self.lengths[rows] - 1) // self.block_size]

    def room_in_tails(self, rows: IntArray) -> IntArray:
        return -self.lengths[rows] % self.block_size

    def place(self, rows: IntArray, num_tokens: int) -> None:
        """Put a new group on this tier: the rows share the blocks of ``num_tokens`` tokens."""
        count = -(-num_tokens // self.block_size)
        blocks = self.take(count)
        if rows.size > 1:
            self.references[blocks] = rows.size
        self.tables[rows, :count] = blocks
        self._start(rows, num_tokens, count)
        self.owns_tail[rows[0]] = True
        self.mapped += count * rows.size
        self.vacant += count * self.block_size - num_tokens

    def share(self, parents: IntArray, children: IntArray) -> None:
        """Children hold their parents' blocks; the parents keep owning their tails."""
        blocks, counts = self.blocks_of(parents)
        width = counts.max(initial=0)
        np.add.at(self.references, blocks, 1)
        self.tables[children, :width] = self.tables[parents, :width]
        self._start(children, self.lengths[parents], counts)
        self.mapped += blocks.size

    def writers_to_copy(self, rows: IntArray) -> IntArray:
        """Those of the rows, all about to be appended to, that must copy their tail first.

        If every sharer of a block is among them, the block's owner writes in place.
        """
        tails = self.tails_of(rows)
        shared = (self.references[tails] > 1) & (self.room_in_tails(rows) > 0)
        rows = rows[shared]
        blocks, inverse, num_writers = np.unique(tails[shared], return_inverse=True, return_counts=True)
        all_write = (num_writers == self.references[blocks])[inverse]
        return rows[~(all_write & self.owns_tail[rows])]

    def copy_tails(self, rows: IntArray) -> tuple[IntArray, IntArray]:
        """Give each row a tail of its own: the blocks to copy from and to, int64 ``[n]`` each."""
        tails = self.tails_of(rows)
        copies = self.take(rows.size).astype(np.int64)
        np.subtract.at(self.references, tails, 1)
        self.tables[rows, (self.lengths[rows] - 1) // self.block_size] = copies
        self.vacant += int(self.room_in_tails(rows).sum())
        left = tails[self.owns_tail[rows]]
        self.owns_tail[rows] = True
        self.pass_on(left)
        return tails.astype(np.int64), copies

    def extend(self, rows: IntArray, num_new: IntArray) -> None:
        """Map ``num_new[i]`` free blocks after the blocks of ``rows[i]``."""
        total = int(num_new.sum())
        counts = self.num_blocks_of(rows)
        # Within its row, new block j of the batch goes to column j - (new blocks of rows before it).
        start = counts - (np.cumsum(num_new) - num_new)
        columns = np.repeat(start, num_new) + np.arange(total)
        self.tables[np.repeat(rows, num_new), columns] = self.take(total)
        self.limits[rows] = np.minimum((counts + num_new) * self.block_size, self.max_tokens)
        self.owns_tail[rows] = True
        self.mapped += total
        self.vacant += total * self.block_size

    def receive(self, rows: IntArray, source: "BlockTier") -> tuple[IntArray, IntArray]:
        """Map the rows as on ``source``, sharing included: the blocks to copy from and to, int64."""
        blocks, counts = source.blocks_of(rows)
        moved, inverse, num_sharers = np.unique(blocks, return_inverse=True, return_counts=True)
        new = self.take(moved.size).astype(np.int64)
        self.references[new] = num_sharers
        held = np.arange(counts.max(initial=0)) < counts[:, None]
        tables = np.zeros(held.shape, dtype=np.int32)
        tables[held] = new[inverse]
        self.tables[rows, : held.shape[1]] = tables
        self._start(rows, source.lengths[rows], counts)
        self.mapped += blocks.size
        owners = self._first_with_tail(rows)
        self.owns_tail[owners] = True
        self.vacant += int(self.room_in_tails(owners).sum())
        return moved, new

    def release(self, rows: IntArray) -> None:
        """Drop the rows; blocks nobody else holds are free, owned tails others hold pass on."""
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
        self.lengths[rows] = self.limits[rows] = 0
        self.owns_tail[rows] = False
        still_held = self.references[tails] > 0
        self.vacant -= int(room[~still_held].sum())
        self.pass_on(tails[still_held & (room > 0)])

    def pass_on(self, tails: NDArray[np.int32]) -> None:
        """Give each of these partly filled blocks, which lost its owner, to a row that holds it."""
        if tails.size:
            candidates = np.flatnonzero(self.lengths)
            candidates = candidates[np.isin(self.tails_of(candidates), tails)]
            self.owns_tail[self._first_with_tail(candidates)] = True

    def _first_with_tail(self, rows: IntArray) -> IntArray:
        """One row per distinct tail."""
        _, first = np.unique(self.tails_of(rows), return_index=True)
        return rows[first]

    def _start(self, rows: IntArray, lengths: IntArray | int, counts: IntArray | int) -> None:
        self.lengths[rows] = lengths
        self.limits[rows] = np.minimum(counts * self.block_size, self.max_tokens)

    def audit(self) -> None:
        """AssertionError unless every block is free or held by as many rows as it counts."""
        rows = np.flatnonzero(self.lengths)
        blocks, counts = self.blocks_of(rows)
        holders = np.bincount(blocks, minlength=self.num_blocks)
        free = np.bincount(self._free[: self.num_free], minlength=self.num_blocks)
        for block in np.flatnonzero((holders != self.references) | (free + (holders > 0) != 1)):
            raise AssertionError(
                f"block {block}: held by {holders[block]} rows, {self.references[block]} counted, "
                f"{free[block]} times in the free list"
            )
        assert self.mapped == counts.sum(), f"mapped {self.mapped} blocks, recount {counts.sum()}"
        limits = np.minimum(counts * self.block_size, self.max_tokens)
        assert np.array_equal(self.limits[rows], limits), "a row's limit differs from its blocks"
        assert not np.delete(self.limits, rows).any(), "a row that holds nothing has a limit"
        used = np.arange(self.tables.shape[1]) < -(-self.lengths[:, None] // self.block_size)
        assert not self.tables[~used].any(), "a block table goes on beyond its row's tokens"
        self._audit_tails(rows)

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
