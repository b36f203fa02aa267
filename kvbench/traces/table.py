"""The rows of a trace file on their way to a Trace."""

from array import array
from collections.abc import Iterator
from typing import Any

import numpy as np

from kvbench.errors import ConfigError
from kvbench.traces.containers import Row
from kvbench.traces.formats import Columns, Format
from kvbench.traces.trace import Trace


class Table:
    """Rows as they are read, in arrays: a week of trace has tens of millions.

    where: setting and file. skip: count malformed rows instead of raising ConfigError, which ends in ``advice``.
    """

    def __init__(self, columns: Columns, *, where: str, skip: bool, advice: str) -> None:
        self._columns, self._where, self._skip, self._advice = columns, where, skip, advice
        self._hash_ids: list[tuple[int, ...]] = []
        self._values: dict[str, Any] = {
            "arrival": array("d"),
            "input": array("q"),
            "output": array("q"),
            "hash_ids": self._hash_ids,
        }
        self.num_rows = self.num_bad = self.num_empty = 0

    def fill(self, rows: Iterator[Row]) -> None:
        parsers = [parse for _, parse in self._columns.values()]
        appends = [self._values[role].append for role in self._columns]
        for line, row in rows:
            self.num_rows += 1
            if row is None:
                self.num_empty += 1
                continue
            try:
                values = [parse(cell) for parse, cell in zip(parsers, row, strict=True)]
            except ValueError:
                self._reject(line, row)
                continue
            for append, value in zip(appends, values, strict=True):
                append(value)
        if not self._values["input"]:
            problem = f"no usable row among {self.num_rows}" if self.num_rows else "no rows"
            raise ConfigError(f"{self._where}:1: {problem}")

    def _reject(self, line: int, row: list[Any]) -> None:
        self.num_bad += 1
        if self._skip:
            return
        for (name, parse), cell in zip(self._columns.values(), row, strict=True):
            try:
                parse(cell)
            except ValueError as error:
                raise ConfigError(
                    f"{self._where}:{line}: {name} is {_short(cell)}, not {error}{self._advice}"
                ) from error

    def trace(self, spec: Format) -> Trace:
        hash_ids = np.fromiter(self._hash_ids, object, len(self._hash_ids)) if any(self._hash_ids) else None
        inputs, outputs = (np.array(self._values[role], dtype=np.int64) for role in ("input", "output"))
        if "arrival" not in self._columns:
            return Trace(inputs, outputs, None, hash_ids)
        arrivals = np.array(self._values["arrival"])
        if spec.from_first:
            arrivals -= arrivals.min()
        arrivals /= spec.per_second
        trace = Trace(inputs, outputs, arrivals, hash_ids)
        in_order = bool((arrivals[1:] >= arrivals[:-1]).all())
        return trace if in_order else trace.take(np.argsort(arrivals, kind="stable"))


def _short(cell: Any) -> str:
    text = repr(cell)
    return text if len(text) <= 80 else text[:77] + "..."
