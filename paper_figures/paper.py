"""The published values: typed in from the paper, for comparison only. Nothing is computed from them but ratios."""

from pathlib import Path

import pandas as pd

FOLDER = Path(__file__).parent / "published"


def load(name: str) -> pd.DataFrame:
    """``published/<name>.csv``: columns panel, series (text), x (NaN where none), value, origin.

    The file's first lines give source, meaning and units. origin: ``plot`` (read from a plot of the paper) or
    ``text`` (printed in its text).
    """
    table = pd.read_csv(FOLDER / f"{name}.csv", comment="#", dtype={"panel": str, "x": float, "value": float})
    return table.fillna({"panel": ""})
