"""``python -m paper_figures``: draw every figure whose tables are there, and compare with the published values."""

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
from tqdm import tqdm

from paper_figures import columns, fidelity, latency, lines, memory, style
from paper_figures.drawing import Drawing
from paper_figures.tables import TableError


@dataclass(frozen=True)
class PaperFigure:
    """tables: files under the results folder, all of which it needs. draw: from that folder to the drawing."""

    tables: tuple[str, ...]
    draw: Callable[[Path], Drawing]


FIGURES = {
    "fig1": PaperFigure((columns.BATCH_THROUGHPUT,), lines.fig1),
    "fig2": PaperFigure((columns.MEMORY_WASTE,), memory.fig2),
    "fig12": PaperFigure((columns.THROUGHPUT, columns.THROUGHPUT_VARIANTS), latency.fig12),
    "fig13": PaperFigure((columns.MEMORY_WASTE,), memory.fig13),
    "fig14": PaperFigure((columns.PARALLEL_SAMPLING, columns.BEAM_SEARCH), latency.fig14),
    "fig15": PaperFigure((columns.PARALLEL_SAMPLING, columns.BEAM_SEARCH, columns.BEAM_RECORDINGS), memory.fig15),
    "fig16": PaperFigure((columns.SHARED_PREFIX,), latency.fig16),
    "fig17": PaperFigure((columns.CHAT,), latency.fig17),
    "fig18a": PaperFigure((columns.ATTENTION_KERNEL,), lines.fig18a),
    "fig18b": PaperFigure((columns.BLOCK_SIZE,), lines.fig18b),
    "fig19a": PaperFigure((columns.SWAP_MICROBENCHMARK,), lines.fig19a),
    "fig19b": PaperFigure((columns.SWAP_VS_RECOMPUTE,), lines.fig19b),
}


def main(arguments: list[str] | None = None) -> int:
    """Exit code: 0 done (figures without a table are named and skipped), 2 bad input or nothing to draw."""
    options = _parser().parse_args(arguments)
    wanted = options.only or list(FIGURES)
    drawable = [name for name in FIGURES if name in wanted and _has_tables(name, options.results)]
    if not drawable:
        print(f"nothing to draw: no table of {', '.join(wanted)} in {options.results}", file=sys.stderr)
        return 2
    comparisons = []
    try:
        for name in tqdm(drawable, unit="figure"):
            with style.context():
                drawing = FIGURES[name].draw(options.results)
                style.save(drawing.figure, options.out / name)
            comparisons.append(drawing.comparison.assign(figure=name))
    except TableError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    table = options.results / "fidelity.csv"
    fidelity.write(table, pd.concat(comparisons), order=list(FIGURES), keep_others=bool(options.only))
    print(f"drew {', '.join(drawable)} into {options.out}; comparison in {table}")
    return 0


def _has_tables(name: str, results: Path) -> bool:
    missing = [table for table in FIGURES[name].tables if not (results / table).exists()]
    if missing:
        print(f"{name}: skipped, no {' and no '.join(str(results / table) for table in missing)}")
    return not missing


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m paper_figures", description=__doc__)
    parser.add_argument("--only", nargs="+", metavar="FIGURE", choices=list(FIGURES), help=", ".join(FIGURES))
    parser.add_argument("--results", type=Path, default=Path("results/reference"), help="folder of the tables")
    parser.add_argument("--out", type=Path, default=Path("results/figures"), help="folder of the pictures")
    return parser


if __name__ == "__main__":
    sys.exit(main())
