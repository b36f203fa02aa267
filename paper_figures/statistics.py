"""Means with intervals over seeds, and the rate at which a latency curve reaches a level."""

import numpy as np
import pandas as pd

SERIES = ["panel", "series", "x"]
MIN_SEEDS = 3

# Student's t, two-sided 95 %, for 1, 2, ... 30 degrees of freedom
_T95 = (
    *(12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281),
    *(2.2010, 2.1788, 2.1604, 2.1448, 2.1314, 2.1199, 2.1098, 2.1009, 2.0930, 2.0860),
    *(2.0796, 2.0739, 2.0687, 2.0639, 2.0595, 2.0555, 2.0518, 2.0484, 2.0452, 2.0423),
)


def half_width_95(samples: np.ndarray) -> float:
    """Half-width of the mean's 95 % interval; NaN below three samples, which say too little about their spread."""
    if len(samples) < MIN_SEEDS:
        return float("nan")
    t = _T95[min(len(samples) - 1, len(_T95)) - 1]  # beyond the table its last value: at most 4 % too wide
    return float(t * np.std(samples, ddof=1) / np.sqrt(len(samples)))


def over_seeds(samples: pd.DataFrame) -> pd.DataFrame:
    """Columns panel, series, x, ours (mean), ci95 (half-width), n_seeds; in the samples' order.

    samples: panel, series, x, value, one row per seed. One missing value makes the mean missing: averaging
    what is left would favour the seeds that did well.
    """
    groups = samples.groupby(SERIES, sort=False, dropna=False)["value"]
    return groups.agg(
        ours=lambda values: values.mean(skipna=False),
        ci95=lambda values: half_width_95(values.to_numpy(float)),
        n_seeds="size",
    ).reset_index()


def rate_at(rates: np.ndarray, latencies: np.ndarray, level: float) -> float:
    """The rate at which the latency first reaches ``level``, linear between measured rates.

    NaN, never an extrapolation, where the curve starts above the level or does not reach it.
    """
    order = np.argsort(rates)
    rates, latencies = rates[order], latencies[order]
    reached = np.flatnonzero(latencies >= level)
    if len(reached) == 0 or latencies[0] > level:
        return float("nan")
    last = reached[0]
    if last == 0:
        return float(rates[0])
    before = last - 1
    share = (level - latencies[before]) / (latencies[last] - latencies[before])
    return float(rates[before] + share * (rates[last] - rates[before]))
