"""Rows out of CSV, JSON lines and Parquet: where each begins and its cells, in the order asked for."""

import csv
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

Row = tuple[int, list[Any] | None]  # line (in Parquet: row) and cells; None: nothing to read, and that is legal


def csv_header(path: Path) -> list[str]:
    with _open(path) as file:
        return [name.strip() for name in _cells(file.readline().rstrip("\n"))]


def csv_rows(path: Path, names: Sequence[str]) -> Iterator[Row]:
    """Each line on its own, so that a stray quote spoils one row only; blank lines are left out.

    Cells are text, None where the line is too short. Bytes that are not UTF-8 become U+FFFD.
    """
    header = csv_header(path)
    places = [header.index(name) for name in names]
    with _open(path) as file:
        next(file)
        for line, text in enumerate(file, start=2):
            if not text.isspace():
                cells = _cells(text.rstrip("\n"))
                yield line, [cells[place] if place < len(cells) else None for place in places]


def jsonl_rows(path: Path, names: Sequence[str]) -> Iterator[Row]:
    """Cells are JSON values, None where the object has no such key; a line that is no object fills every cell."""
    with _open(path) as file:
        for line, text in enumerate(file, start=1):
            if not text.isspace():
                item = _json(text)
                yield line, [item.get(name) if isinstance(item, dict) else text.strip() for name in names]


def parquet_header(path: Path) -> list[str]:
    return pq.read_schema(path).names


def parquet_rows(path: Path, names: Sequence[str]) -> Iterator[Row]:
    row = 0
    for batch in pq.ParquetFile(path).iter_batches(columns=list(names)):
        columns = [batch.column(name).to_pylist() for name in names]
        for cells in zip(*columns, strict=True):
            row += 1
            yield row, list(cells)


def _open(path: Path) -> Any:
    return path.open(encoding="utf-8-sig", errors="replace")


def _cells(text: str) -> list[str]:
    if '"' not in text:
        return text.split(",")
    try:
        return next(csv.reader([text]))
    except csv.Error:
        return []


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
