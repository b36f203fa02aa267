"""A damaged table stops the figure, with the file and the column named."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from paper_figures.latency import fig12
from paper_figures.memory import fig13
from paper_figures.tables import TableError, read
from tests.figures import synthetic

BATCH = "metric.mean_batch"
RATE = "config.workload.arrival.rate"


def as_text(table: pd.DataFrame) -> pd.DataFrame:
    return table.assign(**{BATCH: "many"})


def with_cell(table: pd.DataFrame, column: str, value: float) -> pd.DataFrame:
    changed = table.assign(**{column: table[column].astype(float)})
    changed.loc[changed["config.allocator.name"] == "paged", column] = value
    return changed


DAMAGES: dict[str, tuple[Callable[[pd.DataFrame], pd.DataFrame], str, str]] = {
    "column gone": (lambda table: table.drop(columns=BATCH), BATCH, "no column"),
    "text for numbers": (as_text, BATCH, "not numeric"),
    "missing": (lambda table: with_cell(table, BATCH, np.nan), BATCH, "missing or not finite in 9 of"),
    "infinite": (lambda table: with_cell(table, BATCH, np.inf), BATCH, "missing or not finite in 9 of"),
    "key missing": (lambda table: with_cell(table, RATE, np.nan), RATE, "missing or not finite"),
    "run twice": (lambda table: pd.concat([table, table.tail(1)]), "config.seed=2", "more than one row"),
    "other workloads": (
        lambda table: table.assign(**{"config.workload.name": "prompts"}),
        "config.workload.name",
        "no row left",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_tables_are_named(tmp_path: Path, damage: str) -> None:
    change, column, message = DAMAGES[damage]
    path = synthetic.write(tmp_path, "roofline/paper_memory_waste", synthetic.memory_waste())
    fig13(tmp_path)
    change(pd.read_parquet(path)).to_parquet(path)
    with pytest.raises(TableError) as error:
        fig13(tmp_path)
    for part in (str(path), column, message):
        assert part in str(error.value)


def test_not_a_parquet_file(tmp_path: Path) -> None:
    path = tmp_path / "roofline" / "paper_throughput.parquet"
    path.parent.mkdir()
    path.write_text("config.seed,metric.mean_batch\n")
    with pytest.raises(TableError, match="not a readable Parquet table") as error:
        fig12(tmp_path)
    assert str(path) in str(error.value)


def test_rows_that_are_not_kept_may_lack_values(tmp_path: Path) -> None:
    path = synthetic.write(tmp_path, "table", [{"name": "a", "x": 1, "y": 2}, {"name": "b", "x": 1, "y": None}])
    table = read(path, labels={"series": "name"}, keys={"x": "x"}, values={"value": "y"}, keep={"series": ["a"]})
    assert table.to_dict("list") == {"series": ["a"], "x": [1.0], "value": [2.0]}


def test_numbers_stored_as_text_are_numbers(tmp_path: Path) -> None:
    path = synthetic.write(tmp_path, "table", [{"x": "1", "y": 2}, {"x": "3", "y": 4}])
    assert read(path, keys={"x": "x"}, values={"y": "y"})["x"].tolist() == [1.0, 3.0]
