"""Text and CSV files that users name in settings; errors give the setting, the file and the line."""

import csv
import math
from collections.abc import Callable, Mapping
from pathlib import Path

from kvbench.errors import ConfigError


def read_text(path: str, setting: str) -> str:
    """The file's text (UTF-8, a byte order mark is dropped). Raises ConfigError where it cannot be read."""
    try:
        data = Path(path).expanduser().read_bytes()
    except OSError as error:
        raise ConfigError(f"{setting}: cannot read {path}: {error.strerror or error}") from None
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{setting}: {path}:{line}: not UTF-8 text") from error


def read_columns(
    path: str, parsers: Mapping[str, Callable[[str | None], float]], setting: str
) -> dict[str, list[float]]:
    """The columns named in ``parsers``, at least one row of each; other columns are ignored.

    A parser raises ValueError with what it wants. Raises ConfigError on a malformed row.
    """
    values: dict[str, list[float]] = {column: [] for column in parsers}
    reader = csv.DictReader(read_text(path, setting).splitlines())
    missing = [column for column in parsers if column not in (reader.fieldnames or ())]
    if missing:
        raise ConfigError(f"{setting}: {path}:1: no column {missing[0]!r}; needed: {', '.join(parsers)}")
    for row in reader:
        for column, parse in parsers.items():
            try:
                values[column].append(parse(row[column]))
            except ValueError as error:
                where = f"{setting}: {path}:{reader.line_num}"
                raise ConfigError(f"{where}: {column} is {row[column]!r}, not {error}") from error
    if not any(values.values()):
        raise ConfigError(f"{setting}: {path}:1: no rows after the header")
    return values


def token_count(text: str | None) -> int:
    digits = (text or "").strip()
    # The length first: Python refuses to convert thousands of digits.
    if not digits.isdecimal() or len(digits) > 10 or not 1 <= int(digits) < 2**31:
        raise ValueError("an integer >= 1 and below 2^31")
    return int(digits)


def seconds(text: str | None) -> float:
    try:
        number = float(text or "")
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise ValueError("finite seconds >= 0")
    return number
