"""The picture of a capacity search."""

from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvbench.plots import LINES

COLUMNS = ("rate", "rate_interval", "gpus", "gpus_low", "gpus_high")


def draw(frame: pd.DataFrame, tried: pd.DataFrame, goal: float, stem: Path) -> Path:
    """Write ``stem``.png and .pdf: rate of a replica, GPUs needed, attainment by rate. Returns the PNG's path.

    frame: a row per system; without the ``COLUMNS`` where the objective is out of reach. tried: every rate tried,
    with columns ``run``, ``search``, ``rate``, ``attainment``. goal: attainment that is asked for.
    """
    figure = Figure(figsize=(11, 5 + 0.45 * len(frame)), layout="constrained")
    top, bottom = np.asarray(figure.subfigures(2, 1, height_ratios=[1.4 + 0.45 * len(frame), 3.2]))
    rates, gpus = top.subplots(1, 2, sharey=True)
    y = np.arange(len(frame))
    rate, half, count, low, high = frame.reindex(columns=list(COLUMNS)).to_numpy(float).T
    _bars(rates, y, rate, np.maximum(rate - half, 0.0), rate + half, "requests/s that one replica sustains", "{:.2f}")
    wanted = ", ".join(f"{traffic:g}" for traffic in frame["traffic"].unique())
    _bars(gpus, y, count, low, high, f"GPUs for {wanted} requests/s", "{:.0f}")
    rates.set_yticks(y, frame["run"])
    rates.invert_yaxis()
    _attainment(bottom.subplots(), tried, list(frame["run"]), goal)
    figure.savefig(stem.with_suffix(".pdf"))
    figure.savefig(stem.with_suffix(".png"), dpi=150)
    return stem.with_suffix(".png")


def _bars(
    axes: Axes, y: np.ndarray, values: np.ndarray, low: np.ndarray, high: np.ndarray, label: str, form: str
) -> None:
    """Bars with intervals, labelled clear of them; an interval without an end is drawn to the bar's and says so."""
    found = np.isfinite(values)
    below, above = (np.where(np.isfinite(end), end, values) for end in (low, high))
    axes.barh(y[found], values[found], color=LINES[5], height=0.6)
    spans = np.array([values - below, above - values])[:, found]
    axes.errorbar(values[found], y[found], xerr=spans, fmt="none", ecolor="black", capsize=3, lw=1)
    for i, value in enumerate(values):
        text = form.format(value) if found[i] else "objective out of reach"
        text += f" (from {form.format(low[i])}, no upper limit)" if high[i] == np.inf else ""
        axes.annotate(
            text, (above[i] if found[i] else 0.0, y[i]), (6, 0), textcoords="offset points", va="center", fontsize=8
        )
    axes.set_xlabel(f"{label}\n(mark: 95 % interval over seeds)", fontsize=9)
    axes.margins(x=0.3)
    axes.set_xlim(left=0)
    axes.spines[["top", "right"]].set_visible(False)


def _attainment(axes: Axes, tried: pd.DataFrame, names: list[str], goal: float) -> None:
    """A line per search, those of one system's seeds in one colour."""
    for (name, _), entries in tried.groupby(["run", "search"], sort=False):
        i = names.index(str(name))
        entries = entries.sort_values("rate")
        marker, colour = "os^"[i // len(LINES) % 3], LINES[i % len(LINES)]
        label = str(name) if name not in axes.get_legend_handles_labels()[1] else None
        axes.plot(entries["rate"], 100 * entries["attainment"], marker + "-", ms=3, lw=1, color=colour, label=label)
    axes.axhline(100 * goal, color="black", ls=":", lw=1)
    axes.annotate(
        f"asked for: {100 * goal:g} %",
        (0.01, 100 * goal),
        (0, -4),
        xycoords=("axes fraction", "data"),
        textcoords="offset points",
        va="top",
        fontsize=8,
    )
    axes.set(xscale="log", xlabel="requests/s offered to one replica (log scale)", ylim=(0, 103))
    axes.set_ylabel("requests that meet\nthe objective, %")
    axes.legend(fontsize=8, ncols=6, frameon=False, loc="lower left", bbox_to_anchor=(0, 1))
    axes.spines[["top", "right"]].set_visible(False)
