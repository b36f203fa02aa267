"""A trace in memory, and written to a file."""

import os
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class Trace:
    """Requests as lengths, in order of arrival.

    input_tokens, output_tokens: int64 ``[n]``, each >= 1.
    arrival_s: float64 ``[n]``, seconds >= 0, not decreasing; None where nothing states them.
    hash_ids: object ``[n]``, per request a tuple with one id per 512 tokens of its prompt, the rest included
    (equal ids: equal content from the prompt's start to there); None where nothing states them.
    """

    input_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]
    arrival_s: NDArray[np.float64] | None = None
    hash_ids: NDArray[np.object_] | None = None

    def __len__(self) -> int:
        return len(self.input_tokens)

    def take(self, which: Any) -> "Trace":
        """The requests that a numpy index names: a slice, a mask or positions."""
        return Trace(
            self.input_tokens[which],
            self.output_tokens[which],
            None if self.arrival_s is None else self.arrival_s[which],
            None if self.hash_ids is None else self.hash_ids[which],
        )


def write(path: str | os.PathLike[str], trace: Trace) -> None:
    """Write ``trace`` as Parquet that reads back equal: ``input_tokens``, ``output_tokens`` and what else it has.

    Raises OSError.
    """
    columns = {"input_tokens": pa.array(trace.input_tokens), "output_tokens": pa.array(trace.output_tokens)}
    if trace.arrival_s is not None:
        columns = {"arrival_s": pa.array(trace.arrival_s)} | columns
    if trace.hash_ids is not None:
        columns["hash_ids"] = pa.array(trace.hash_ids.tolist(), pa.list_(pa.int64()))
    pq.write_table(pa.table(columns), path)
