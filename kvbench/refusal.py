"""What the pool refused to the queue's head, which need not ask again while nothing is freed."""

import numpy as np
from numpy.typing import NDArray

from kvbench.allocator import Allocator, Growth
from kvbench.decision import Decision


class Refusal:
    """The last refusal, as long as it stands."""

    def __init__(self, allocator: Allocator) -> None:
        self._allocator = allocator
        self._num_slots: int | None = None

    @property
    def stands(self) -> bool:
        return self._num_slots is not None

    def lift(self) -> None:
        """Something was freed or may be found now: whoever was refused may ask again."""
        self._num_slots = None

    def note(self, decision: Decision, num_slots: int) -> None:
        """The head asked for ``num_slots`` in vain. It is stranded where as many are free, but not for it."""
        usage = self._allocator.usage()
        self._num_slots = num_slots
        decision.refused = True
        decision.stranded = num_slots <= usage.free - usage.withheld

    def repeat(self, decision: Decision) -> bool:
        """Whether it still stands; if so, it is noted again."""
        if self._num_slots is None:
            return False
        self.note(decision, self._num_slots)
        return True

    def stranded(self, growth: Growth) -> NDArray[np.bool_]:
        """For each of steps taken at once, whether the head was stranded as it began; call while it stands."""
        taken = np.append(0, growth.taken[:-1])  # as each step began; the watermark's slots go last
        return self._num_slots <= np.maximum(growth.before.free - growth.before.withheld - taken, 0)
