"""Splitting vacant slots into reservation and internal fragmentation.

A vacant slot is held by a sequence and empty. Whether that sequence will still write it (reservation)
or never will (internal fragmentation) is known exactly once the sequence has ended, at its token limit
or at EOS. So the run notes when each sequence's capacity changed, and the split is made afterwards.
"""

import numba
import numpy as np
from numba import types

from kvbench.allocator import IntArray

_READ = types.Array(types.int64, 1, "A", readonly=True)
_READ_2D = types.Array(types.int64, 2, "A", readonly=True)
_INT64 = types.int64[::1]


class Attribution:
    """Capacity of every sequence over time, as change events.

    Sequences are named by uid (unique over the run); rows are recycled.
    """

    def __init__(self, max_rows: int) -> None:
        self._capacity = np.zeros(max_rows, np.int64)
        self._uid = np.full(max_rows, -1, np.int64)
        self._events = np.empty((1024, 3), np.int64)  # step, uid, capacity
        self._num_events = 0
        self._ends: dict[int, int] = {}

    def observe(self, step: int, rows: IntArray, uids: IntArray, capacities: IntArray) -> None:
        """The rows on the device during ``step`` and those after it, as many as ``capacities`` has.

        All other rows hold nothing. capacities: int64 ``[steps, rows]``, the tokens that each has room for.
        """
        self._reserve(len(self._capacity) + len(rows) + capacities.size)
        self._num_events = _note_changes(
            step, rows, uids, capacities, self._capacity, self._uid, self._events, self._num_events
        )

    def end(self, uid: int, num_tokens: int) -> None:
        """Sequence ``uid`` ended having written ``num_tokens`` slots."""
        self._ends[uid] = num_tokens

    def internal_fragmentation(self, num_steps: int) -> IntArray:
        """Slots that their holders never wrote, int64 ``[num_steps]``. All sequences must have ended."""
        if not self._num_events:
            return np.zeros(num_steps, np.int64)
        events = self._events[: self._num_events]
        step, uid, capacity = events[np.argsort(events[:, 1], kind="stable")].T  # by uid, then in time
        ends = np.array([self._ends[int(u)] for u in np.unique(uid)])[np.unique(uid, return_inverse=True)[1]]
        never = np.maximum(capacity - ends, 0)
        last = np.append(uid[1:] != uid[:-1], True)
        until = np.where(last, num_steps, np.append(step[1:], num_steps))
        change = np.zeros(num_steps + 1, np.int64)
        np.add.at(change, step, never)
        np.add.at(change, until, -never)
        return np.cumsum(change[:-1])

    def _reserve(self, count: int) -> None:
        needed = self._num_events + count
        if needed > len(self._events):
            self._events = np.resize(self._events, (2 * needed, 3))


@numba.njit(
    types.int64(types.int64, _READ, _READ, _READ_2D, _INT64, _INT64, types.int64[:, ::1], types.int64), cache=True
)
def _note_changes(step, rows, uids, capacities, capacity, uid, events, count):
    """Write an event for each change against ``capacity`` and ``uid`` (by row), which it updates; the events' count.

    Compiled, since every step of a run waits for it.
    """
    is_held = np.zeros(capacity.size, np.bool_)
    for row, own in zip(rows, uids):  # noqa: B905 (numba knows no strict)
        is_held[row] = uid[row] == own
    for row in range(capacity.size):
        if capacity[row] and not is_held[row]:
            events[count, 0], events[count, 1], events[count, 2] = step, uid[row], 0
            capacity[row] = 0
            count += 1
    for row, own in zip(rows, uids):  # noqa: B905
        uid[row] = own
    for later in range(len(capacities)):
        for i, row in enumerate(rows):
            if capacities[later, i] != capacity[row]:
                capacity[row] = capacities[later, i]
                events[count, 0], events[count, 1], events[count, 2] = step + later, uid[row], capacity[row]
                count += 1
    return count


@numba.njit(types.void(types.float64[:, :], _READ, *[types.int64] * 10), cache=True)
def note_growth(
    pool, taken, num_rows, num_slots, token_states, vacant, rounding, free, withheld, mapped, host_held, cached
):
    """Write token_states, vacant, free, mapped and cached slots after each step of a growth: float64 ``[steps, 5]``.

    taken, num_rows: of the growth; all others: of the pool before it, in the order of ``Usage``.
    """
    for step in range(taken.size):
        written = num_rows * (step + 1)
        pool[step, 0] = token_states + written
        pool[step, 1] = vacant + taken[step] - written
        pool[step, 2] = free - taken[step]
        pool[step, 3] = mapped + taken[step]
        pool[step, 4] = min(cached, free - taken[step])
