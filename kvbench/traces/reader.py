"""Reading a trace: which format a file has, its rows, and what becomes of malformed ones."""

from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvbench.errors import ConfigError
from kvbench.input_files import seconds, token_count
from kvbench.models import Tokenizer
from kvbench.traces import cells, containers, sharegpt
from kvbench.traces.containers import Row
from kvbench.traces.trace import Trace
from kvbench.weights import sha256_of

Parser = Callable[[Any], Any]
ON_BAD_ROW = ("error", "skip")


@dataclass(frozen=True)
class Format:
    """Columns as (name in the file, parser). Arrivals are in units of ``1 / per_second`` s.

    from_first: arrivals are points in time, counted here from the file's earliest.
    """

    input: tuple[str, Parser]
    output: tuple[str, Parser]
    arrival: tuple[str, Parser] | None = None
    hash_ids: tuple[str, Parser] | None = None
    per_second: int = 1
    from_first: bool = True
    optional: frozenset[str] = frozenset()

    def columns(self) -> dict[str, tuple[str, Parser]]:
        named = {"arrival": self.arrival, "input": self.input, "output": self.output, "hash_ids": self.hash_ids}
        return {role: column for role, column in named.items() if column is not None}


FORMATS = {
    "azure": Format(
        arrival=("TIMESTAMP", cells.nanoseconds),
        input=("ContextTokens", token_count),
        output=("GeneratedTokens", token_count),
        per_second=10**9,
    ),
    "burstgpt": Format(
        arrival=("Timestamp", seconds),
        input=("Request tokens", token_count),
        output=("Response tokens", token_count),
    ),
    "csv": Format(
        arrival=("arrival_s", seconds),
        input=("input_tokens", token_count),
        output=("output_tokens", token_count),
        from_first=False,
        optional=frozenset({"arrival"}),
    ),
    "parquet": Format(
        arrival=("arrival_s", cells.number),
        input=("input_tokens", cells.count),
        output=("output_tokens", cells.count),
        hash_ids=("hash_ids", cells.block_ids),
        from_first=False,
        optional=frozenset({"arrival", "hash_ids"}),
    ),
    "mooncake": Format(
        arrival=("timestamp", cells.number),
        input=("input_length", cells.count),
        output=("output_length", cells.count),
        hash_ids=("hash_ids", cells.block_ids),
        per_second=1000,
    ),
}
CSV_FORMATS = ("azure", "burstgpt", "csv")
LEGAL_FORMATS = ("auto", *FORMATS, "sharegpt")


def read(
    file: str,
    *,
    format: str = "auto",
    on_bad_row: str = "error",
    tokenizer: Tokenizer | None = None,
    setting: str = "workload.trace",
) -> tuple[Trace, dict[str, Any]]:
    """The file's requests in order of arrival (ties in file order) and where they came from, as JSON types.

    ``auto`` knows the format by the file's content. A row without a token count >= 1 on either side is
    malformed: a failed or empty request has nothing to serve. ``tokenizer`` counts ShareGPT's texts.
    Raises ConfigError naming ``setting``, file and line (in Parquet: row).
    """
    if on_bad_row not in ON_BAD_ROW:
        raise ConfigError(f"{setting}.on_bad_row: {on_bad_row!r} is not one of {', '.join(ON_BAD_ROW)}")
    if format not in LEGAL_FORMATS:
        raise ConfigError(f"{setting}.format: {format!r} is not one of {', '.join(LEGAL_FORMATS)}")
    path = Path(file).expanduser()
    where = f"{setting}: {file}"
    try:
        name = _detect(path, where) if format == "auto" else format
        columns, rows, spec = _open(name, path, where, tokenizer)
        table = _Table(spec, where, skip=on_bad_row == "skip")
        table.fill(columns, rows)
        digest = sha256_of(path)
    except OSError as error:
        raise ConfigError(f"{where}: cannot be read: {error.strerror or error}") from None
    provenance = {
        "file": path.name,
        "sha256": digest,
        "format": name,
        "rows_read": table.num_rows,
        "rows_skipped": table.num_bad,
    }
    if name == "sharegpt":
        provenance["rows_without_pair"] = table.num_empty
    return table.trace(), provenance


def _detect(path: Path, where: str) -> str:
    with path.open("rb") as file:
        start = file.read(64)
    if start.startswith(b"PAR1"):
        return "parquet"
    text = start.decode("utf-8-sig", errors="replace").lstrip()
    if text.startswith("["):
        return "sharegpt"
    if text.startswith("{"):
        return "mooncake"
    header = containers.csv_header(path)
    for name in CSV_FORMATS:
        if not _missing(FORMATS[name], header):
            return name
    raise ConfigError(
        f"{where}:1: no known format ({', '.join(FORMATS)}, sharegpt): this is neither JSON nor Parquet, and "
        f"the first line names the columns {', '.join(header)[:200]!r}"
    )


def _missing(spec: Format, header: list[str]) -> list[str]:
    return [name for role, (name, _) in spec.columns().items() if role not in spec.optional and name not in header]


def _open(
    name: str, path: Path, where: str, tokenizer: Tokenizer | None
) -> tuple[dict[str, tuple[str, Parser]], Iterator[Row], Format]:
    """The columns that the file has, its rows, and its format."""
    if name == "sharegpt":
        if tokenizer is None:
            raise ConfigError(
                f"{sharegpt.SETTING}: {where} holds texts and this run has no tokenizer to count them with; "
                "name one: smollm2, bytes, a local directory or a hub id"
            )
        count = sharegpt.counter(tokenizer)
        spec = Format(input=("human turn", count), output=("assistant turn", count))
        return spec.columns(), sharegpt.conversations(path, where), spec
    spec = FORMATS[name]
    columns = spec.columns()
    if name == "mooncake":
        return columns, containers.jsonl_rows(path, [name for name, _ in columns.values()]), spec
    try:
        header = containers.parquet_header(path) if name == "parquet" else containers.csv_header(path)
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from error
    if missing := _missing(spec, header):
        needed = [column for role, (column, _) in columns.items() if role not in spec.optional]
        raise ConfigError(f"{where}:1: no column {missing[0]!r}; needed: {', '.join(needed)}")
    columns = {role: column for role, column in columns.items() if column[0] in header}
    rows = containers.parquet_rows if name == "parquet" else containers.csv_rows
    return columns, rows(path, [column for column, _ in columns.values()]), spec


class _Table:
    """Rows as they are read, in arrays: a week of trace has tens of millions."""

    def __init__(self, spec: Format, where: str, skip: bool) -> None:
        self._spec, self._where, self._skip = spec, where, skip
        self._origin: Any = None
        self._arrivals, self._inputs, self._outputs = array("d"), array("q"), array("q")
        self._hash_ids: list[tuple[int, ...]] = []
        self.num_rows = self.num_bad = self.num_empty = 0

    def fill(self, columns: dict[str, tuple[str, Parser]], rows: Iterator[Row]) -> None:
        for line, row in rows:
            self.num_rows += 1
            if row is None:
                self.num_empty += 1
                continue
            try:
                self._add({role: _parse(*column, cell) for (role, column), cell in zip(columns.items(), row)})
            except ValueError as error:
                if not self._skip:
                    raise ConfigError(f"{self._where}:{line}: {error}") from error
                self.num_bad += 1
        if not self._inputs:
            bad = f" ({self.num_bad} of {self.num_rows} were malformed)" if self.num_rows else " after the header"
            raise ConfigError(f"{self._where}:1: no rows{bad}")

    def _add(self, row: dict[str, Any]) -> None:
        self._inputs.append(row["input"])
        self._outputs.append(row["output"])
        if "arrival" in row:
            if self._origin is None:  # subtracted before floats round a point in time
                self._origin = row["arrival"] if self._spec.from_first else 0
            self._arrivals.append(row["arrival"] - self._origin)
        if "hash_ids" in row:
            self._hash_ids.append(row["hash_ids"])

    def trace(self) -> Trace:
        hash_ids = None
        if any(self._hash_ids):
            hash_ids = np.empty(len(self._hash_ids), dtype=object)
            hash_ids[:] = self._hash_ids
        inputs, outputs = (np.array(column, dtype=np.int64) for column in (self._inputs, self._outputs))
        if not self._arrivals:
            return Trace(inputs, outputs, None, hash_ids)
        arrivals = np.array(self._arrivals, dtype=np.float64)
        if self._spec.from_first:
            arrivals -= arrivals.min()
        arrivals /= self._spec.per_second
        trace = Trace(inputs, outputs, arrivals, hash_ids)
        in_order = bool((arrivals[1:] >= arrivals[:-1]).all())
        return trace if in_order else trace.take(np.argsort(arrivals, kind="stable"))


def _parse(name: str, parse: Parser, cell: Any) -> Any:
    try:
        return parse(cell)
    except ValueError as error:
        raise ValueError(f"{name} is {_short(cell)}, not {error}") from None


def _short(cell: Any) -> str:
    text = repr(cell)
    return text if len(text) <= 80 else text[:77] + "..."
