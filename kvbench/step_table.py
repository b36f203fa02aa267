"""Steps as one growing array: a run of 10^6 steps takes 0.2 GB and no time per cell."""

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from numpy.typing import NDArray


class StepTable:
    """Rows of float64 with named columns; integers are exact up to 2^53."""

    def __init__(self, columns: Sequence[str]) -> None:
        self._columns = {name: index for index, name in enumerate(columns)}
        self._data = np.empty((1024, len(columns)))
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def append(self, values: Sequence[float]) -> int:
        """Add a row, in the columns' order; its index."""
        self._reserve(1)
        self._data[self._count] = values
        self._count += 1
        return self._count - 1

    def extend(self, values: NDArray[np.float64], count: int) -> NDArray[np.float64]:
        """Add ``count`` equal rows; they are returned, ``[count, columns]``, to be made different."""
        self._reserve(count)
        rows = self._data[self._count : self._count + count]
        rows[:] = values
        self._count += count
        return rows

    def set(self, row: int, column: str, value: float) -> None:
        self._data[row, self._columns[column]] = value

    def frame(self, dtypes: Mapping[str, type]) -> pd.DataFrame:
        """The rows; columns are int64 unless ``dtypes`` says otherwise."""
        data: NDArray[np.float64] = self._data[: self._count].T.copy()
        return pd.DataFrame({n: data[i].astype(dtypes.get(n, np.int64)) for n, i in self._columns.items()})

    def _reserve(self, count: int) -> None:
        needed = self._count + count
        size, num_columns = self._data.shape
        if needed > size:
            grown = np.empty((max(needed, 2 * size), num_columns))
            grown[: self._count] = self._data[: self._count]
            self._data = grown
