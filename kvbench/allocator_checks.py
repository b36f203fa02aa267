"""What every allocator checks of its arguments before it changes anything."""

import numpy as np
from numpy.typing import ArrayLike, NDArray

IntArray = NDArray[np.int64]
_INT64 = np.dtype(np.int64)


class AllocatorMisuse(RuntimeError):
    """The caller broke the interface: a bug in the engine, never a full pool."""


class ArgumentChecks:
    """Rows are ``0 <= row < max_rows`` and hold at most ``max_tokens`` tokens."""

    def __init__(self, max_rows: int, max_tokens: int) -> None:
        self._max_rows = max_rows
        self._max_tokens = max_tokens
        self._seen = np.zeros(max_rows, dtype=bool)  # all False between calls

    def _lookup(self, values: IntArray, rows: IntArray) -> IntArray:
        """``values[rows]`` of an array by row; AllocatorMisuse on a row out of range."""
        try:
            found = values[rows]
        except IndexError:
            found = None
        # Negative rows count from the end. argmin is several times faster than min.
        if found is None or (rows.size and rows.item(rows.argmin()) < 0):
            raise AllocatorMisuse(f"rows must be within [0, {self._max_rows}), got {rows.tolist()}")
        return found

    def _live_rows(self, rows: ArrayLike, lengths: IntArray) -> tuple[IntArray, IntArray]:
        """``rows`` and their ``lengths[rows]``; AllocatorMisuse on a row that has none."""
        rows = as_indices(rows)
        found = self._lookup(lengths, rows)
        if np.count_nonzero(found) != rows.size:
            raise AllocatorMisuse(f"rows {rows[found == 0].tolist()} hold nothing on this tier")
        return rows, found

    def _check_distinct(self, rows: IntArray) -> None:
        """AllocatorMisuse unless the rows, known to be in range, are distinct."""
        if rows.size > 1:
            self._seen[rows] = True
            num_distinct = np.count_nonzero(self._seen)
            self._seen[rows] = False
            if num_distinct != rows.size:
                raise AllocatorMisuse(f"rows must be distinct, got {rows.tolist()}")

    def _token_counts(self, num_tokens: ArrayLike, rows: IntArray) -> IntArray:
        """``num_tokens`` (scalar or ``[n]``) as int64 ``[n]``; AllocatorMisuse unless >= 1."""
        if isinstance(num_tokens, (int, np.integer)):
            num_tokens = np.full(rows.size, num_tokens, dtype=np.int64)
        counts = as_indices(num_tokens)
        if counts.shape != rows.shape:
            raise AllocatorMisuse(f"{counts.size} token counts for {rows.size} rows")
        if counts.size and counts.min() < 1:
            raise AllocatorMisuse(f"num_tokens must be at least 1, got {counts.min()}")
        return counts

    def _check_prompt(self, rows: IntArray, num_tokens: int, max_tokens: int) -> None:
        """AllocatorMisuse unless a group may be admitted with these counts."""
        if rows.size == 0 or not 1 <= num_tokens <= max_tokens <= self._max_tokens:
            raise AllocatorMisuse(
                f"an admission needs at least one row and 1 <= num_tokens <= max_tokens <= "
                f"{self._max_tokens}, got {rows.size} rows, {num_tokens} and {max_tokens}"
            )


def as_indices(values: ArrayLike) -> IntArray:
    """``values`` as int64 ``[n]``; AllocatorMisuse unless they are integers in one dimension."""
    array = np.asarray(values)
    if array.dtype is _INT64 and array.ndim == 1:
        return array
    if array.size == 0:
        return np.empty(0, dtype=np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise AllocatorMisuse(f"expected a 1-D integer array, got {array.dtype} of shape {array.shape}")
    return array.astype(np.int64)
