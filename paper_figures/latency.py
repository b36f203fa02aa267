"""Figures 12, 14, 16 and 17: normalized latency against request rate, and the rate at 0.5 s/token."""

from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from paper_figures import columns, paper, style
from paper_figures.drawing import Drawing
from paper_figures.fidelity import compare
from paper_figures.statistics import SERIES, over_seeds, rate_at
from paper_figures.tables import read

LEVEL = 0.5  # s/token; the paper names no objective, this is the project's choice
BASELINES = ("FasterTransformer", "Orca (Max)", "Orca (Pow2)", "Orca (Oracle)")
KEYS = {"x": columns.RATE, "seed": columns.SEED}
VALUE = {"value": columns.LATENCY}

# Why ours may differ, by panel of Figure 12. 1 / rate - output tokens x step / batch, with Figure 13's batches and
# steps of Figure 1's line at the KV that those batches hold, is 22.1, 21.7 and 17.8 ms for pow2, oracle and vLLM.
NOTES = {
    "Alpaca OPT-13B": (
        "published: 18 to 22 ms per request beside decode steps at Figure 1's line, nearly a read of the weights for "
        "each prompt; ours: 3 to 5 prompts share one; compared below with a step for each prompt"
    ),
    "Alpaca OPT-175B": (
        "256 sequences bind, not memory: what pow2 refuses gathers into fewer prefill steps, each reading the weights; "
        "with a step for each prompt, and with scheduler.prefill=mixed, pow2 is below oracle and paged as published"
    ),
}
SHOTS = {80: "1-shot", 341: "5-shot"}  # tokens of the shared prefix


def fig12(results: Path) -> Drawing:
    table = read(
        results / columns.THROUGHPUT,
        labels={
            "allocator": columns.ALLOCATOR,
            "workload": columns.WORKLOAD,
            "model": columns.MODEL,
            "batching": columns.BATCHING,
        },
        keys=KEYS,
        values=VALUE,
        keep={"allocator": list(columns.SYSTEMS), "model": list(columns.MODELS), "workload": list(columns.DATASETS)},
    )
    # `static` stands for FasterTransformer only as that system batched; the others batch continuously
    table = table[(table["allocator"] == "static") == (table["batching"] == "static")]
    table = table.assign(panel=table["workload"].map(columns.DATASETS) + " " + table["model"].map(columns.MODELS))
    panels = [f"{data} {model}" for data in columns.DATASETS.values() for model in columns.MODELS.values()]
    drawing = _draw(_samples(table), panels, "fig12", curves=paper.load("fig12_curves"), num_columns=3)
    rows = drawing.comparison
    explained = rows["series"].isin(["Orca (Pow2)", "Orca (Oracle)", "vLLM", "vLLM / Orca (Pow2)"]) & (
        rows["note"] == ""
    )
    rows["note"] = rows["note"].mask(explained, rows["panel"].map(NOTES).fillna(""))
    return Drawing(
        drawing.figure, pd.concat([rows, _variants(results / columns.THROUGHPUT_VARIANTS)], ignore_index=True)
    )


def _variants(path: Path) -> pd.DataFrame:
    """The comparison of the panels that were also measured with prompts scheduled otherwise."""
    table = read(
        path,
        labels={"allocator": columns.ALLOCATOR, "model": columns.MODEL, "variant": columns.EXPERIMENT},
        keys=KEYS,
        values=VALUE,
        keep={"allocator": columns.ORCA_AND_PAGED, "model": list(columns.MODELS), "variant": list(columns.VARIANTS)},
    )
    panel = "Alpaca " + table["model"].map(columns.MODELS)
    samples = _samples(table.assign(panel=panel + table["variant"].map(columns.VARIANTS)))
    published = _and_ratios(paper.load("fig12_rates"))
    published = published[~published["series"].str.contains("FasterTransformer")]
    variants = [published.assign(panel=published["panel"] + how) for how in columns.VARIANTS.values()]
    measured = pd.concat(variants, ignore_index=True)
    return _compared(samples, measured[measured["panel"].isin(samples["panel"])])


def fig14(results: Path) -> Drawing:
    tables = []
    for path, key, panel in (
        (columns.PARALLEL_SAMPLING, "n", "parallel sampling n="),
        (columns.BEAM_SEARCH, "beam_width", "beam search k="),
    ):
        table = read(
            results / path,
            labels={"allocator": columns.ALLOCATOR, "workload": columns.WORKLOAD},
            keys={**KEYS, "width": f"config.workload.{key}"},
            values=VALUE,
            keep={"allocator": columns.ORCA_AND_PAGED, "workload": ["alpaca_paper"], "width": [2, 4, 6]},
        )
        tables.append(table.assign(panel=panel + table["width"].astype(int).astype(str)))
    panels = [f"parallel sampling n={n}" for n in (2, 4, 6)] + [f"beam search k={k}" for k in (2, 4, 6)]
    return _draw(_samples(pd.concat(tables)), panels, "fig14", num_columns=3)


def fig16(results: Path) -> Drawing:
    table = read(
        results / columns.SHARED_PREFIX,
        labels={"allocator": columns.ALLOCATOR},
        keys={**KEYS, "prefix": columns.PREFIX_TOKENS},
        values=VALUE,
        keep={"allocator": ["buddy_oracle", "paged"], "prefix": list(SHOTS)},
    )
    table = table.assign(panel=table["prefix"].map(SHOTS))
    return _draw(_samples(table), list(SHOTS.values()), "fig16", num_columns=2)


def fig17(results: Path) -> Drawing:
    table = read(
        results / columns.CHAT,
        labels={"allocator": columns.ALLOCATOR},
        keys=KEYS,
        values=VALUE,
        keep={"allocator": columns.ORCA_AND_PAGED},
    )
    return _draw(_samples(table.assign(panel="chat")), ["chat"], "fig17", num_columns=1)


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
    return table.assign(series=table["allocator"].map(columns.SYSTEMS))[[*SERIES, "seed", "value"]]


def _compared(samples: pd.DataFrame, published: pd.DataFrame) -> pd.DataFrame:
    comparison = compare(rates(samples), published, unit="requests/s")
    comparison.loc[comparison["series"].str.contains(" / ", regex=False), "unit"] = "ratio"
    return comparison


def _draw(
    samples: pd.DataFrame, panels: list[str], name: str, *, num_columns: int, curves: pd.DataFrame | None = None
) -> Drawing:
    """One panel per name in ``panels``. curves: published ones; without, the published rates at LEVEL are marked."""
    published = paper.load(f"{name}_rates")
    points = published.assign(x=published["value"], value=LEVEL) if curves is None else curves
    comparison = _compared(samples, _and_ratios(published))
    rows = len(panels) // num_columns
    figure = style.canvas(0.9 + 1.75 * rows, width=style.WIDTH if num_columns > 1 else 4.6)
    grid = figure.subplots(rows, num_columns, sharey=True, squeeze=False)
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
        columns=max(2, num_columns),
        ours=style.ours_label(ours),
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
