"""What a figure's function returns."""

from dataclasses import dataclass

import pandas as pd
from matplotlib.figure import Figure


@dataclass(frozen=True)
class Drawing:
    """figure: the picture. comparison: rows as ``fidelity.compare`` returns them."""

    figure: Figure
    comparison: pd.DataFrame
