"""Figures 2, 13 and 15: where KV memory goes, how many requests it holds, what sharing saves."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from kvbench.palette import COLOURS
from paper_figures import columns, paper, style
from paper_figures.drawing import Drawing
from paper_figures.fidelity import compare
from paper_figures.latency import LEVEL
from paper_figures.statistics import over_seeds
from paper_figures.tables import TableError, read

LABELS = {"allocator": columns.ALLOCATOR, "workload": columns.WORKLOAD}
KEYS = {"rate": columns.RATE, "seed": columns.SEED}
SHAREGPT, ALPACA = "sharegpt_paper", "alpaca_paper"
RATES = {SHAREGPT: 2.0, ALPACA: 30.0}  # requests/s of the paper's batch sizes
SYSTEM_ORDER = [columns.SYSTEMS[name] for name in columns.ORCA_AND_PAGED]

SHARING = ((columns.PARALLEL_SAMPLING, "parallel sampling", "n"), (columns.BEAM_SEARCH, "beam search", "beam_width"))
WIDTHS = (2, 4, 6)  # sequences or beams per request
BAND = (0.1, 0.9)  # quantiles over recorded beam searches
BAND_LOOK: dict[str, Any] = {"color": "#D55E00", "linewidth": 3}
# What full blocks of prompts save if the histograms' longest inputs have the shortest outputs, or the longest ones.
PAIRINGS = {2: (1.8, 12.8), 4: (2.7, 19.3), 6: (3.0, 21.4)}

# The paper's parts, and the label and colour of each. Its "external" is what is neither held nor handed out.
PARTS = {
    "token_states": ("token states", COLOURS["token_states"]),
    "reservation": ("reservation", COLOURS["reservation"]),
    "internal_fragmentation": ("internal fragmentation", COLOURS["internal_fragmentation"]),
    "external": ("external & others (ours: rounding + free)", "#999999"),
}


def fig2(results: Path) -> Drawing:
    parts = ["token_states", "reservation", "internal_fragmentation", "rounding", "free"]
    table = read(
        results / columns.MEMORY_WASTE,
        labels=LABELS,
        keys=KEYS,
        values={part: f"metric.saturated_{part}_fraction" for part in parts},  # at steps that refused somebody
        keep={"allocator": columns.ORCA_AND_PAGED, "workload": [SHAREGPT], "rate": [RATES[SHAREGPT]]},
    )
    table = table.assign(
        panel=table["allocator"].map(columns.SYSTEMS),
        external=table["rounding"] + table["free"],
        waste=1 - table["token_states"],
    )
    samples = table.melt(["panel", "seed"], [*PARTS, "waste"], var_name="series").assign(x=np.nan)
    samples["value"] *= 100
    ours, published = over_seeds(samples), paper.load("fig2")
    tokens = published[published["series"] == "token_states"]
    published = pd.concat([published, tokens.assign(series="waste", value=100 - tokens["value"])])
    figure = style.canvas(3.1)
    _stacks(figure.subplots(), ours.rename(columns={"ours": "value"}), published)
    handles: list[Artist] = [Patch(facecolor=colour, label=label) for label, colour in PARTS.values()]
    if ours["ci95"].notna().any():
        interval: dict[str, Any] = {"color": "black", "marker": "|", "markersize": 9, "linestyle": ""}
        handles.append(Line2D([], [], label="95 % interval, token states", **interval))
    figure.legend(handles=handles, loc="outside lower center", ncols=3)
    return Drawing(figure, compare(ours, published, unit="% of pool"))


def _stacks(axes: Axes, ours: pd.DataFrame, published: pd.DataFrame) -> None:
    """Two stacked bars per system: ours filled, published hatched. ours, published: panel, series, value."""
    at = np.arange(len(SYSTEM_ORDER))
    for name, table, x in (("ours", ours, at - 0.2), ("published", published, at + 0.2)):
        shares = table.pivot(index="panel", columns="series", values="value").reindex(SYSTEM_ORDER).fillna(0)
        bottom = np.zeros(len(at))
        for part, (_, colour) in PARTS.items():
            look: dict[str, Any] = {"hatch": style.HATCH, "alpha": 0.6} if name == "published" else {}
            axes.bar(x, shares[part], 0.36, bottom=bottom, color=colour, edgecolor="white", linewidth=0.6, **look)
            for i, share in enumerate(shares[part]):
                if share >= 4:
                    axes.text(x[i], bottom[i] + share / 2, f"{share:.1f}", ha="center", va="center", fontsize=7)
            bottom += shares[part].to_numpy()
        for centre in x:
            axes.text(centre, -1.5, name, ha="center", va="top", fontsize=7)
    tokens = ours[ours["series"] == "token_states"].set_index("panel").reindex(SYSTEM_ORDER)
    axes.errorbar(at - 0.2, tokens["value"], tokens["ci95"], fmt="none", ecolor="black", elinewidth=0.8, capsize=3)
    axes.set_xticks(at, [style.LOOKS[system].label for system in SYSTEM_ORDER], fontsize=7.5)
    axes.tick_params(axis="x", length=0, pad=13)
    axes.set(ylabel="share of KV memory, %", ylim=(0, 100))


def fig13(results: Path) -> Drawing:
    table = read(
        results / columns.MEMORY_WASTE,
        labels=LABELS,
        keys=KEYS,
        values={"value": "metric.mean_batch"},
        keep={"allocator": columns.ORCA_AND_PAGED, "workload": list(RATES)},
    )
    table = table[table["rate"] == table["workload"].map(RATES)]
    samples = table.assign(
        panel=table["workload"].map(columns.DATASETS), series=table["allocator"].map(columns.SYSTEMS), x=table["rate"]
    )
    ours, published = over_seeds(samples), paper.load("fig13")
    figure = style.canvas(2.6)
    for axes, (workload, rate) in zip(figure.subplots(1, 2), RATES.items(), strict=True):
        dataset = columns.DATASETS[workload]
        mine, theirs = (table[table["panel"] == dataset].set_index("series") for table in (ours, published))
        _pairs(axes, mine, theirs, SYSTEM_ORDER, [style.LOOKS[system].colour for system in SYSTEM_ORDER])
        names = [style.LOOKS[system].label.replace(" / ", "\n") for system in SYSTEM_ORDER]
        axes.set_xticks(axes.get_xticks(), names, fontsize=7)
        axes.set(title=f"{dataset}, {rate:g} requests/s", ylabel="requests running, average")
    _legend_of_pairs(figure, ours)
    return Drawing(figure, compare(ours, published, unit="requests"))


def fig15(results: Path) -> Drawing:
    samples = pd.concat([_savings(results / path, mode, key) for path, mode, key in SHARING])
    ours, published, band = over_seeds(samples), paper.load("fig15"), _band(results / columns.BEAM_RECORDINGS)
    ours["note"] = [_note(panel, int(width), band) for panel, width in zip(ours["panel"], ours["x"], strict=True)]
    if not ours["panel"].str.startswith("ShareGPT").any():  # the paper plots Alpaca; its text has ShareGPT's ranges
        published = published[published["panel"].str.startswith("Alpaca")]
    panels = list(dict.fromkeys(published["panel"]))
    rows = len(panels) // 2
    figure = style.canvas(0.65 + 1.9 * rows, width=5.5)
    for axes, panel in zip(figure.subplots(rows, 2, sharey=True, squeeze=False).flat, panels, strict=True):
        mine, theirs = (table[table["panel"] == panel].set_index("x") for table in (ours, published))
        _pairs(axes, mine, theirs, list(WIDTHS), [style.LOOKS["vLLM"].colour] * len(WIDTHS))
        if "beam" in panel:
            axes.vlines(np.arange(len(WIDTHS)), band["low"], band["high"], **BAND_LOOK)
        axes.set(title=panel, xlabel="beams per request" if "beam" in panel else "sequences per request")
        axes.set_ylabel("" if "beam" in panel else "blocks saved by sharing, %")
    recorded = Line2D([], [], **BAND_LOOK, label="single recordings, 10 to 90 %")
    _legend_of_pairs(figure, ours, recorded)
    return Drawing(figure, compare(ours, published, unit="% of blocks"))


def _band(path: Path) -> pd.DataFrame:
    """Savings, in %, when one recorded beam search is replayed by all: low, high and count, by the number of beams."""
    table = read(
        path,
        labels=LABELS,
        keys={"x": "config.workload.beam_width", "recording": columns.RECORDING},
        values={"value": columns.SAVING},
        keep={"allocator": ["paged"], "workload": [ALPACA], "x": list(WIDTHS)},
    )
    by_width = table.groupby("x")["value"]
    if missing := sorted({*WIDTHS} - {*by_width.groups}):
        raise TableError(f"{path}: no row whose 'config.workload.beam_width' is {missing[0]}")
    quantiles = 100 * by_width.quantile(list(BAND)).unstack()
    return quantiles.set_axis(["low", "high"], axis=1).assign(count=by_width.size())


def _note(panel: str, width: int, band: pd.DataFrame) -> str:
    unknown = "lengths paired independently, as the paper's pairing is not known"
    if not panel.startswith("Alpaca"):
        return unknown
    if "beam" in panel:
        low, high, count = band.loc[width]
        return f"{unknown}; beams of SmolLM2, {count:.0f} of its recorded searches one by one: {low:.1f} to {high:.1f}"
    least, most = PAIRINGS[width]
    return f"{unknown}: its histograms allow {least} to {most}"


def _savings(path: Path, mode: str, key: str) -> pd.DataFrame:
    """Saving by sequences per request, each seed's mean over the request rates that were kept up with."""
    table = read(
        path,
        labels=LABELS,
        keys={**KEYS, "x": f"config.workload.{key}"},
        values={"value": columns.SAVING, "latency": columns.LATENCY},
        keep={"allocator": ["paged"], "workload": list(columns.DATASETS), "x": list(WIDTHS)},
    )
    table = table[table["latency"] <= LEVEL].assign(panel=table["workload"].map(columns.DATASETS) + " " + mode)
    by_seed = table.groupby(["panel", "x", "seed"], sort=False)["value"].mean().reset_index()
    return by_seed.assign(series="vLLM", value=100 * by_seed["value"])


def _pairs(axes: Axes, ours: pd.DataFrame, published: pd.DataFrame, order: list, colours: list[str]) -> None:
    """Ours beside published, per entry of ``order`` (their index)."""
    at = np.arange(len(order))
    ours, published = ours.reindex(order), published.reindex(order)
    intervals = ours["ci95"].fillna(0) if ours["ci95"].notna().any() else None
    style.bars(axes, at - 0.2, ours["ours"], colours, width=0.36, half_width=intervals)
    style.bars(axes, at + 0.2, published["value"], colours, width=0.36, published=True)
    axes.set_xticks(at, [str(entry) for entry in order])
    axes.margins(y=0.12)


def _legend_of_pairs(figure: Figure, ours: pd.DataFrame, *others: Artist) -> None:
    handles: list[Artist] = [
        Patch(facecolor="0.4", label=style.ours_label(ours)),
        Patch(facecolor="white", edgecolor="0.4", hatch=style.HATCH, label="published"),
        *others,
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles))
