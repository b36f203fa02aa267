"""State of every live sequence, as arrays indexed by row."""

import numba
import numpy as np
from numba import types
from numpy.typing import NDArray

from kvbench.allocator import IntArray
from kvbench.request import Request

_ROWS = types.Array(types.int64, 1, "A", readonly=True)
_INT64, _BOOL = types.int64[::1], types.boolean[::1]


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
        rows = [self._free.pop() for _ in range(request.num_sequences)]
        for member, row in enumerate(rows):  # scalar assignments cost a fifth of those by an array
            self._assign(row, member, request)
        return np.array(rows, np.int64)

    def _assign(self, row: int, member: int, request: Request) -> None:
        sampling, length = request.sampling, len(request.prompt)
        self.tokens[row, :length] = request.prompt
        self.length[row] = length
        self.limit[row] = length + request.max_new_tokens
        self.computed[row] = 0
        self.member[row] = member
        self.is_beam[row] = sampling.mode == "beam"
        self.stops_at_eos[row] = not sampling.ignore_eos
        self.temperature[row] = sampling.temperature if sampling.mode == "sample" else 0.0
        self.top_p[row] = sampling.top_p
        self.seed[row] = sampling.seed
        self.request_id[row] = request.request_id
        self.uid[row] = self._num_uids
        self._num_uids += 1

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
        self._free.extend(rows.tolist())

    def push(self, rows: IntArray, tokens: IntArray) -> NDArray[np.bool_]:
        """Append one token to each row, distinct; whether it has reached its limit."""
        ended = np.empty(len(rows), bool)
        _push(rows, tokens, self.tokens, self.length, self.limit, ended)
        return ended

    def after(self, rows: IntArray, num_new: IntArray) -> tuple[IntArray, IntArray, IntArray]:
        """A step that computes ``num_new`` tokens of each row: how many are computed then, and the indices of the
        rows that have caught up and yield a token, without a beam search and with one.
        """
        return _after(rows, num_new, self.length, self.computed, self.limit, self.is_beam)

    def copy(self, parents: IntArray, children: IntArray) -> None:
        """``children`` continue the tokens of ``parents``; who they are stays."""
        longest = int(self.length[parents].max(initial=0))
        self.tokens[children, :longest] = self.tokens[parents, :longest]
        self.length[children] = self.length[parents]
        self.computed[children] = self.computed[parents]

    def advance(self, rows: IntArray, num_steps: int) -> IntArray:
        """Each row gains ``num_steps`` tokens whose KV but the last one's is in the pool; those that end thereby.

        Tokens are left as they are: this is for an executor that draws none.
        """
        ended = np.empty(len(rows), bool)
        _advance(rows, num_steps, self.length, self.computed, self.limit, ended)
        return rows[ended]

    def quiet_steps(self, rows: IntArray) -> tuple[int, int]:
        """Steps of one token each until a row ends, and the rows' tokens now; (0, 0) if a row could do otherwise:
        it belongs to a beam search, may meet EOS, or has more than one token to catch up with.
        """
        return _quiet_steps(rows, self.length, self.computed, self.limit, self.is_beam, self.stops_at_eos)

    def pending(self, rows: IntArray) -> IntArray:
        """Tokens of each row that are known but not in the pool."""
        return self.length[rows] - self.computed[rows]


# Compiled, since every step or leap over steps waits for them.


@numba.njit(types.void(_ROWS, _ROWS, types.int32[:, ::1], _INT64, _INT64, _BOOL), cache=True)
def _push(rows, pushed, tokens, length, limit, ended):
    for i, row in enumerate(rows):
        tokens[row, length[row]] = pushed[i]
        length[row] += 1
        ended[i] = length[row] == limit[row]


@numba.njit(types.UniTuple(_INT64, 3)(_ROWS, _ROWS, _INT64, _INT64, _INT64, _BOOL), cache=True)
def _after(rows, num_new, length, computed, limit, is_beam):
    """See :meth:`SequenceTable.after`: int64 ``[n]``, ``[picks]`` and ``[beams]``."""
    lengths, picks, beams = np.empty(rows.size, np.int64), np.empty(rows.size, np.int64), np.empty(rows.size, np.int64)
    num_picks = num_beams = 0
    for i, row in enumerate(rows):
        lengths[i] = computed[row] + num_new[i]
        if lengths[i] == length[row] < limit[row]:
            if is_beam[row]:
                beams[num_beams] = i
                num_beams += 1
            else:
                picks[num_picks] = i
                num_picks += 1
    return lengths, picks[:num_picks], beams[:num_beams]


@numba.njit(types.UniTuple(types.int64, 2)(_ROWS, _INT64, _INT64, _INT64, _BOOL, _BOOL), cache=True)
def _quiet_steps(rows, length, computed, limit, is_beam, stops_at_eos):
    num_tokens, num_steps = 0, np.iinfo(np.int64).max
    for row in rows:
        if is_beam[row] or stops_at_eos[row] or length[row] - computed[row] != 1:
            return 0, 0
        num_tokens += length[row]
        num_steps = min(num_steps, limit[row] - length[row])
    return num_steps, num_tokens


@numba.njit(types.void(_ROWS, types.int64, _INT64, _INT64, _INT64, _BOOL), cache=True)
def _advance(rows, num_steps, length, computed, limit, ended):
    for i, row in enumerate(rows):
        computed[row] += num_steps
        length[row] += num_steps
        ended[i] = length[row] == limit[row]
