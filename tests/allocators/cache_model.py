"""What an allocator with PREFIX_CACHE must find, by a slow model that follows each block's content.

It learns where content is from the block tables of live rows alone, and knows that a block keeps what was
committed in it until somebody needs the room, and who gives way first.
"""

from collections.abc import Iterable, Sequence

from kvbench.allocator import Allocator


class CacheModel:
    """Content by block. ``observe`` is to be called after each verb that was granted."""

    def __init__(self, allocator: Allocator) -> None:
        self._allocator = allocator
        self._size = allocator.block_size
        self._block_of: dict[int, int] = {}  # by key
        self._place_of: dict[int, tuple[int, int]] = {}  # by block: its key, and which of its prompt's blocks it is
        self._idle: dict[int, tuple[int, int]] = {}  # kept blocks that no row holds: the lowest gives way first
        self._uncommitted: dict[int, list[int]] = {}
        self._num_observed = 0

    def found(self, num_tokens: int, keys: Sequence[int]) -> list[int]:
        """Blocks that an admission must find."""
        blocks: list[int] = []
        for key in keys[: (num_tokens - 1) // self._size]:
            if key not in self._block_of:
                break
            blocks.append(self._block_of[key])
        return blocks

    def num_idle(self, blocks: Iterable[int]) -> int:
        return sum(block in self._idle for block in blocks)

    def admit(self, rows: Iterable[int], keys: Sequence[int]) -> None:
        self._uncommitted |= {row: list(keys) for row in rows}

    def commit(self, rows: Iterable[int]) -> None:
        for row in rows:
            keys = self._uncommitted.pop(row, [])
            for place, (key, block) in enumerate(zip(keys, self._blocks(row), strict=False)):
                if self._block_of.setdefault(key, block) != block:
                    break
                self._place_of[block] = key, place

    def drop(self, rows: Iterable[int]) -> None:
        for row in rows:
            self._uncommitted.pop(row, None)

    def observe(self, live: Iterable[int], num_free_before: int, found: Sequence[int] = ()) -> None:
        """See which blocks became idle and which gave way. num_free_before: blocks; found: those of the verb."""
        held = {block for row in live for block in self._blocks(row)}
        gone = {block: self._idle.pop(block) for block in list(self._idle) if block in held}
        evicted = [rank for block, rank in gone.items() if block not in found]
        num_taken = num_free_before - self._allocator.usage().free // self._size - (len(gone) - len(evicted))
        num_blank = num_free_before - len(self._idle) - len(gone)
        assert len(evicted) == max(0, num_taken - num_blank), "room was made that nobody needed"
        assert not evicted or not self._idle or max(evicted) <= min(self._idle.values()), "the wrong block gave way"
        for block in gone.keys() - set(found):
            del self._block_of[self._place_of.pop(block)[0]]
        self._num_observed += 1
        for block in self._place_of.keys() - held - self._idle.keys():
            self._idle[block] = self._num_observed, -self._place_of[block][1]
        assert self._allocator.usage().cached == len(self._idle) * self._size, "cached slots miscounted"

    def _blocks(self, row: int) -> list[int]:
        return self._allocator.block_tables([row])[0].tolist()
