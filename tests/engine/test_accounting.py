"""The split of vacant slots against a step-by-step simulation."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench.accounting import Attribution

NUM_ROWS = 5


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 25))
def test_internal_fragmentation_equals_a_simulation(seed: int, num_steps: int) -> None:
    """Rows come, grow, leave, come back (preemption) and are recycled at random."""
    rng = np.random.default_rng(seed)
    attribution = Attribution(NUM_ROWS)
    uid = np.full(NUM_ROWS, -1)
    capacity = np.zeros(NUM_ROWS, np.int64)
    present = np.zeros(NUM_ROWS, bool)
    held: list[list[tuple[int, int]]] = []  # per step, (uid, capacity) of the rows on the device
    next_uid = 0
    for _ in range(num_steps):
        for row in range(NUM_ROWS):
            fate = rng.random()
            if uid[row] < 0 or fate < 0.15:  # a new sequence takes the row over
                uid[row], next_uid = next_uid, next_uid + 1
                capacity[row], present[row] = rng.integers(1, 30), True
            elif fate < 0.3:
                present[row] = not present[row]
            elif fate < 0.6:
                capacity[row] = rng.integers(1, 30)
        rows = rng.permutation(np.flatnonzero(present))
        capacities = np.cumsum([capacity[rows], *rng.integers(0, 3, (rng.integers(0, 4), len(rows)))], axis=0)
        attribution.observe(len(held), rows, uid[rows], capacities)
        capacity[rows] = capacities[-1]
        held += [list(zip(uid[rows].tolist(), step_capacities.tolist(), strict=True)) for step_capacities in capacities]
    ends = rng.integers(0, 30, next_uid)
    for sequence, end in enumerate(ends):
        attribution.end(sequence, int(end))
    simulated = [sum(max(0, slots - int(ends[sequence])) for sequence, slots in step) for step in held]
    assert attribution.internal_fragmentation(len(held)).tolist() == simulated
