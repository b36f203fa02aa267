"""Figures 1, 18 and 19: curves over batch size, context or block size, ours on the published ones."""

from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from paper_figures import columns, paper, style
from paper_figures.drawing import Drawing
from paper_figures.fidelity import compare
from paper_figures.statistics import over_seeds
from paper_figures.tables import read

SEED = {"seed": columns.SEED}
BY_BLOCK_SIZE = {"x": columns.BLOCK, **SEED}
LATENCY = {"value": columns.LATENCY}
PAPER_BLOCK_SIZE = 16  # the paper's default


def fig1(results: Path) -> Drawing:
    samples = read(
        results / columns.BATCH_THROUGHPUT,
        keys={"x": "metric.peak_batch", **SEED},
        values={"value": "metric.output_tokens_per_s"},
    ).assign(panel="", series="throughput")
    note = "whole runs: prefills, preemptions and the drain count; the profile's line is of decode steps alone"
    drawing, axes = _compared(samples, "fig1", unit="tokens/s", width=3.6, note=note)
    axes.set(xlabel="batch size, requests", ylabel="throughput, tokens/s", xlim=(0, None), ylim=(0, None))
    return drawing


def fig18a(results: Path) -> Drawing:
    table = read(
        results / columns.ATTENTION_KERNEL,
        labels={"dtype": "dtype"},
        keys={"x": "context", "batch": "batch", "block_size": "block_size", "threads": "threads"},
        values={"paged": "paged_us", "contiguous": "contiguous_us"},
        keep={"dtype": ["float32"], "threads": [1], "batch": [8, 32], "block_size": [PAPER_BLOCK_SIZE]},
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
        results / columns.BLOCK_SIZE,
        labels={"workload": columns.WORKLOAD, "allocator": columns.ALLOCATOR},
        keys=BY_BLOCK_SIZE,
        values=LATENCY,
        keep={"workload": list(columns.DATASETS), "allocator": ["paged"]},
    )
    samples = table.assign(panel="", series=table["workload"].map(columns.DATASETS))
    note = "the cost model has no time per block in attention"
    drawing, axes = _compared(samples, "fig18b", unit="s/token", note=note)
    style.block_size_axis(axes)
    style.log_latency_axis(axes)
    return drawing


def fig19a(results: Path) -> Drawing:
    table = read(
        results / columns.SWAP_MICROBENCHMARK,
        labels={"how": columns.PREEMPTION},
        keys={"x": columns.BLOCK, "seed": columns.SEED},
        values={name: f"metric.{name}" for name in ("copy_s", "num_preemptions", "prefill_s", "num_prefills")},
        keep={"how": ["recompute", "swap"]},
    )
    moved = 1e3 * table["copy_s"] / table["num_preemptions"]  # out and in, which our model takes to cost the same
    recomputed = 1e3 * table["prefill_s"] / table["num_prefills"]
    values = {"swap in": moved / 2, "swap out": moved / 2, "swap in + out": moved, "recompute": recomputed}
    samples = table.assign(**values).melt(["how", "x", "seed"], [*values], var_name="series").assign(panel="")
    samples = samples[(samples["series"] == "recompute") == (samples["how"] == "recompute")]
    drawing, axes = _compared(samples, "fig19a", unit="ms")
    style.block_size_axis(axes)
    axes.set(ylabel="time, ms", ylim=(0, None))
    return drawing


def fig19b(results: Path) -> Drawing:
    table = read(
        results / columns.SWAP_VS_RECOMPUTE,
        labels={"series": columns.PREEMPTION},
        keys=BY_BLOCK_SIZE,
        values=LATENCY,
        keep={"series": ["recompute", "swap"]},
    )
    drawing, axes = _compared(table.assign(panel=""), "fig19b", unit="s/token")
    style.block_size_axis(axes)
    style.log_latency_axis(axes)
    return drawing


def _compared(
    samples: pd.DataFrame,
    name: str,
    *,
    unit: str,
    width: float = 4.6,
    published: pd.DataFrame | None = None,
    note: str = "",
) -> tuple[Drawing, Axes]:
    """One picture of ours and the published curves. samples: panel, series, x, value, a row per seed.

    note: why ours may differ, for the table.
    """
    published = paper.load(name) if published is None else published
    ours = over_seeds(samples).assign(note=note)
    figure: Figure = style.canvas(2.7, width=width)
    axes: Axes = figure.subplots()
    for series, curve in published.groupby("series", sort=False):
        style.line(axes, series, curve["x"], curve["value"], published=True)
    for series, curve in ours.sort_values("x").groupby("series", sort=False):
        style.line(axes, series, curve["x"], curve["ours"], half_width=curve["ci95"])
    drawn = [series for series in style.LOOKS if series in {*ours["series"], *published["series"]}]
    style.legend(figure, drawn, columns=2, ours=style.ours_label(ours))
    return Drawing(figure, compare(ours, published, unit=unit)), axes
