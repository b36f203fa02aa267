"""State of every live sequence, as arrays indexed by row."""

import numpy as np
from numpy.typing import NDArray

from kvbench.allocator import IntArray
from kvbench.request import Request


class SequenceTable:
    """Rows of live sequences. Arrays are ``[max_rows]`` unless said otherwise.

    tokens: int32 ``[max_rows, max_tokens + 1]``, prompt and generated token ids (the last has no KV).
    length: tokens known (prompt + generated). limit: length at which the sequence ends.
    computed: leading tokens whose KV is in the pool.
    uid: which sequence the row serves, unique over the run; -1 for a free row.
    member: index of the sequence in its request. is_beam: it belongs to a beam search.
    stops_at_eos, temperature (0: greedy), top_p, seed, request_id: as the request asks.
    """

    def __init__(self, max_rows: int, max_tokens: int) -> None:
        self.tokens = np.zeros((max_rows, max_tokens + 1), np.int32)
        self.length, self.limit, self.computed, self.member, self.seed, self.request_id = (
            np.zeros(max_rows, np.int64) for _ in range(6)
        )
        self.uid = np.full(max_rows, -1, np.int64)
        self.temperature, self.top_p = np.zeros(max_rows, np.float32), np.ones(max_rows, np.float32)
        self.is_beam, self.stops_at_eos = np.zeros(max_rows, bool), np.zeros(max_rows, bool)
        self._free = list(range(max_rows - 1, -1, -1))
        self._num_uids = 0

    @property
    def num_free(self) -> int:
        return len(self._free)

    def acquire(self, request: Request) -> IntArray:
        """Take a row for each sequence of ``request``; the caller checks ``num_free`` first."""
        count, prompt, sampling = request.num_sequences, request.prompt, request.sampling
        rows = np.array([self._free.pop() for _ in range(count)], np.int64)
        self.tokens[rows, : len(prompt)] = prompt
        self.length[rows] = len(prompt)
        self.limit[rows] = len(prompt) + request.max_new_tokens
        self.computed[rows] = 0
        self.member[rows] = np.arange(count)
        self.is_beam[rows] = sampling.mode == "beam"
        self.stops_at_eos[rows] = not sampling.ignore_eos
        self.temperature[rows] = sampling.temperature if sampling.mode == "sample" else 0.0
        self.top_p[rows] = sampling.top_p
        self.seed[rows] = sampling.seed
        self.request_id[rows] = request.request_id
        self.uid[rows] = np.arange(self._num_uids, self._num_uids + count)
        self._num_uids += count
        return rows

    def acquire_prefix(self, tokens: NDArray[np.int32]) -> int:
        """Take a row for ``tokens`` that no request generates from."""
        row, count = self._free.pop(), len(tokens)
        self.tokens[row, :count] = tokens
        self.length[row] = self.limit[row] = count
        self.computed[row] = 0
        self.uid[row] = self._num_uids
        self._num_uids += 1
        return row

    def release(self, rows: IntArray) -> None:
        self.uid[rows] = -1
        self.length[rows] = 0
        self._free.extend(int(row) for row in rows)

    def push(self, rows: IntArray, tokens: IntArray) -> None:
        """Append one token to each row."""
        self.tokens[rows, self.length[rows]] = tokens
        self.length[rows] += 1

    def copy(self, parents: IntArray, children: IntArray) -> None:
        """``children`` continue the tokens of ``parents``; who they are stays."""
        longest = int(self.length[parents].max(initial=0))
        self.tokens[children, :longest] = self.tokens[parents, :longest]
        self.length[children] = self.length[parents]
        self.computed[children] = self.computed[parents]

    def pending(self, rows: IntArray) -> IntArray:
        """Tokens of each row that are known but not in the pool."""
        return self.length[rows] - self.computed[rows]
