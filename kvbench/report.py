"""Comparing stored runs: a table, a CSV and a picture.

``python -m kvbench.report DIR`` redraws a sweep from its records.
"""

import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pandas as pd
from rich import box
from rich.table import Table
from yaml import YAMLError

from kvbench import metrics, plots, results
from kvbench.console import console
from kvbench.results import Run

MIB = 2**20
_MOST_DRAWN = 30  # runs in one picture

_HITS = "prefix_hit_fraction"

_COLUMNS: list[tuple[str, str, Callable[[float], str]]] = [
    ("batch\nmean", "mean_batch", lambda v: f"{v:.1f}"),
    ("batch\npeak", "peak_batch", lambda v: f"{v:.0f}"),
    ("tokens\n%", "token_states_fraction", lambda v: f"{100 * v:.1f}"),
    ("reserv.\n%", "reservation_fraction", lambda v: f"{100 * v:.1f}"),
    ("internal\n%", "internal_fragmentation_fraction", lambda v: f"{100 * v:.1f}"),
    ("rounding\n%", "rounding_fraction", lambda v: f"{100 * v:.1f}"),
    ("free\n%", "free_fraction", lambda v: f"{100 * v:.1f}"),
    ("stranded\n%", "stranded_fraction", lambda v: f"{100 * v:.1f}"),
    ("sharing\nsaves %", "sharing_saving_fraction", lambda v: f"{100 * v:.1f}"),
    ("prefix\nhits %", _HITS, lambda v: f"{100 * v:.1f}"),
    ("copied\nblocks", "copied_blocks", lambda v: f"{v:.0f}"),
    ("copied\nMiB", "copied_bytes", lambda v: f"{v / MIB:.1f}"),
    ("swapped\nMiB", "swapped_bytes", lambda v: f"{v / MIB:.1f}"),
    ("pre-\nempt.", "num_preemptions", lambda v: f"{v:.0f}"),
    ("tokens\n/s", "output_tokens_per_s", lambda v: f"{v:.1f}"),
    ("TTFT s\np50", "ttft_p50_s", lambda v: f"{v:.2f}"),
    ("TTFT s\np99", "ttft_p99_s", lambda v: f"{v:.2f}"),
    ("norm. lat.\ns/token", "normalized_latency_s", lambda v: f"{v:.3f}"),
]


def compare(runs: list[Run], directory: Path) -> None:
    """Print the comparison of complete ``runs`` and write ``comparison.{csv,png,pdf}`` to ``directory``."""
    if not runs:
        return
    output = console(200)
    names = labels(runs)
    output.print(_table(runs, names))
    if len(runs) > 1:
        output.print(_same_tokens(runs))
    frame(runs, names).to_csv(directory / "comparison.csv", index=False)
    if len(runs) > _MOST_DRAWN:
        output.print(f"no picture: {len(runs)} runs are too many for one; all metrics: {directory / 'comparison.csv'}")
        return
    picture = plots.comparison(runs, names, directory / "comparison")
    output.print(f"picture: {picture}", soft_wrap=True)


def frame(runs: list[Run], names: list[str]) -> pd.DataFrame:
    """One row per run with all its metrics."""
    rows = [
        {"run": name, "path": str(run.path)} | {key: entry["value"] for key, entry in run.record["metrics"].items()}
        for run, name in zip(runs, names, strict=True)
    ]
    return pd.DataFrame(rows)


def labels(runs: list[Run], but: tuple[str, ...] = ()) -> list[str]:
    """What tells the runs apart: the allocator, and every other setting that differs between them, ``but`` some."""
    flat = [results.flatten(run.config()) for run in runs]
    keys = [key for key in flat[0] if len({str(config.get(key)) for config in flat}) > 1]
    others = [key for key in keys if not key.startswith("allocator.") and key not in ("resume", *but)]
    return [
        " ".join([config["allocator.name"], *(f"{key.split('.')[-1]}={config.get(key)}" for key in others)])
        for config in flat
    ]


def _table(runs: list[Run], names: list[str]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1))
    table.add_column("run", justify="left", no_wrap=True)
    columns = [column for column in _COLUMNS if column[1] != _HITS or any(run.metric(_HITS) for run in runs)]
    for title, _, _ in columns:
        table.add_column(title, justify="right")
    for run, name in zip(runs, names, strict=True):
        values = [(run.metric(key), show) for _, key, show in columns]
        table.add_row(name, *("-" if value is None else show(value) for value, show in values))
    return table


def _same_tokens(runs: list[Run]) -> str:
    digests = {run.record["tokens_sha256"] for run in runs}
    if digests == {None}:
        return "tokens: none, time is virtual"
    note = ""
    if len(digests) > 1 and all(run.has_samples for run in runs):
        tables = [run.requests() for run in runs]
        served = [set(table.loc[table["status"] == "finished", "request_id"]) for table in tables]
        by_all = set.intersection(*served)
        if not by_all:
            return f"tokens: not comparable, no request was served in all {len(runs)} runs"
        digests = {metrics.tokens_digest(table[table["request_id"].isin(by_all)]) for table in tables}
        missed = sorted(set.union(*served) - by_all)
        if missed:
            note = f"; {len(missed)} requests not served by all: {textwrap.shorten(' '.join(map(str, missed)), 60)}"
    if len(digests) == 1:
        return f"tokens: identical in all {len(runs)} runs (sha256 {digests.pop()[:12]}){note}"
    return f"tokens: {len(digests)} different outputs among {len(runs)} runs{note}"


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) == 2 else None
    if folder is None or not folder.is_dir():
        print("usage: python -m kvbench.report RESULTS_FOLDER", file=sys.stderr)
        sys.exit(2)
    runs = [run for run in results.find(folder) if run.status == "complete"]
    if not runs:
        print(f"error: no complete run in {folder}", file=sys.stderr)
        sys.exit(2)
    try:
        compare(runs, folder)
    except (OSError, ValueError, KeyError, YAMLError) as error:
        print(f"error: {folder}: a damaged record, or a folder that is not writable: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
