"""Comparing runs of ``attention_kernel``: a table, and a picture after Fig. 18a of the paper."""

from pathlib import Path

import matplotlib
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich import box
from rich.console import Console
from rich.table import Table

from kvbench.attention_kernel.summary import SETTING, summarize
from kvbench.results import Run

matplotlib.use("Agg")

_USUAL_BLOCK_SIZE = 16
_LINES = {  # column: label, colour and dash
    "contiguous_us": ("contiguous", "#0072B2", "-"),
    "paged_us": ("paged, block {}", "#D55E00", "-"),
    "sdpa_us": ("torch SDPA, contiguous", "#999999", "--"),
    "flex_us": ("FlexAttention, paged, block {}", "#CC79A7", "--"),
    "flashinfer_us": ("FlashInfer, paged, block {}", "#009E73", "--"),
}
_RATIO_COLOURS = ("#56B4E9", "#D55E00", "#009E73", "#CC79A7")


def compare(runs: list[Run], directory: Path, console: Console) -> None:
    """Print a table, write ``attention_kernel.parquet`` (see ``summary``) and ``.png``, ``.pdf`` to ``directory``."""
    table = pd.concat([summarize(run) for run in runs], ignore_index=True)
    table.to_parquet(directory / "attention_kernel.parquet", index=False)
    console.print(_console_table(table))
    for run in runs:
        for name, reason in run.record["absent_peers"].items():
            console.print(f"left out: {name} ({reason})", soft_wrap=True)
    picture = draw(table, directory / "attention_kernel")
    console.print(f"picture: {picture}", soft_wrap=True)


def _console_table(table: pd.DataFrame) -> Table:
    """One line per setting; the ratios by block size with half the width of their 95 % interval."""
    shown = Table(box=box.SIMPLE_HEAD, padding=(0, 1), title="paged / contiguous time by block size (± half of 95 %)")
    sizes = sorted(table["block_size"].unique())
    headers = [*SETTING, "contig.\nus", "SDPA\nus", "GB/s of\nlimit"]
    for header in (*headers, *map(str, sizes)):
        shown.add_column(header, justify="right", no_wrap=True)
    for setting, rows in table.groupby(SETTING, sort=False):
        first = rows.iloc[0]
        rates = f"{first['contiguous_gb_per_s']:.1f}/{first['stream_gb_per_s']:.1f}"
        cells = [*map(str, setting), f"{first['contiguous_us']:.0f}", f"{first['sdpa_us']:.0f}", rates]
        by_size = rows.set_index("block_size")
        for size in sizes:
            row = by_size.loc[size]
            cells.append(f"{row['ratio']:.2f}±{(row['ratio_high'] - row['ratio_low']) / 2:.2f}")
        shown.add_row(*cells)
    return shown


def draw(table: pd.DataFrame, stem: Path) -> Path:
    """Write ``stem``.png and .pdf: time and ratio by context, a column per batch. Returns the PNG's path.

    Only the first dtype and number of threads is drawn.
    """
    first = table.iloc[0]
    table = table[(table["dtype"] == first["dtype"]) & (table["threads"] == first["threads"])]
    batches = sorted(table["batch"].unique())
    figure = Figure(figsize=(4.2 * len(batches) + 1, 6.4), layout="constrained")
    axes = figure.subplots(2, len(batches), squeeze=False, sharex=True, sharey="row")
    for column, batch in enumerate(batches):
        here = table[table["batch"] == batch]
        _draw_times(axes[0, column], here)
        _draw_ratios(axes[1, column], here)
        axes[0, column].set_title(f"batch {batch}", fontsize=10)
        axes[1, column].set_xlabel("context, tokens")
    axes[0, 0].set_ylabel("kernel time, us")
    axes[1, 0].set_ylabel("paged / contiguous time")
    axes[1, 0].set_ylim(0.9 * table["ratio"].min(), max(1.5, 1.1 * table["ratio"].max()))  # intervals may be cut off
    for row in axes:
        row[0].legend(fontsize=8, frameon=False)
    heads = f"{first['query_heads']}/{first['kv_heads']} heads x {first['head_dim']}"
    threads = "" if "NVIDIA" in first["device"] else f", threads {first['threads']}"
    figure.suptitle(f"{first['device']}\ndecode attention, {heads}, {first['dtype']}{threads}", fontsize=10)
    figure.savefig(stem.with_suffix(".pdf"))
    figure.savefig(stem.with_suffix(".png"), dpi=150)
    return stem.with_suffix(".png")


def _draw_times(axes: Axes, table: pd.DataFrame) -> None:
    for column, (label, colour, dash) in _LINES.items():
        timed = table[table[column].notna()]
        if len(timed):
            block_size = _default_block(timed)
            rows = timed[timed["block_size"] == block_size].sort_values("context")
            axes.plot(rows["context"], rows[column], dash, marker=".", color=colour, label=label.format(block_size))
    rows = table.drop_duplicates("context").sort_values("context")
    limit_us = rows["bytes"] / rows["stream_gb_per_s"] / 1e3
    axes.plot(rows["context"], limit_us, ":", color="black", label="the bytes, only moved")
    axes.set_xscale("log", base=2)
    axes.set_xticks(rows["context"], rows["context"])
    axes.set_yscale("log")


def _draw_ratios(axes: Axes, table: pd.DataFrame) -> None:
    sizes = sorted(table["block_size"].unique())
    chosen = sorted({sizes[0], sizes[len(sizes) // 4], _default_block(table), sizes[-1]})
    for colour, size in zip(_RATIO_COLOURS, chosen, strict=False):
        rows = table[table["block_size"] == size].sort_values("context")
        axes.plot(rows["context"], rows["ratio"], marker=".", color=colour, label=f"block {size}")
        axes.plot(rows["context"], rows["read_ratio"], ":", color=colour)
        axes.fill_between(rows["context"], rows["ratio_low"], rows["ratio_high"], color=colour, alpha=0.25, lw=0)
    if table["read_ratio"].notna().any():
        axes.plot([], [], ":", color="black", label="the same tokens, only read")
    axes.axhline(1, color="black", lw=0.6)


def _default_block(table: pd.DataFrame) -> int:
    """The usual block size, or the nearest that was timed."""
    return min(table["block_size"].unique(), key=lambda size: abs(size - _USUAL_BLOCK_SIZE))
