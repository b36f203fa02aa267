"""The comparison picture of a sweep, drawn from stored runs."""

from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvbench.palette import COLOURS, LINES
from kvbench.recorder import PARTS
from kvbench.results import Run

matplotlib.use("Agg")


def comparison(runs: list[Run], names: list[str], stem: Path) -> Path:
    """Write ``stem``.png and .pdf: where the pool's slots went, batch, sharing, speed, and the pool over time
    where the runs kept their samples. Returns the PNG's path.
    """
    timed = all(run.has_samples for run in runs)
    below = [3.2 + 0.15 * len(runs) / _legend_columns(names)] if timed else []
    figure = Figure(figsize=(11, 1.6 + 0.55 * len(runs) + sum(below)), layout="constrained")
    heights = [1.2 + 0.45 * len(runs), *below]
    top, *rest = figure.subfigures(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
    waste, batch, speed = top.subplots(1, 3, width_ratios=[2.2, 1, 1], sharey=True)
    y = np.arange(len(runs))
    _stacked_parts(waste, runs, y)
    waste.set_yticks(y, names)
    waste.invert_yaxis()
    peaks = [run.metric("peak_batch") for run in runs]
    _bars(batch, y, [run.metric("mean_batch") for run in runs], "requests running\n(bar: mean, mark: peak)", peaks)
    batch.scatter(peaks, y, marker="|", s=160, color="black", zorder=3)
    _bars(speed, y, [run.metric("output_tokens_per_s") for run in runs], "output tokens/s", [0.0] * len(runs))
    for bottom in rest:
        _over_time(bottom.subplots(), runs, names)
    figure.savefig(stem.with_suffix(".pdf"))
    figure.savefig(stem.with_suffix(".png"), dpi=150)
    return stem.with_suffix(".png")


def _stacked_parts(axes: Axes, runs: list[Run], y: np.ndarray) -> None:
    left = np.zeros(len(runs))
    for part in PARTS:
        share = np.array([100 * (run.metric(f"{part}_fraction") or 0.0) for run in runs])
        axes.barh(y, share, left=left, color=COLOURS[part], label=part.replace("_", " "), edgecolor="white", lw=0.4)
        for i, value in enumerate(share):
            if value >= 6:
                axes.text(left[i] + value / 2, i, f"{value:.0f}", ha="center", va="center", fontsize=8)
        left += share
    axes.set(xlim=(0, 100), xlabel="share of the KV pool over time, %")
    axes.legend(ncols=3, fontsize=8, loc="lower left", bbox_to_anchor=(0, 1), frameon=False)


def _bars(axes: Axes, y: np.ndarray, values: list[float | None], label: str, ends: list[float | None]) -> None:
    """Bars labelled with their values, clear of the marks at ``ends``."""
    numbers = [value or 0.0 for value in values]
    axes.barh(y, numbers, color=LINES[0], height=0.6)
    for i, value in enumerate(numbers):
        end = max(value, ends[i] or 0.0)
        axes.annotate(f"{value:.1f}", (end, y[i]), (6, 0), textcoords="offset points", va="center", fontsize=8)
    axes.set_xlabel(label, fontsize=9)
    axes.margins(x=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def _over_time(axes: Axes, runs: list[Run], names: list[str]) -> None:
    for i, (run, name) in enumerate(zip(runs, names, strict=True)):
        steps = run.steps()
        pool = steps[list(PARTS)].iloc[0].sum()
        style = ("-", "--", ":")[i // len(LINES) % 3]
        axes.step(
            steps["start_s"],
            100 * steps["token_states"] / pool,
            where="post",
            label=name,
            color=LINES[i % len(LINES)],
            ls=style,
            lw=1.2,
        )
    axes.set(xlabel="time since start, s", ylabel="slots holding tokens\n% of pool", ylim=(0, 100))
    axes.legend(fontsize=8, ncols=_legend_columns(names), frameon=False, loc="lower left", bbox_to_anchor=(0, 1))
    axes.spines[["top", "right"]].set_visible(False)


def _legend_columns(names: list[str]) -> int:
    """As many as the picture's width holds of the longest name."""
    return max(1, min(6, len(names), 140 // (max(map(len, names)) + 6)))
