"""Stored result tables, read strictly: a figure shows what was measured or says which column is at fault."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd


class TableError(Exception):
    """A stored table that cannot be what its figure expects; names the file and the column."""


def read(
    path: Path,
    *,
    labels: Mapping[str, str] | None = None,
    keys: Mapping[str, str],
    values: Mapping[str, str],
    keep: Mapping[str, Sequence[object]] | None = None,
) -> pd.DataFrame:
    """Columns of the Parquet table ``path``, renamed: each mapping is from our name to the table's column.

    labels: text. keys: numbers. Together they tell rows apart, so that no two rows may agree in all of them.
    values: numbers that were measured. keep: label or key -> the values of the rows to keep; the other rows
    are not looked at. Raises TableError where a column is missing, no row is kept, or a
    number is missing or not finite.
    """
    labels, keep = labels or {}, keep or {}
    columns = {**labels, **keys, **values}
    stored = _stored(path)
    for column in columns.values():
        if column not in stored:
            raise TableError(f"{path}: no column {column!r}")
    table = stored[list(columns.values())].set_axis(list(columns), axis=1)
    for name, wanted in keep.items():
        table = table[table[name].isin(list(wanted))]
        if table.empty:
            raise TableError(f"{path}: no row left whose {columns[name]!r} is among {list(wanted)}")
    table = table.reset_index(drop=True)
    for name in (*keys, *values):
        table[name] = _finite(table[name], f"{path}: column {columns[name]!r}")
    _check_distinct(table, [*labels, *keys], path, columns)
    return table


def _stored(path: Path) -> pd.DataFrame:
    try:
        return pd.read_parquet(path)
    except Exception as error:  # pyarrow raises many types, all of which mean the same here
        raise TableError(f"{path}: not a readable Parquet table ({error})") from error


def _finite(column: pd.Series, where: str) -> pd.Series:
    try:
        numbers = pd.to_numeric(column).astype(float)
    except (TypeError, ValueError) as error:
        raise TableError(f"{where} is not numeric: {error}") from error
    wrong = ~np.isfinite(numbers)
    if wrong.any():
        raise TableError(f"{where} is missing or not finite in {int(wrong.sum())} of {len(numbers)} rows used")
    return numbers


def _check_distinct(table: pd.DataFrame, names: list[str], path: Path, columns: Mapping[str, str]) -> None:
    repeated = table[table.duplicated(names)]
    if len(repeated):
        where = ", ".join(f"{columns[name]}={repeated.iloc[0][name]}" for name in names)
        raise TableError(f"{path}: more than one row for {where}")
