"""Figures 1, 18 and 19: curves over batch size, context or block size, ours on the published ones."""

from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from paper_figures import paper, style
from paper_figures.drawing import Drawing
from paper_figures.fidelity import compare
from paper_figures.statistics import over_seeds
from paper_figures.tables import read

BATCH_THROUGHPUT = "roofline/paper_batch_throughput.parquet"
BLOCK_SIZE = "roofline/paper_block_size.parquet"
SWAP = "roofline/paper_swap_vs_recompute.parquet"
SWAP_COST = "roofline/swap_microbenchmark.parquet"
ATTENTION = "cpu/attention_kernel.parquet"

SEED = {"seed": "config.seed"}
BLOCK = {"x": "config.allocator.make.block_size"}
LATENCY = {"value": "metric.normalized_latency_s"}
DATASETS = {"sharegpt_paper": "ShareGPT", "alpaca_paper": "Alpaca"}
PAPER_BLOCK_SIZE = 16  # the paper's default


def fig1(results: Path) -> Drawing:
    samples = read(
        results / BATCH_THROUGHPUT,
        keys={"x": "metric.peak_batch", **SEED},
        values={"value": "metric.output_tokens_per_s"},
    ).assign(panel="", series="throughput")
    drawing, axes = _compared(samples, "fig1", unit="tokens/s", width=3.6)
    axes.set(xlabel="batch size, requests", ylabel="throughput, tokens/s", xlim=(0, None), ylim=(0, None))
    return drawing


def fig18a(results: Path) -> Drawing:
    table = read(
        results / ATTENTION,
        keys={"x": "context", "batch": "batch", "block_size": "block_size"},
        values={"paged": "paged_us", "contiguous": "contiguous_us"},
        keep={"batch": [8, 32], "block_size": [PAPER_BLOCK_SIZE]},
    )
    series = "batch " + table["batch"].astype(int).astype(str)
    samples = table.assign(panel="", series=series, value=table["paged"] / table["contiguous"])
    drawing, axes = _compared(samples, "fig18a", unit="ratio", published=_published_overhead())
    contexts = sorted({*samples["x"], 64, 128, 256})
    axes.set_xscale("log", base=2)
    axes.set_xticks(contexts, [f"{context:g}" for context in contexts])
    axes.axhline(1, color="0.6", linewidth=0.6, linestyle=":", zorder=1)
    axes.set(xlabel="context, tokens", ylabel="attention kernel's time,\npaged / contiguous")
    axes.set_title("ours: a CPU; published: A100, vLLM / FasterTransformer")
    return drawing


def _published_overhead() -> pd.DataFrame:
    times = paper.load("fig18a").pivot(index=["panel", "x"], columns="series", values="value")
    ratio = (times["vLLM"] / times["FasterTransformer"]).rename("value").reset_index()
    return ratio.rename(columns={"panel": "series"}).assign(panel="", origin="plot")


def fig18b(results: Path) -> Drawing:
    table = read(
        results / BLOCK_SIZE,
        labels={"workload": "config.workload.name", "allocator": "config.allocator.name"},
        keys={**BLOCK, **SEED},
        values=LATENCY,
        keep={"workload": list(DATASETS), "allocator": ["paged"]},
    )
    samples = table.assign(panel="", series=table["workload"].map(DATASETS))
    drawing, axes = _compared(samples, "fig18b", unit="s/token")
    style.block_size_axis(axes)
    style.log_latency_axis(axes)
    return drawing


def fig19a(results: Path) -> Drawing:
    parts = {"recompute": "recompute_ms", "swap in": "swap_in_ms", "swap out": "swap_out_ms"}
    table = read(results / SWAP_COST, keys={"x": "block_size"}, values=parts)
    table["swap in + out"] = table["swap in"] + table["swap out"]
    samples = table.melt("x", [*parts, "swap in + out"], var_name="series").assign(panel="")
    drawing, axes = _compared(samples, "fig19a", unit="ms")
    style.block_size_axis(axes)
    axes.set(ylabel="time, ms", ylim=(0, None))
    return drawing


def fig19b(results: Path) -> Drawing:
    table = read(
        results / SWAP,
        labels={"series": "config.scheduler.preemption"},
        keys={**BLOCK, **SEED},
        values=LATENCY,
        keep={"series": ["recompute", "swap"]},
    )
    drawing, axes = _compared(table.assign(panel=""), "fig19b", unit="s/token")
    style.block_size_axis(axes)
    style.log_latency_axis(axes)
    return drawing


def _compared(
    samples: pd.DataFrame, name: str, *, unit: str, width: float = 4.6, published: pd.DataFrame | None = None
) -> tuple[Drawing, Axes]:
    """One picture of ours and the published curves. samples: panel, series, x, value, a row per seed."""
    published = paper.load(name) if published is None else published
    ours = over_seeds(samples)
    figure: Figure = style.canvas(2.7, width=width)
    axes: Axes = figure.subplots()
    for series, curve in published.groupby("series", sort=False):
        style.line(axes, series, curve["x"], curve["value"], published=True)
    for series, curve in ours.sort_values("x").groupby("series", sort=False):
        style.line(axes, series, curve["x"], curve["ours"], half_width=curve["ci95"])
    drawn = [series for series in style.LOOKS if series in {*ours["series"], *published["series"]}]
    style.legend(figure, drawn, columns=2, intervals=bool(ours["ci95"].notna().any()))
    return Drawing(figure, compare(ours, published, unit=unit)), axes
