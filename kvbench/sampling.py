"""What decides a sampled token besides its logits.

That is ``uniform(seed, request, sequence, position)`` alone: never the batch it was computed in, the
allocator or a preemption. :mod:`kvbench.executors.choice` turns it and the logits into a token.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray


def uniform(seed: ArrayLike, request: ArrayLike, sequence: ArrayLike, position: ArrayLike) -> NDArray[np.float64]:
    """Uniform numbers in [0, 1), a pure function of the four integers (arrays broadcast).

    Counter-based: one round of the SplitMix64 finaliser (Steele et al., OOPSLA 2014) per integer.
    """
    state = np.uint64(0)
    with np.errstate(over="ignore"):
        for part in (seed, request, sequence, position):
            state = _mix(state + np.asarray(part, np.uint64) + np.uint64(0x9E3779B97F4A7C15))
    return (state >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
