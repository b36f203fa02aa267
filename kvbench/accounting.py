"""Splitting vacant slots into reservation and internal fragmentation.

A vacant slot is held by a sequence and empty. Whether that sequence will still write it (reservation)
or never will (internal fragmentation) is known exactly once the sequence has ended, at its token limit
or at EOS. So the run notes when each sequence's capacity changed, and the split is made afterwards.
"""

import numpy as np

from kvbench.allocator import IntArray


class Attribution:
    """Capacity of every sequence over time, as change events.

    Sequences are named by uid (unique over the run); rows are recycled.
    """

    def __init__(self, max_rows: int) -> None:
        self._capacity = np.zeros(max_rows, np.int64)
        self._uid = np.full(max_rows, -1, np.int64)
        self._events: list[IntArray] = []  # each [n, 3]: step, uid, capacity
        self._ends: dict[int, int] = {}

    def observe(self, step: int, rows: IntArray, uids: IntArray, capacity: IntArray) -> None:
        """The rows on the device during ``step``, and the tokens each has room for; all others hold nothing."""
        held = self._capacity > 0
        held[rows] = False
        reused = rows[(self._uid[rows] != uids) & (self._capacity[rows] > 0)]
        self._note(step, np.concatenate([np.flatnonzero(held), reused]), 0)
        changed = self._capacity[rows] != capacity
        self._uid[rows] = uids
        self._note(step, rows[changed], capacity[changed])

    def observe_many(self, step: int, rows: IntArray, uids: IntArray, capacities: IntArray) -> None:
        """The same of consecutive steps from ``step`` on, with the same rows. capacities: ``[steps, rows]``."""
        self.observe(step, rows, uids, capacities[0])
        later, which = np.nonzero(capacities[1:] != capacities[:-1])
        self._note(step + 1 + later, rows[which], capacities[1:][later, which])
        self._capacity[rows] = capacities[-1]

    def end(self, uid: int, num_tokens: int) -> None:
        """Sequence ``uid`` ended having written ``num_tokens`` slots."""
        self._ends[uid] = num_tokens

    def internal_fragmentation(self, num_steps: int) -> IntArray:
        """Slots that their holders never wrote, int64 ``[num_steps]``. All sequences must have ended."""
        if not self._events:
            return np.zeros(num_steps, np.int64)
        events = np.concatenate(self._events)
        step, uid, capacity = events[np.argsort(events[:, 1], kind="stable")].T  # by uid, then in time
        ends = np.array([self._ends[int(u)] for u in np.unique(uid)])[np.unique(uid, return_inverse=True)[1]]
        never = np.maximum(capacity - ends, 0)
        last = np.append(uid[1:] != uid[:-1], True)
        until = np.where(last, num_steps, np.append(step[1:], num_steps))
        change = np.zeros(num_steps + 1, np.int64)
        np.add.at(change, step, never)
        np.add.at(change, until, -never)
        return np.cumsum(change[:-1])

    def _note(self, step: int | IntArray, rows: IntArray, capacity: IntArray | int) -> None:
        if len(rows):
            self._capacity[rows] = capacity
            event = np.empty((len(rows), 3), np.int64)
            event[:, 0], event[:, 1], event[:, 2] = step, self._uid[rows], capacity
            self._events.append(event)
