"""How every figure looks: colours and markers of the series, ours filled and solid, published hollow and dashed."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib import rc_context
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import NullLocator

from kvbench.palette import LINES

RC: Any = {
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.6,
    "lines.linewidth": 1.1,
    "lines.markersize": 3.5,
    "hatch.linewidth": 0.5,
    "legend.frameon": False,
    "pdf.fonttype": 42,
}
WIDTH = 7.0  # inches: the text width of a printed page


@dataclass(frozen=True)
class Look:
    """A series in every picture. label: our name / the paper's."""

    label: str
    colour: str
    marker: str


_BLUE, _RED, _ORANGE, _PINK, _GREEN, _, _BLACK = LINES
LOOKS = {
    "FasterTransformer": Look("static batching / FasterTransformer", _BLACK, "s"),
    "Orca (Max)": Look("buddy max / Orca (Max)", _RED, "^"),
    "Orca (Pow2)": Look("buddy pow2 / Orca (Pow2)", _ORANGE, "v"),
    "Orca (Oracle)": Look("buddy oracle / Orca (Oracle)", _GREEN, "D"),
    "vLLM": Look("paged / vLLM", _BLUE, "o"),
    "throughput": Look("throughput", _BLUE, "o"),
    "ShareGPT": Look("ShareGPT", _BLUE, "o"),
    "Alpaca": Look("Alpaca", _RED, "^"),
    "batch 8": Look("batch 8", _BLUE, "o"),
    "batch 32": Look("batch 32", _RED, "^"),
    "recompute": Look("recompute", _BLACK, "s"),
    "swap": Look("swap", _BLUE, "o"),
    "swap in": Look("swap in", _ORANGE, "v"),
    "swap out": Look("swap out", _GREEN, "D"),
    "swap in + out": Look("swap in + out", _BLUE, "o"),
}
OURS: dict[str, Any] = {"linestyle": "-", "zorder": 3}
# larger and on top, so that both show where they agree
PUBLISHED: dict[str, Any] = {
    "linestyle": (0, (3, 2)),
    "markerfacecolor": "none",
    "markersize": 5.5,
    "linewidth": 0.8,
    "zorder": 4,
}
HATCH = "/////"


def context() -> Any:
    return rc_context(RC)


def canvas(height: float, *, width: float = WIDTH) -> Figure:
    """An empty figure; inches."""
    return Figure(figsize=(width, height), layout="constrained")


def line(axes: Axes, series: str, x: Any, y: Any, *, half_width: Any = None, published: bool = False) -> None:
    """One curve. half_width: of the 95 % interval, drawn as a band; NaN where there is none."""
    look = LOOKS[series]
    axes.plot(x, y, color=look.colour, marker=look.marker, **(PUBLISHED if published else OURS))
    if half_width is not None:
        axes.fill_between(x, y - half_width, y + half_width, color=look.colour, alpha=0.2, linewidth=0)


def bars(
    axes: Axes, at: Any, heights: Any, colours: Any, *, width: float, half_width: Any = None, published: bool = False
) -> None:
    """Bars with their values on top: filled, or hatched where published. half_width: of the 95 % interval."""
    fill: dict[str, Any] = {"color": "white", "hatch": HATCH, "edgecolor": colours} if published else {"color": colours}
    drawn = axes.bar(at, heights, width=width, yerr=half_width, capsize=2, error_kw={"lw": 0.7}, linewidth=0.8, **fill)
    axes.bar_label(drawn, fmt="%.1f", fontsize=6.5, padding=1)


def ours_label(ours: pd.DataFrame) -> str:
    return "ours, with 95 % interval" if ours["ci95"].notna().any() else "ours"


def legend(figure: Figure, series: list[str], *, columns: int, ours: str, published: str = "published") -> None:
    """Below the figure: the series where there are several, then what filled and hollow mean."""
    looks = [LOOKS[name] for name in series] if len(series) > 1 else []
    colour = "0.3" if looks else LOOKS[series[0]].colour
    handles: list[Artist] = [Line2D([], [], color=look.colour, marker=look.marker, label=look.label) for look in looks]
    handles += [
        Line2D([], [], color=colour, marker="o", label=ours, **OURS),
        Line2D([], [], color=colour, marker="o", label=published, **PUBLISHED),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=columns)


def log_latency_axis(axes: Axes) -> None:
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_ylabel("normalized latency, s/token")


def block_size_axis(axes: Axes) -> None:
    sizes = [2**i for i in range(9)]
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("block size, tokens")


def save(figure: Figure, stem: Path) -> None:
    """``stem``.png and .pdf without dates or versions: drawn again from equal data, equal bytes."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(stem.with_suffix(".png"), dpi=200, metadata={"Software": None})
    figure.savefig(stem.with_suffix(".pdf"), metadata={"CreationDate": None, "Creator": None, "Producer": None})
