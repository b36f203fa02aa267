"""The picture of a capacity search."""

from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvbench.plots import LINES


def draw(frame: pd.DataFrame, tried: pd.DataFrame, stem: Path) -> Path:
    """Write ``stem``.png and .pdf: rate of a replica, GPUs needed, attainment by rate. Returns the PNG's path."""
    figure = Figure(figsize=(11, 1.8 + 0.45 * len(frame) + 3.2), layout="constrained")
    top, bottom = np.asarray(figure.subfigures(2, 1, height_ratios=[1.4 + 0.45 * len(frame), 3.2]))
    rates, gpus = top.subplots(1, 2, sharey=True)
    y = np.arange(len(frame))
    frame = frame.reindex(columns=[*frame.columns, *({"rate", "rate_interval", "gpus"} - set(frame.columns))])
    half = frame["rate_interval"].fillna(0.0).to_numpy()
    _bars(rates, y, frame["rate"].to_numpy(), np.array([half, half]), "requests/s that one replica sustains", "{:.2g}")
    wanted = ", ".join(f"{traffic:g}" for traffic in frame["traffic"].unique())
    spans = np.zeros((2, len(frame)))
    if "gpus_low" in frame:
        spans = np.abs(frame[["gpus_low", "gpus_high"]].sub(frame["gpus"], axis=0).to_numpy().T)
        spans = np.where(np.isfinite(spans), spans, 0.0)
    _bars(gpus, y, frame["gpus"].to_numpy(), spans, f"GPUs for {wanted} requests/s", "{:.0f}")
    rates.set_yticks(y, frame["run"])
    rates.invert_yaxis()
    _attainment(bottom.subplots(), tried)
    figure.savefig(stem.with_suffix(".pdf"))
    figure.savefig(stem.with_suffix(".png"), dpi=150)
    return stem.with_suffix(".png")


def _bars(axes: Axes, y: np.ndarray, values: np.ndarray, spans: np.ndarray, label: str, form: str) -> None:
    """Bars with 95 % intervals, labelled clear of them."""
    found = np.isfinite(values)
    axes.barh(y[found], values[found], xerr=spans[:, found], color=LINES[0], height=0.6, capsize=3)
    for i, value in enumerate(values):
        end = value + spans[1, i] if found[i] else 0.0
        text = form.format(value) if found[i] else "objective out of reach"
        axes.annotate(text, (end, y[i]), (6, 0), textcoords="offset points", va="center", fontsize=8)
    axes.set_xlabel(f"{label}\n(mark: 95 % interval over seeds)", fontsize=9)
    axes.margins(x=0.2)
    axes.spines[["top", "right"]].set_visible(False)


def _attainment(axes: Axes, tried: pd.DataFrame) -> None:
    for i, (name, entries) in enumerate(tried.groupby("run", sort=False)):
        entries = entries.sort_values("rate")
        style = ("o-", "s--", "^:")[i // len(LINES) % 3]
        axes.plot(entries["rate"], 100 * entries["attainment"], style, ms=3, lw=1, color=LINES[i % len(LINES)], label=name)
    axes.set(xscale="log", xlabel="requests/s offered to one replica (log scale)", ylim=(0, 103))
    axes.set_ylabel("requests that meet the objective, %")
    axes.legend(fontsize=8, ncols=6, frameon=False, loc="lower left", bbox_to_anchor=(0, 1))
    axes.spines[["top", "right"]].set_visible(False)
