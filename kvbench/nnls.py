"""Least squares with coefficients that are not negative (the active-set method of Lawson and Hanson, 1974)."""

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def nnls(columns: Floats, target: Floats) -> Floats:
    """``x >= 0`` that minimises ``|columns @ x - target|``; columns: ``[m, n]``, target: ``[m]``."""
    scale = np.linalg.norm(columns, axis=0)
    scale[scale == 0] = 1.0
    columns = columns / scale  # so that one tolerance serves columns of any unit
    solution = np.zeros(columns.shape[1])
    free = np.zeros(columns.shape[1], bool)
    tolerance = 1e-12 * float(np.linalg.norm(target))
    for _ in range(3 * columns.shape[1]):
        gradient = columns.T @ (target - columns @ solution)
        gradient[free] = -np.inf
        if not gradient.max(initial=-np.inf) > tolerance:
            break
        free[int(gradient.argmax())] = True
        solution = _descend(columns, target, solution, free)
    return solution / scale


def _descend(columns: Floats, target: Floats, solution: Floats, free: NDArray[np.bool_]) -> Floats:
    """The minimum over the free coefficients, fixing at 0 (in ``free``) those that would turn negative."""
    while True:
        wanted = np.zeros_like(solution)
        wanted[free] = np.linalg.lstsq(columns[:, free], target, rcond=None)[0]
        crossing = free & (wanted <= 0)
        if not crossing.any():
            return wanted
        share = (solution[crossing] / (solution[crossing] - wanted[crossing])).min()
        solution = solution + share * (wanted - solution)
        free &= solution > 1e-15 * max(1.0, float(solution.max()))
        solution[~free] = 0.0
