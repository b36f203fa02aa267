"""Parsers of single cells. Each raises ValueError with what it wants, to follow the words "is ..., not"."""

import re
from datetime import datetime, timedelta, timezone
from typing import Any

# Date and time of day, fraction, offset. Azure's files of 2023 have 7 decimals (the last is 0), those of 2024
# an offset and sometimes no decimals: datetime.fromisoformat of Python 3.10 takes neither.
TIMESTAMP = re.compile(r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(?:\.(\d{1,6})\d{0,3})?(?:Z|([+-]\d\d:\d\d))?", re.ASCII)
EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)


def microseconds(text: Any) -> int:
    """A timestamp as microseconds since 1970; without an offset it is UTC."""
    match = TIMESTAMP.fullmatch((text or "").strip())
    if match is None:
        raise ValueError("a timestamp such as 2024-05-10 00:00:00.009930+00:00")
    moment, fraction, offset = match.groups()
    try:
        at = datetime.fromisoformat(f"{moment}.{fraction or '':0<6}{offset or '+00:00'}")
    except ValueError:
        raise ValueError("a date and time of day that exist") from None
    return (at - EPOCH) // timedelta(microseconds=1)


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
