"""Reading a trace: which format a file has, its rows, and what becomes of malformed ones."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

from kvbench.errors import ConfigError
from kvbench.models import Tokenizer
from kvbench.traces import containers, sharegpt
from kvbench.traces.containers import Row
from kvbench.traces.formats import CSV_FORMATS, FORMATS, LEGAL_FORMATS, Columns, Format
from kvbench.traces.table import Table
from kvbench.traces.trace import Trace
from kvbench.weights import sha256_of

SETTING = "workload.trace.file"
ON_BAD_ROW = ("error", "skip")


def read(
    file: str,
    *,
    format: str = "auto",
    on_bad_row: str = "error",
    tokenizer: Tokenizer | None = None,
    setting: str = SETTING,
) -> tuple[Trace, dict[str, Any]]:
    """The file's requests in order of arrival (ties in file order) and where they came from, as JSON types.

    ``auto`` knows the format by the file's content. A row without a token count >= 1 on either side is
    malformed: nothing can be served (BurstGPT's failed requests have 0 response tokens). ``tokenizer``
    counts ShareGPT's texts. Raises ConfigError naming ``setting``, file and line (in Parquet: row).
    """
    if on_bad_row not in ON_BAD_ROW:
        raise ConfigError(f"workload.trace.on_bad_row: {on_bad_row!r} is not one of {', '.join(ON_BAD_ROW)}")
    if format not in LEGAL_FORMATS:
        raise ConfigError(f"workload.trace.format: {format!r} is not one of {', '.join(LEGAL_FORMATS)}")
    path = Path(file).expanduser()
    where = f"{setting}: {file}"
    advice = "; workload.trace.on_bad_row=skip leaves such rows out" if setting == SETTING else ""
    try:
        name = _detect(path, where) if format == "auto" else format
        if name == "sharegpt":
            spec = _sharegpt(tokenizer, where)
            columns, rows = spec.columns(), sharegpt.conversations(file, setting)
        else:
            spec = FORMATS[name]
            columns, rows = _open(name, path, where)
        table = Table(columns, where=where, skip=on_bad_row == "skip", advice=advice)
        table.fill(rows)
        digest = sha256_of(path)
    except (OSError, pa.ArrowException) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{where}: cannot be read as {format}: {reason}") from None
    provenance = {
        "file": path.name,
        "sha256": digest,
        "format": name,
        "rows_read": table.num_rows,
        "rows_skipped": table.num_bad,
    }
    if name == "sharegpt":
        provenance["rows_without_pair"] = table.num_empty
    return table.trace(spec), provenance


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
        if not FORMATS[name].missing(header):
            return name
    raise ConfigError(
        f"{where}:1: none of the formats {', '.join(LEGAL_FORMATS[1:])}: neither Parquet nor JSON, and the first "
        f"line names the columns {', '.join(header)[:200]!r}"
    )


def _sharegpt(tokenizer: Tokenizer | None, where: str) -> Format:
    if tokenizer is None:
        raise ConfigError(
            f"{sharegpt.SETTING}: {where} holds texts and this run has no tokenizer to count them with; "
            "name one: smollm2, bytes, a local directory or a hub id"
        )
    count = sharegpt.counter(tokenizer)
    return Format(input=("human turn", count), output=("assistant turn", count))


def _open(name: str, path: Path, where: str) -> tuple[Columns, Iterator[Row]]:
    """The columns of the format that the file has, and its rows."""
    spec = FORMATS[name]
    columns = spec.columns()
    if name == "mooncake":
        return columns, containers.jsonl_rows(path, [column for column, _ in columns.values()])
    header = containers.parquet_header(path) if name == "parquet" else containers.csv_header(path)
    if missing := spec.missing(header):
        needed = [column for role, (column, _) in columns.items() if role not in spec.optional]
        raise ConfigError(f"{where}:1: no column {missing[0]!r}; needed: {', '.join(needed)}")
    present = {role: column for role, column in columns.items() if column[0] in header}
    rows = containers.parquet_rows if name == "parquet" else containers.csv_rows
    return present, rows(path, [column for column, _ in present.values()])
