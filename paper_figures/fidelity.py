"""Ours against the published values, as a table."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from paper_figures.statistics import SERIES

COLUMNS = ["figure", *SERIES, "unit", "ours", "published", "difference", "relative_difference"]
COLUMNS += ["n_seeds", "ci95", "origin", "note"]


def compare(ours: pd.DataFrame, published: pd.DataFrame, *, unit: str) -> pd.DataFrame:
    """One row per published value, then one per value of ours that the paper does not give.

    ours: columns of ``statistics.over_seeds`` and possibly ``note``. Differences are ours - published, and
    that over published. Values that were not measured stay missing, with a note.
    """
    rows = published.rename(columns={"value": "published"}).merge(ours, on=SERIES, how="outer", indicator=True)
    order = pd.concat([published[SERIES], ours[SERIES]]).drop_duplicates()
    rows = order.merge(rows, on=SERIES, how="left")
    note = rows["note"].fillna("") if "note" in rows else pd.Series("", index=rows.index)
    note = note.mask(rows["_merge"] == "right_only", "not published")
    rows["note"] = note.mask(rows["_merge"] == "left_only", "not measured")
    rows["unit"] = unit
    rows["n_seeds"] = rows["n_seeds"].fillna(0).astype(int)
    rows["difference"] = rows["ours"] - rows["published"]
    rows["relative_difference"] = rows["difference"] / rows["published"]
    return rows.reindex(columns=COLUMNS[1:])


def write(path: Path, rows: pd.DataFrame, *, order: Sequence[str], keep_others: bool) -> None:
    """Write ``rows`` to ``path``. order: names of the figures in the order of their rows.

    keep_others: rows of figures that are not in ``rows`` stay as they stand in the file.
    """
    if keep_others and path.exists():
        old = pd.read_csv(path, keep_default_na=False, na_values=[""])
        rows = pd.concat([old[~old["figure"].isin(rows["figure"])], rows])
    place = rows["figure"].map({name: i for i, name in enumerate(order)})
    rows = rows.iloc[np.argsort(place.to_numpy(), kind="stable")]
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    rows.to_csv(temporary, columns=COLUMNS, index=False, float_format="%.6g")
    temporary.replace(path)
