"""Rows of the comparison, computed by hand."""

import math
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from kvbench.allocator import consecutive
from kvbench.histograms import pmf
from paper_figures import fidelity
from paper_figures.latency import fig12, fig16, rates
from paper_figures.lines import fig18a, fig19a
from paper_figures.memory import PAIRINGS, fig2, fig13, fig15
from paper_figures.tables import TableError
from tests.figures import synthetic

T2 = 4.30265  # Student's t for three seeds


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("results")
    synthetic.write_all(folder)
    return folder


def row(table: pd.DataFrame, panel: str, series: str, x: float | None = None) -> pd.Series:
    found = table[(table["panel"] == panel) & (table["series"] == series)]
    if x is not None:
        found = found[found["x"] == x]
    assert len(found) == 1
    return found.iloc[0]


def test_mean_batch(results: Path) -> None:
    """Paged ran 10, 11 and 12 requests with three seeds; the paper 30.42."""
    got = row(fig13(results).comparison, "ShareGPT", "vLLM")
    assert (got["x"], got["unit"], got["n_seeds"], got["origin"], got["note"]) == (2.0, "requests", 3, "plot", "")
    assert got["ours"] == pytest.approx(11)
    assert got["difference"] == pytest.approx(11 - 30.42)
    assert got["relative_difference"] == pytest.approx((11 - 30.42) / 30.42)
    assert got["ci95"] == pytest.approx(T2 / math.sqrt(3), rel=1e-4)


def test_external_is_rounding_and_free(results: Path) -> None:
    table = fig2(results).comparison
    assert row(table, "Orca (Max)", "external")["ours"] == pytest.approx(30)
    assert row(table, "Orca (Max)", "token_states")["ours"] == pytest.approx(40)
    assert row(table, "vLLM", "waste")["ours"] == pytest.approx(60)
    assert row(table, "vLLM", "waste")["published"] == pytest.approx(3.736)
    unpublished = row(table, "Orca (Oracle)", "internal_fragmentation")
    assert unpublished["note"] == "not published"
    assert math.isnan(unpublished["difference"])


def test_rate_at_half_a_second_per_token(results: Path) -> None:
    """Latency is rate / capacity, so the rate is half the capacity: 5, 5.5 and 6 requests/s."""
    table = fig12(results).comparison
    got = row(table, "ShareGPT OPT-13B", "vLLM")
    assert (got["unit"], got["x"]) == ("requests/s", 0.5)
    assert got["ours"] == pytest.approx(5.5)
    assert got["ci95"] == pytest.approx(T2 * 0.5 / math.sqrt(3), rel=1e-4)
    assert got["difference"] == pytest.approx(5.5 - 1.93)


def test_ratios_are_taken_seed_by_seed(results: Path) -> None:
    """Seeds scale all systems alike, so the ratio has no spread although the rates have."""
    got = row(fig12(results).comparison, "Alpaca OPT-66B", "vLLM / Orca (Oracle)")
    assert (got["unit"], got["ours"], got["published"]) == ("ratio", pytest.approx(2), pytest.approx(18.7 / 10.5))
    assert got["ci95"] == pytest.approx(0, abs=1e-12)


def test_what_was_not_measured_is_missing_and_says_so(tmp_path: Path) -> None:
    synthetic.write(tmp_path, "roofline/paper_throughput", synthetic.throughput(("alpaca_paper",)))
    synthetic.write(tmp_path, "roofline/paper_throughput_variants", synthetic.throughput_variants())
    table = fig12(tmp_path).comparison
    got = row(table, "ShareGPT OPT-13B", "vLLM")
    assert math.isnan(got["ours"])
    assert (got["n_seeds"], got["note"], got["published"]) == (0, "not measured", 1.93)
    assert row(table, "Alpaca OPT-66B", "vLLM")["note"] == ""
    assert len(table) == 6 * 9 + 2 * 7


def test_one_seed_without_a_crossing_makes_the_rate_missing() -> None:
    samples = pd.DataFrame(
        [("p", "vLLM", rate, seed, rate * slope) for seed, slope in ((0, 0.1), (1, 0.04)) for rate in (1.0, 5.0, 10.0)],
        columns=["panel", "series", "x", "seed", "value"],
    )
    table = rates(samples)
    assert table["ours"].isna().all()
    assert "does not cross 0.5 s/token" in table["note"][0]
    assert rates(samples[samples["seed"] == 0])["ours"].tolist() == [5.0]


def test_static_stands_for_fastertransformer_only_with_static_batching(tmp_path: Path) -> None:
    synthetic.write(tmp_path, "roofline/paper_throughput_variants", synthetic.throughput_variants())
    path = synthetic.write(tmp_path, "roofline/paper_throughput", synthetic.throughput())
    table = pd.read_parquet(path)
    batching = "config.scheduler.batching"
    wrong = table[table["config.allocator.name"] == "static"].assign(**{batching: "continuous"})
    wrong["metric.normalized_latency_s"] /= 3
    pd.concat([wrong, table]).to_parquet(path)
    assert row(fig12(tmp_path).comparison, "ShareGPT OPT-13B", "FasterTransformer")["ours"] == pytest.approx(0.55)


def test_panels_are_also_compared_with_prompts_scheduled_otherwise(results: Path) -> None:
    table = fig12(results).comparison
    variants = table[table["panel"].str.contains(",")]
    assert set(variants["panel"]) == {"Alpaca OPT-175B, prefill=mixed", "Alpaca OPT-13B, a step for each prompt"}
    assert "FasterTransformer" not in set(variants["series"])
    got = row(table, "Alpaca OPT-175B, prefill=mixed", "vLLM / Orca (Oracle)")
    assert (got["ours"], got["published"], got["unit"]) == (pytest.approx(2), pytest.approx(20.2 / 19.2), "ratio")


def test_savings_are_averaged_over_rates_before_seeds(results: Path) -> None:
    table = fig15(results).comparison
    got = row(table, "Alpaca beam search", "vLLM", 4)
    assert (got["ours"], got["n_seeds"], got["unit"]) == (pytest.approx(30), 3, "% of blocks")
    assert not table["panel"].str.contains("ShareGPT").any()
    assert "11 of its recorded searches one by one: 4.0 to 36.0" in got["note"]
    assert "allow 2.7 to 19.3" in row(table, "Alpaca parallel sampling", "vLLM", 4)["note"]


@pytest.mark.parametrize("num_sequences", PAIRINGS)
def test_what_pairings_allow_follows_from_the_histograms(num_sequences: int) -> None:
    """A prompt's full blocks are held once instead of ``num_sequences`` times, while the output grows."""
    count, block = 20_000, 16
    at = (np.arange(count) + 0.5) / count
    inputs, outputs = (
        values[np.searchsorted(np.cumsum(probabilities), at)]
        for values, probabilities in (pmf("alpaca", kind) for kind in ("input", "output"))
    )

    def saving(inputs: np.ndarray) -> float:
        lengths = np.repeat(inputs, outputs) + consecutive(np.zeros(count, np.int64), outputs)
        shared = (outputs * (inputs // block)).sum() / (-(-lengths // block)).sum()
        return 100 * shared * (num_sequences - 1) / num_sequences

    assert (saving(inputs[::-1]), saving(inputs)) == pytest.approx(PAIRINGS[num_sequences], abs=0.1)


def test_a_band_needs_recordings_of_every_width(results: Path, tmp_path: Path) -> None:
    shutil.copytree(results, tmp_path, dirs_exist_ok=True)
    narrow = [row for row in synthetic.beam_recordings() if row["config.workload.beam_width"] < 6]
    synthetic.write(tmp_path, "roofline/paper_beam_recordings", narrow)
    with pytest.raises(TableError, match=r"paper_beam_recordings.parquet: no row .* is 6"):
        fig15(tmp_path)


def test_ranges_of_the_text_appear_once_sharegpt_is_measured(tmp_path: Path) -> None:
    beams = synthetic.sharing("beam_width", saving=0.1)
    synthetic.write(tmp_path, "roofline/paper_parallel_sampling", synthetic.sharing("n", saving=0.02))
    synthetic.write(tmp_path, "roofline/paper_beam_recordings", synthetic.beam_recordings())
    sharegpt = [row | {"config.workload.name": "sharegpt_paper"} for row in beams]
    synthetic.write(tmp_path, "roofline/paper_beam_search", beams + sharegpt)
    table = fig15(tmp_path).comparison
    got = row(table, "ShareGPT beam search", "vLLM", 6)
    assert (got["ours"], got["published"], got["origin"]) == (pytest.approx(50), 66.3, "text")
    assert row(table, "ShareGPT parallel sampling", "vLLM", 2)["note"] == "not measured"


def test_prefixes_are_told_apart_by_their_length(tmp_path: Path) -> None:
    rows = synthetic.curve("paged", "prefix", config__workload__prefix__tokens=341)
    rows += synthetic.curve("paged", "prefix", config__workload__prefix__tokens=200)
    synthetic.write(tmp_path, "roofline/paper_shared_prefix", rows)
    table = fig16(tmp_path).comparison
    five, one = row(table, "5-shot", "vLLM"), row(table, "1-shot", "vLLM")
    assert (five["ours"], five["published"], five["note"]) == (pytest.approx(5.5), 42.7, "")
    assert one["note"] == "not measured"


def test_kernel_overhead_is_a_ratio(results: Path) -> None:
    got = row(fig18a(results).comparison, "", "batch 8", 64)
    assert got["ours"] == pytest.approx(1.1)
    assert got["published"] == pytest.approx(31.5 / 21.9)
    assert math.isnan(got["ci95"])


def test_swap_is_in_and_out(results: Path) -> None:
    got = row(fig19a(results).comparison, "", "swap in + out", 1)
    assert (got["ours"], got["published"]) == (pytest.approx(30), 137.4)


def comparison(figure: str, ours: float) -> pd.DataFrame:
    columns = ["panel", "series", "x", "ours", "ci95", "n_seeds"]
    measured = pd.DataFrame([("p", "s", 1.0, ours, np.nan, 1)], columns=columns)
    published = pd.DataFrame([("p", "s", 1.0, 2.0, "plot")], columns=["panel", "series", "x", "value", "origin"])
    return fidelity.compare(measured, published, unit="s").assign(figure=figure)


def test_written_rows_keep_the_order_of_the_figures(tmp_path: Path) -> None:
    path, order = tmp_path / "fidelity.csv", ["one", "two"]
    fidelity.write(path, pd.concat([comparison("two", 3), comparison("one", 1)]), order=order, keep_others=False)
    assert pd.read_csv(path)["figure"].tolist() == order
    assert list(pd.read_csv(path)) == fidelity.COLUMNS


@pytest.mark.parametrize(("keep", "wanted"), [(True, [5.0, 3.0]), (False, [5.0])])
def test_rows_of_other_figures_are_kept_on_demand(tmp_path: Path, keep: bool, wanted: list[float]) -> None:
    path, order = tmp_path / "fidelity.csv", ["one", "two"]
    fidelity.write(path, pd.concat([comparison("one", 1), comparison("two", 3)]), order=order, keep_others=False)
    fidelity.write(path, comparison("one", 5), order=order, keep_others=keep)
    assert pd.read_csv(path)["ours"].tolist() == wanted
