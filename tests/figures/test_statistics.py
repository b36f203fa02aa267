"""Laws of the interpolation, and intervals against known values."""

import math

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paper_figures.statistics import half_width_95, over_seeds, rate_at

positive = st.floats(0.01, 100)
curves = st.lists(st.tuples(st.integers(1, 1000), st.floats(0, 10)), min_size=1, unique_by=lambda point: point[0])


def arrays(points: list[tuple[float, float]]) -> tuple[np.ndarray, np.ndarray]:
    rates, latencies = np.array(points, float).T
    return rates, latencies


@given(slope=positive, offset=st.floats(0, 1), rates=st.lists(positive, min_size=2, unique=True), share=st.floats(0, 1))
def test_exact_on_a_line(slope: float, offset: float, rates: list[float], share: float) -> None:
    x = np.array(rates)
    wanted = x.min() + share * (x.max() - x.min())
    level = offset + slope * wanted
    level = min(max(level, (offset + slope * x).min()), (offset + slope * x).max())
    assert rate_at(x, offset + slope * x, level) == pytest.approx(wanted, rel=1e-6, abs=1e-6)


@given(curves, st.floats(0.1, 9))
def test_missing_without_a_crossing_and_inside_otherwise(points: list[tuple[float, float]], level: float) -> None:
    rates, latencies = arrays(points)
    found = rate_at(rates, latencies, level)
    first = latencies[np.argmin(rates)]
    if first > level or latencies.max() < level:
        assert math.isnan(found)
    else:
        assert rates.min() <= found <= rates.max()


@given(curves, st.floats(0.1, 9), st.floats(0.1, 9))
def test_a_higher_level_is_reached_no_earlier(points: list[tuple[float, float]], one: float, other: float) -> None:
    rates, latencies = arrays(points)
    low, high = (rate_at(rates, latencies, level) for level in sorted((one, other)))
    if not math.isnan(low) and not math.isnan(high):
        assert low <= high * (1 + 1e-12)


@given(curves, st.floats(0.1, 9), st.randoms())
def test_order_of_the_runs_does_not_matter(points: list[tuple[float, float]], level: float, random) -> None:
    shuffled = random.sample(points, len(points))
    assert rate_at(*arrays(points), level) == pytest.approx(rate_at(*arrays(shuffled), level), nan_ok=True)


def test_first_crossing_counts() -> None:
    rates, latencies = np.array([1.0, 2.0, 3.0, 4.0]), np.array([0.1, 0.7, 0.3, 0.9])
    assert rate_at(rates, latencies, 0.4) == pytest.approx(1.5)


# Student's t for 2, 4 and 9 degrees of freedom: 4.30265, 2.77645, 2.26216
@pytest.mark.parametrize(
    ("samples", "wanted"),
    [
        ([1, 2, 3], 4.30265 * 1 / math.sqrt(3)),
        ([2, 4, 4, 4, 6], 2.77645 * math.sqrt(2) / math.sqrt(5)),
        ([1] * 5 + [3] * 5, 2.26216 * math.sqrt(10 / 9) / math.sqrt(10)),
        ([7, 7, 7, 7], 0.0),
    ],
)
def test_half_width(samples: list[float], wanted: float) -> None:
    assert half_width_95(np.array(samples, float)) == pytest.approx(wanted, rel=1e-4)


@pytest.mark.parametrize("samples", [[1.0], [1.0, 2.0]])
def test_no_interval_below_three_seeds(samples: list[float]) -> None:
    assert math.isnan(half_width_95(np.array(samples)))


def test_beyond_the_table_intervals_stay_at_least_as_wide_as_they_should_be() -> None:
    samples = np.arange(200.0)
    normal = 1.96 * samples.std(ddof=1) / math.sqrt(200)
    assert normal < half_width_95(samples) < 1.05 * normal


def test_interval_covers_the_mean_in_95_of_100_experiments() -> None:
    draws = np.random.default_rng(0).normal(size=(20_000, 4))
    covered = [abs(draw.mean()) <= half_width_95(draw) for draw in draws]
    assert np.mean(covered) == pytest.approx(0.95, abs=0.006)


def test_over_seeds_keeps_order_and_does_not_hide_missing_values() -> None:
    samples = pd.DataFrame(
        [
            ("b", "s", 1.0, 1.0),
            ("b", "s", 1.0, 2.0),
            ("b", "s", 1.0, 6.0),
            ("a", "s", np.nan, 5.0),
            ("a", "t", 2.0, 1.0),
            ("a", "t", 2.0, np.nan),
        ],
        columns=["panel", "series", "x", "value"],
    )
    table = over_seeds(samples)
    assert table[["panel", "series"]].to_numpy().tolist() == [["b", "s"], ["a", "s"], ["a", "t"]]
    assert table["n_seeds"].tolist() == [3, 1, 2]
    assert table["ours"].tolist()[:2] == [3.0, 5.0]
    assert math.isnan(table["ours"][2])
