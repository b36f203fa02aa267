"""When decode steps returned. Every running group gains a token per sequence in each of them."""

import numpy as np

from kvbench.plan import Seconds


class Rounds:
    """Times of a run's decode steps, in seconds, kept once for all groups that took part in them."""

    def __init__(self) -> None:
        self._times_s = np.empty(1024)
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def extend(self, times_s: Seconds) -> None:
        end = self._count + len(times_s)
        if end > len(self._times_s):
            self._times_s = np.resize(self._times_s, 2 * end)
        self._times_s[self._count : end] = times_s
        self._count = end

    def since(self, first: int) -> Seconds:
        """Times of all rounds from number ``first`` on."""
        return self._times_s[first : self._count].copy()
