"""Beginnings that prompts share, known before the first arrival: computed once and kept for the whole run."""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from kvbench.allocator import Allocator, Capability, Grant, IntArray
from kvbench.request import Request
from kvbench.sequences import SequenceTable

Prefixes = dict[int, NDArray[np.int32]]  # tokens by id


def resident(requests: Iterable[Request], supports: frozenset[Capability]) -> Prefixes:
    """The prefixes to keep for an allocator with ``supports``; none unless forked rows share what they hold.

    One that reserves cannot: a row continues in its parent's reservation, and a prefix has none beyond itself.
    One with a cache of its own needs no help.
    """
    if Capability.FORK_SHARES not in supports or supports & {Capability.RESERVES_GROWTH, Capability.PREFIX_CACHE}:
        return {}
    return {r.prefix_id: r.prompt[: r.num_prefix_tokens] for r in requests if r.prefix_id is not None}


class ResidentPrefixes:
    """A row for each prefix. Nothing is appended to it: rows of requests are forked from it.

    rows: int64 ``[num_prefixes]``.
    """

    def __init__(self, allocator: Allocator, table: SequenceTable) -> None:
        self._allocator = allocator
        self._table = table
        self._row_of: dict[int, int] = {}
        self.rows: IntArray = np.empty(0, np.int64)

    def add(self, prefix_id: int, tokens: NDArray[np.int32]) -> tuple[IntArray, Grant]:
        """Take a row for a prefix, which is yet to be computed: ``[1]``, and where to."""
        row = np.array([self._table.acquire_prefix(tokens)])
        grant = self._allocator.allocate(row, len(tokens), max_tokens=len(tokens))
        if grant is None:
            raise RuntimeError("the prefixes do not fit the pool: that should have been noticed before the run")
        self._row_of[prefix_id] = int(row[0])
        self.rows = np.append(self.rows, row)
        return row, grant

    def num_cached(self, request: Request) -> int:
        """Leading tokens of the request's prompt whose KV is in the pool."""
        return request.num_prefix_tokens if request.prefix_id in self._row_of else 0

    def extend(self, request: Request, rows: IntArray, num_new: int) -> Grant | None:
        """Admit a group behind its prefix: all ``rows`` start with it and ``num_new`` (>= 1) more tokens.

        They share the slots of both, as after :meth:`Allocator.allocate`, and the grant's slots are those of the
        new tokens. Keeps the watermark. All or nothing.
        """
        assert request.prefix_id is not None
        allocator, first, siblings = self._allocator, rows[:1], rows[1:]
        withheld = allocator.usage().withheld
        if allocator.fork([self._row_of[request.prefix_id]], first) is None:
            return None
        grant = allocator.append(first, num_new)
        is_admitted = grant is not None and allocator.usage().withheld == withheld
        if not is_admitted or allocator.fork(np.repeat(first, len(siblings)), siblings) is None:
            allocator.free(first)
            return None
        return grant

    def free(self) -> None:
        self._allocator.free(self.rows)
        self._table.release(self.rows)
        self.rows = self.rows[:0]
        self._row_of.clear()
