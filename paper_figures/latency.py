"""Figures 12, 14, 16 and 17: normalized latency against request rate, and the rate at 0.5 s/token."""

from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from paper_figures import paper, style
from paper_figures.drawing import Drawing
from paper_figures.fidelity import compare
from paper_figures.statistics import SERIES, over_seeds, rate_at
from paper_figures.tables import ORCA_AND_PAGED, SYSTEMS, read

LEVEL = 0.5  # s/token; the paper names no objective, this is the project's choice
BASELINES = ("FasterTransformer", "Orca (Max)", "Orca (Pow2)", "Orca (Oracle)")
THROUGHPUT = "roofline/paper_throughput.parquet"
PARALLEL = "roofline/paper_parallel_sampling.parquet"
BEAM = "roofline/paper_beam_search.parquet"
PREFIX = "roofline/paper_shared_prefix.parquet"
CHAT = "roofline/paper_chat.parquet"

ALLOCATOR = {"allocator": "config.allocator.name"}
WORKLOAD = {"workload": "config.workload.name"}
RATE = {"x": "config.workload.arrival.rate", "seed": "config.seed"}
LATENCY = {"value": "metric.normalized_latency_s"}

MODELS = {"opt_13b": "OPT-13B", "opt_66b": "OPT-66B", "opt_175b": "OPT-175B"}
DATASETS = {"sharegpt_paper": "ShareGPT", "alpaca_paper": "Alpaca"}
SHOTS = {80: "1-shot", 341: "5-shot"}  # tokens of the shared prefix


def fig12(results: Path) -> Drawing:
    table = read(
        results / THROUGHPUT,
        labels={**ALLOCATOR, **WORKLOAD, "model": "config.model.name", "batching": "config.scheduler.batching"},
        keys=RATE,
        values=LATENCY,
        keep={"allocator": list(SYSTEMS), "model": list(MODELS), "workload": list(DATASETS)},
    )
    # `static` stands for FasterTransformer only as that system batched; the others batch continuously
    table = table[(table["allocator"] == "static") == (table["batching"] == "static")]
    table["panel"] = table["workload"].map(DATASETS) + " " + table["model"].map(MODELS)
    panels = [f"{data} {model}" for data in DATASETS.values() for model in MODELS.values()]
    return _draw(_samples(table), panels, "fig12", curves=paper.load("fig12_curves"), columns=3)


def fig14(results: Path) -> Drawing:
    tables = []
    for path, key, panel in ((PARALLEL, "n", "parallel sampling n="), (BEAM, "beam_width", "beam search k=")):
        table = read(
            results / path,
            labels={**ALLOCATOR, **WORKLOAD},
            keys={**RATE, "width": f"config.workload.{key}"},
            values=LATENCY,
            keep={"allocator": ORCA_AND_PAGED, "workload": ["alpaca_paper"], "width": [2, 4, 6]},
        )
        table["panel"] = panel + table["width"].astype(int).astype(str)
        tables.append(table)
    panels = [f"parallel sampling n={n}" for n in (2, 4, 6)] + [f"beam search k={k}" for k in (2, 4, 6)]
    return _draw(_samples(pd.concat(tables)), panels, "fig14", columns=3)


def fig16(results: Path) -> Drawing:
    table = read(
        results / PREFIX,
        labels=ALLOCATOR,
        keys={**RATE, "prefix": "config.workload.prefix_tokens"},
        values=LATENCY,
        keep={"allocator": ["buddy_oracle", "paged"], "prefix": list(SHOTS)},
    )
    table["panel"] = table["prefix"].map(SHOTS)
    return _draw(_samples(table), list(SHOTS.values()), "fig16", columns=2)


def fig17(results: Path) -> Drawing:
    table = read(results / CHAT, labels=ALLOCATOR, keys=RATE, values=LATENCY, keep={"allocator": ORCA_AND_PAGED})
    table["panel"] = "chat"
    return _draw(_samples(table), ["chat"], "fig17", columns=1)


def rates(samples: pd.DataFrame, level: float = LEVEL) -> pd.DataFrame:
    """Request rate at ``level`` per system, and paged's over each other's: ``over_seeds`` columns and ``note``.

    samples: panel, series, x (requests/s), seed, value (s/token). Ratios are taken seed by seed, on equal traces.
    """
    rows = []
    for (panel, _), curves in samples.groupby(["panel", "seed"], sort=False):
        found = {
            series: rate_at(curve["x"].to_numpy(), curve["value"].to_numpy(), level)
            for series, curve in curves.groupby("series", sort=False)
        }
        rows += [(panel, series, level, value) for series, value in with_ratios(found).items()]
    summary = over_seeds(pd.DataFrame(rows, columns=[*SERIES, "value"]))
    note = f"a seed's curve does not cross {level:g} s/token within the measured rates"
    return summary.assign(note=np.where(summary["ours"].isna(), note, ""))


def with_ratios(by_system: dict[str, float]) -> dict[str, float]:
    """The systems' rates, and paged's over each baseline's that is there."""
    baselines = [name for name in BASELINES if "vLLM" in by_system and name in by_system]
    return by_system | {f"vLLM / {name}": by_system["vLLM"] / by_system[name] for name in baselines}


def _and_ratios(published: pd.DataFrame) -> pd.DataFrame:
    rows = [
        (panel, series, LEVEL, value, "plot")
        for panel, table in published.groupby("panel", sort=False)
        for series, value in with_ratios(dict(zip(table["series"], table["value"], strict=True))).items()
    ]
    return pd.DataFrame(rows, columns=[*SERIES, "value", "origin"])


def _samples(table: pd.DataFrame) -> pd.DataFrame:
    table["series"] = table["allocator"].map(SYSTEMS)
    return table[[*SERIES, "seed", "value"]]


def _draw(
    samples: pd.DataFrame, panels: list[str], name: str, *, columns: int, curves: pd.DataFrame | None = None
) -> Drawing:
    """One panel per name in ``panels``. curves: published ones; without, the published rates at LEVEL are marked."""
    published = paper.load(f"{name}_rates")
    points = published.assign(x=published["value"], value=LEVEL) if curves is None else curves
    comparison = compare(rates(samples), _and_ratios(published), unit="requests/s")
    comparison.loc[comparison["series"].str.contains(" / ", regex=False), "unit"] = "ratio"
    rows = len(panels) // columns
    figure = style.canvas(0.9 + 1.75 * rows, width=style.WIDTH if columns > 1 else 4.6)
    grid = figure.subplots(rows, columns, sharey=True, squeeze=False)
    ours = over_seeds(samples)
    for i, (axes, panel) in enumerate(zip(grid.flat, panels, strict=True)):
        _panel(axes, ours[ours["panel"] == panel], points[points["panel"] == panel])
        axes.set_title(f"({'abcdef'[i]}) {panel}" if len(panels) > 1 else panel)
    for axes in grid[:, 0]:
        axes.set_ylabel("normalized latency, s/token")
    for axes in grid[-1]:
        axes.set_xlabel("request rate, requests/s")
    drawn = [series for series in style.LOOKS if series in {*ours["series"], *points["series"]}]
    style.legend(
        figure,
        drawn,
        columns=max(2, columns),
        intervals=bool(ours["ci95"].notna().any()),
        published=f"published, rate at {LEVEL:g} s/token" if curves is None else "published",
    )
    return Drawing(figure, comparison)


def _panel(axes: Axes, ours: pd.DataFrame, points: pd.DataFrame) -> None:
    for series, curve in points.groupby("series", sort=False):
        style.line(axes, series, curve["x"], curve["value"], published=True)
    for series, curve in ours.sort_values("x").groupby("series", sort=False):
        style.line(axes, series, curve["x"], curve["ours"], half_width=curve["ci95"])
    axes.axhline(LEVEL, color="0.6", linewidth=0.6, linestyle=":", zorder=1)
    axes.set(ylim=(0, 1), xlim=(0, 1.05 * max([*points["x"], *ours["x"]])))
    if ours.empty:
        axes.text(0.5, 0.85, "not measured", transform=axes.transAxes, ha="center", color="0.4", style="italic")
