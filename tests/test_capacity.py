"""Laws of goodput and of the search for the rate that one replica sustains."""

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbench.capacity import sustained_rate
from kvbench.capacity_report import gpus_needed, interval
from kvbench.metrics import Objective, summarize
from kvbench.recorder import PARTS, SECONDS
from tests.cli import Cli, refusal

STEPS = pd.DataFrame(
    {name: [1] for name in (*PARTS, "stranded", "cached", "mapped", "num_running", "num_sequences", "host_held")}
    | {f"{cause}_slots": [0] for cause in ("cow", "fork", "prompt", "swap_out", "swap_in")}
    | {name: [0] for name in ("num_preemptions", "num_recomputed_tokens", *SECONDS)}
    | {"kind": ["decode"], "refused": [False], "duration_s": [4.0]}
)


def requests(rows: list[tuple[str, float | None, float | None]]) -> pd.DataFrame:
    """Requests by status, TTFT and TPOT; every other field as if it had one token."""
    frame = pd.DataFrame(rows, columns=["status", "ttft_s", "tpot_s"]).astype({"ttft_s": float, "tpot_s": float})
    return frame.assign(
        prompt_tokens=1,
        num_cached_tokens=0,
        output_tokens=1,
        latency_s=1.0,
        normalized_latency_s=1.0,
        queueing_s=0.0,
        token_times_s=[np.array([1.0])] * len(frame),
    )


def goodput(frame: pd.DataFrame, objective: Objective) -> tuple[float, float, float]:
    """Goodput, throughput, attainment."""
    summary = summarize(STEPS, frame, bytes_per_slot=1, block_size=0, objective=objective)
    names = ("goodput_requests_per_s", "requests_per_s", "attainment_fraction")
    good, all_, share = (summary[name][0] for name in names)
    return good, all_, share


def test_goodput_counts_finished_requests_within_every_limit() -> None:
    served = requests(
        [
            ("finished", 0.5, 0.10),  # good: both at their limits
            ("finished", 0.1, None),  # good: a single token has no time per token
            ("finished", 0.6, 0.05),  # too late
            ("finished", 0.1, 0.11),  # too slow
            ("rejected", None, None),  # not served
        ]
    )
    good, all_, share = goodput(served, Objective(0.5, 0.1))
    assert (good, all_, share) == (2 / 4.0, 4 / 4.0, 2 / 5)
    assert goodput(served, Objective(ttft_s=0.5))[0] == 3 / 4.0
    assert goodput(served, Objective(tpot_s=0.1))[0] == 3 / 4.0


def test_without_an_objective_there_is_no_goodput() -> None:
    summary = summarize(
        STEPS, requests([("finished", 1.0, 1.0)]), bytes_per_slot=1, block_size=0, objective=Objective()
    )
    assert not {"goodput_requests_per_s", "attainment_fraction"} & summary.keys()


times = st.one_of(st.none(), st.floats(0, 10))
limits = st.one_of(st.none(), st.floats(0.1, 10))


@given(
    rows=st.lists(
        st.tuples(st.sampled_from(["finished", "rejected"]), st.floats(0, 10), times), min_size=1, max_size=9
    ),
    ttft=st.floats(0.1, 10),
    tpot=limits,
    more=st.floats(0, 5),
)
def test_goodput_is_at_most_throughput_and_grows_with_the_limit(
    rows: list[tuple[str, float | None, float | None]], ttft: float, tpot: float | None, more: float
) -> None:
    tight = goodput(requests(rows), Objective(ttft, tpot))
    loose = goodput(requests(rows), Objective(ttft + more, None if tpot is None else tpot + more))
    assert tight[0] <= loose[0] <= loose[1] == tight[1]


@given(limit=st.floats(0.011, 1e4), tolerance=st.floats(0.001, 0.5))
def test_the_search_ends_within_its_tolerance_below_the_limit(limit: float, tolerance: float) -> None:
    found = sustained_rate(lambda rate: rate <= limit, 0.01, tolerance)
    assert found is not None
    assert found <= limit < found * (1 + tolerance)


@given(tight=st.sets(st.integers(0, 40)), more=st.sets(st.integers(0, 40)))
def test_an_easier_objective_never_lowers_the_rate_found(tight: set[int], more: set[int]) -> None:
    """Also where attainment does not fall steadily with the rate, as it need not in a run of finite length."""

    def attains(grades: set[int]) -> Callable[[float], bool]:
        return lambda rate: rate < 1e3 and int(4 * math.log2(rate / 0.01)) % 41 in grades

    rates = [sustained_rate(attains(grades), 0.01, 0.02) or 0.0 for grades in (tight, tight | more)]
    assert rates[0] <= rates[1]


def test_out_of_reach_is_no_number() -> None:
    assert sustained_rate(lambda rate: False, 0.01, 0.02) is None


def test_gpus_come_in_whole_replicas() -> None:
    assert [gpus_needed(10, rate, 4) for rate in (10, 5, 3, 11)] == [4, 8, 16, 4]
    assert gpus_needed(10, 0.0, 4) == math.inf
    assert gpus_needed(2.1, 0.3, 1) == 7, "rounding of floats adds no replica"


def test_the_interval_is_students() -> None:
    """By hand for 1, 2, 3: the standard error is 3 ** -0.5, and t is 4.303 at two degrees of freedom."""
    assert interval([1.0, 2.0, 3.0]) == pytest.approx(4.303 / math.sqrt(3))
    assert math.isnan(interval([1.0]))


CAPACITY = (
    "+experiment=capacity",
    "model=tiny",
    "dtype=float32",
    "workload=lengths",
    "workload.arrival.process=poisson",
    "workload.arrival.rate=40",
    "workload.duration_s=8",
    "pool.size=256KiB",
    "pool.host_size=1MiB",
    "max_model_len=128",
    "device.profile.step_s=0.02",
    "capacity.lowest_rate=1",
    "capacity.tolerance=0.05",
    "measure.progress=false",
)


@pytest.fixture
def lengths(tmp_path: Path) -> str:
    path = tmp_path / "lengths.csv"
    path.write_text("input_tokens,output_tokens\n20,10\n40,30\n10,50\n")
    return f"workload.lengths={path}"


def test_capacity_reports_gpus_and_cost_per_allocator(run: Cli, lengths: str) -> None:
    code, out, err = run(*CAPACITY, lengths, "allocator=static,paged", "seed=0,1", "measure.slo_ttft_s=0.5")
    assert code == 0, err
    assert "GPUs" in out
    (table,) = run.results_dir.rglob("capacity.csv")
    static, paged = pd.read_csv(table).to_dict("records")
    assert 0 < static["rate"] < paged["rate"], "more requests fit, so more are served in time"
    assert paged["gpus"] == math.ceil(40 / paged["rate"])
    assert paged["cost_per_month"] == pytest.approx(730 * 2.0 * paged["gpus"])
    assert paged["gpus_low"] <= paged["gpus"] <= paged["gpus_high"]
    assert (table.parent / "capacity.png").exists()
    for record in run.runs():
        tried = {entry["rate"]: entry["attainment"] for entry in record.record["tried"]}
        sustained = record.metric("sustained_requests_per_s")
        assert tried[sustained] >= 0.99
        assert record.metric("attainment_fraction") == tried[sustained], "the record is of the run at that rate"
        assert any(sustained < rate <= sustained * 1.05 * (1 + 1e-9) and a < 0.99 for rate, a in tried.items())


def test_an_objective_out_of_reach_is_said_and_gives_no_number(run: Cli, lengths: str) -> None:
    code, out, err = run(*CAPACITY, lengths, "allocator=paged", "measure.slo_ttft_s=0.001")
    assert code == 0, err
    assert "paged: unreachable: 0.0 % of the requests meet the objective at 1.0 requests/s" in out
    assert "rate" not in pd.read_csv(next(run.results_dir.rglob("capacity.csv"))).columns


BAD = {
    "no objective": (["measure.slo_ttft_s=null", "measure.slo_tpot_s=null"], "measure.slo_ttft_s"),
    "no rate": (["workload.arrival.process=all_at_once"], "workload.arrival.process"),
    "no share": (["capacity.attainment=0"], "capacity.attainment"),
    "no price": (["capacity.gpu_price_per_hour=-1"], "capacity.gpu_price_per_hour"),
    "real time": (["executor=torch", "device=cpu"], "executor"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_capacity_settings_are_refused_by_name(lengths: str, case: str) -> None:
    arguments, named = BAD[case]
    groups = {argument.split("=")[0] for argument in arguments}
    settings = [s for s in CAPACITY if s.split("=")[0] not in groups and not (case == "real time" and "profile" in s)]
    assert named in refusal(*settings, lengths, "allocator=paged", *arguments)


def test_requests_too_few_to_tell_a_rate_are_refused(run: Cli, lengths: str) -> None:
    settings = [setting for setting in CAPACITY if not setting.startswith("workload.duration_s")]
    code, _, err = run(*settings, lengths, "allocator=paged", "workload.num_requests=2", "measure.slo_ttft_s=10")
    assert code == 2, err
    assert "workload.num_requests" in err
    assert run.runs() == []
