"""Parsers of single cells. Each raises ValueError with what it wants, to follow the words "is ..., not"."""

import re
from datetime import datetime, timedelta, timezone
from typing import Any

# Date, time of day, fraction, offset: Azure's 2023 files have 7 decimals, those of 2024 an offset and
# sometimes no decimals. datetime.fromisoformat of Python 3.10 takes neither.
TIMESTAMP = re.compile(r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(?:Z|([+-]\d\d:\d\d))?")
EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)


def nanoseconds(text: str) -> int:
    """A timestamp as nanoseconds since 1970, exact. Without an offset it is UTC."""
    match = TIMESTAMP.fullmatch(text.strip())
    if match is None:
        raise ValueError("a timestamp such as 2024-05-10 00:00:00.009930+00:00")
    moment, fraction, offset = match.groups()
    try:
        at = datetime.fromisoformat(moment + (offset or "+00:00"))
    except ValueError:
        raise ValueError("a date and time of day that exist") from None
    return (at - EPOCH) // timedelta(seconds=1) * 10**9 + int((fraction or "").ljust(9, "0"))


def count(value: Any) -> int:
    """A token count in JSON or Parquet."""
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value < 2**31:
        raise ValueError("an integer >= 1 and below 2^31")
    return value


def number(value: Any) -> int | float:
    """A point in time in JSON or Parquet, in the format's own unit."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < 2**63:
        raise ValueError("a finite number >= 0")
    return value


def block_ids(value: Any) -> tuple[int, ...]:
    """Ids of a prompt's blocks; none where the row states none."""
    if value is None:
        return ()
    if not isinstance(value, list) or not all(type(item) is int and -(2**63) <= item < 2**63 for item in value):
        raise ValueError("a list of 64-bit integers")
    return tuple(value)
