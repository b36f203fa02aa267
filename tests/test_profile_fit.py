"""Laws of the cost model and of fitting a device profile to times."""

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench import profile_fit
from kvbench.device_profile import DeviceProfile
from kvbench.errors import ConfigError
from kvbench.executors.cost_model import CostModel
from kvbench.geometry import ModelShape
from kvbench.microbenchmark import BATCHES, CONTEXTS, PREFILLS, RANGES, Case
from kvbench.nnls import nnls

SHAPE = ModelShape(4, 8, 2, 64, 512, 30_000_000, 10_000_000, 50_000_000)
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
MEASURED = DeviceProfile(
    memory_bytes=2**34,
    memory_bytes_per_s=8e9,
    flops=4e10,
    host_bytes_per_s=3e9,
    host_memory_bytes=2**34,
    transfer_s=2e-6,
    sequence_s=3e-5,
    attention_efficiency=0.8,
    copy_efficiency=1.0,
    copy_s=4e-6,
    product_s=[[rows, 1e-10 + 2e-11 * min(rows, 16) + 1.5e-11 * max(0, rows - 16)] for rows in ROWS],
)
DATASHEET = DeviceProfile(2**34, 8e9, 1e11, 3e9, step_s=1e-3, sequence_s=1e-5, num_devices=2, allreduce_s=1e-5)


def cases() -> pd.DataFrame:
    """What the microbenchmark times, without times."""
    steps = [Case("decode", b, 1, c) for c in CONTEXTS for b in BATCHES] + [
        Case("prefill", b, n, n) for b, n in PREFILLS
    ]
    moved = [Case(kind, num_ranges=r, num_slots=r * n) for kind in ("copy", "swap_out", "swap_in") for r, n in RANGES]
    names = ("kind", "num_sequences", "num_tokens", "kv_tokens", "pairs", "num_ranges", "num_slots")
    return pd.DataFrame([{name: getattr(case, name) for name in names} for case in steps + moved])


TIMED = cases().assign(seconds=lambda frame: profile_fit.predict(frame, SHAPE, 4, MEASURED))


def fit(observations: pd.DataFrame) -> DeviceProfile:
    return profile_fit.fit(observations, SHAPE, 4, memory_bytes=2**34, host_memory_bytes=2**34)


def test_the_fit_of_a_profiles_own_times_is_that_profile() -> None:
    observations = TIMED
    fitted = fit(observations)
    for name in vars(MEASURED).keys() - {"product_s", "transfers_per_layer", "num_devices", "interconnect_bytes_per_s"}:
        assert getattr(fitted, name) == pytest.approx(getattr(MEASURED, name), rel=1e-6), name
    np.testing.assert_allclose(fitted.product_s, MEASURED.product_s, rtol=1e-6)
    np.testing.assert_allclose(profile_fit.predict(observations, SHAPE, 4, fitted), observations["seconds"], rtol=1e-7)


def test_the_time_outside_the_executor_is_recovered_and_added() -> None:
    steps = pd.DataFrame({"num_sequences": np.arange(1, 40)})
    steps["seconds"] = 2e-4 + 5e-6 * steps["num_sequences"]
    fitted = profile_fit.add_outside(MEASURED, steps)
    assert fitted.step_s == pytest.approx(2e-4)
    assert fitted.sequence_s == pytest.approx(MEASURED.sequence_s + 5e-6)


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10_000), noise=st.floats(0.0, 0.5))
def test_any_fit_is_a_legal_profile(seed: int, noise: float) -> None:
    """However noisy the times: no negative cost, a table that does not fall, finite rates."""
    observations = TIMED.copy()
    factors = np.exp(noise * np.random.default_rng(seed).standard_normal(len(observations)))
    observations["seconds"] *= factors
    fitted = fit(observations)
    fitted.check()
    assert all(np.isfinite([*np.ravel(fitted.product_s), fitted.flops, fitted.memory_bytes_per_s]))


@given(data=st.data(), num_rows=st.integers(1, 12), num_columns=st.integers(1, 6))
def test_nnls_satisfies_its_optimality_conditions(data: st.DataObject, num_rows: int, num_columns: int) -> None:
    """Karush, Kuhn and Tucker: no coefficient is negative, and none could lower the error by growing."""
    number = st.floats(-10, 10).map(lambda value: round(value, 3))
    columns = np.array(data.draw(st.lists(number, min_size=num_rows * num_columns, max_size=num_rows * num_columns)))
    columns = columns.reshape(num_rows, num_columns)
    target = np.array(data.draw(st.lists(number, min_size=num_rows, max_size=num_rows)))
    solution = nnls(columns, target)
    assert (solution >= 0).all()
    gradient = columns.T @ (target - columns @ solution)
    tolerance = 1e-6 * (1 + np.abs(columns).max() * np.abs(target).max())
    assert (gradient <= tolerance).all()
    assert (np.abs(gradient[solution > 0]) <= tolerance).all()


@settings(max_examples=200)
@given(
    profile=st.sampled_from([MEASURED, DATASHEET]),
    tokens=st.integers(1, 3000),
    sampled=st.integers(0, 300),
    kv=st.integers(1, 10**6),
    pairs=st.integers(1, 10**8),
    grows=st.sampled_from(range(4)),
    by=st.integers(1, 1000),
)
def test_more_work_never_takes_less_time(
    profile: DeviceProfile, tokens: int, sampled: int, kv: int, pairs: int, grows: int, by: int
) -> None:
    cost, work = CostModel(SHAPE, profile, 2), [tokens, sampled, kv, pairs]
    more = [value + by * (i == grows) for i, value in enumerate(work)]
    before, after = (float(cost.step_s(t, s, float(k), float(p))) for t, s, k, p in (work, more))
    assert 0 < before <= after


def test_a_measured_product_is_met_at_its_points_and_straight_between_and_beyond() -> None:
    profile = DeviceProfile(2**30, 1e18, 1e30, 1e9, product_s=[[1, 1e-9], [4, 2e-9], [8, 4e-9]])
    cost = CostModel(ModelShape(1, 1, 1, 8, 8, 1000, 0, 1000), profile, 2)
    times = [float(cost.step_s(rows, 0, 1.0, 1.0)) for rows in (1, 4, 6, 8, 10)]
    assert times == pytest.approx([1e-6, 2e-6, 3e-6, 4e-6, 5e-6])


@pytest.mark.parametrize(
    "table",
    [[[1, 1e-9]], [[1, 1e-9], [1, 2e-9]], [[1, 2e-9], [2, 1e-9]], [[0, 1e-9], [2, 2e-9]], [[1, 1e-9, 3], [2, 2e-9]]],
)
def test_a_table_without_meaning_is_refused(table: list[list[float]]) -> None:
    profile = DeviceProfile(2**30, 1e9, 1e9, 1e9, product_s=table)
    with pytest.raises(ConfigError, match="product_s"):
        profile.check()
