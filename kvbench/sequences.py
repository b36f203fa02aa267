"""Token and progress state of every live sequence, as arrays indexed by row."""

import numpy as np

from kvbench.allocator import IntArray


class SequenceTable:
    """Rows of live sequences.

    tokens: int32 ``[max_rows, max_tokens]``, prompt and generated token ids.
    length: int64 ``[max_rows]``, tokens known (prompt + generated).
    computed: int64 ``[max_rows]``, leading tokens whose KV is in the pool.
    uid: int64 ``[max_rows]``, which sequence the row serves, unique over the run.
    """

    def __init__(self, max_rows: int, max_tokens: int) -> None:
        self.tokens = np.zeros((max_rows, max_tokens + 1), np.int32)  # the last token has no KV
        self.length = np.zeros(max_rows, np.int64)
        self.computed = np.zeros(max_rows, np.int64)
        self.uid = np.full(max_rows, -1, np.int64)
        self._free = list(range(max_rows - 1, -1, -1))
        self._num_uids = 0

    @property
    def num_free(self) -> int:
        return len(self._free)

    def acquire(self, count: int, prompt: IntArray) -> IntArray:
        """Take ``count`` rows that start with ``prompt``; the caller checks ``num_free`` first."""
        rows = np.array([self._free.pop() for _ in range(count)], np.int64)
        self.tokens[rows, : len(prompt)] = prompt
        self.length[rows] = len(prompt)
        self.computed[rows] = 0
        self.uid[rows] = np.arange(self._num_uids, self._num_uids + count)
        self._num_uids += count
        return rows

    def release(self, rows: IntArray) -> None:
        self.uid[rows] = -1
        self.length[rows] = 0
        self._free.extend(int(row) for row in rows)

    def push(self, rows: IntArray, tokens: IntArray) -> None:
        """Append one token to each row."""
        self.tokens[rows, self.length[rows]] = tokens
        self.length[rows] += 1

    def copy(self, parents: IntArray, children: IntArray) -> None:
        """``children`` continue the tokens of ``parents``; their uids stay."""
        self.tokens[children] = self.tokens[parents]
        self.length[children] = self.length[parents]
        self.computed[children] = self.computed[parents]

    def pending(self, rows: IntArray) -> IntArray:
        """Tokens of each row that are known but not in the pool."""
        return self.length[rows] - self.computed[rows]
