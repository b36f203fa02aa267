"""JSON lists and JSON lines, with the line on which each item begins."""

import json
import re
from collections.abc import Iterator
from typing import Any, TypeGuard

from kvbench.errors import ConfigError

SPACE = re.compile(r"\s+")


def json_lines(text: str, where: str) -> Iterator[tuple[Any, int]]:
    """Items of a text of JSON lines, blank ones left out. ``where``: setting and file, for ConfigError."""
    # Not splitlines(): JSON strings may hold the other line separators of Unicode.
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            try:
                yield json.loads(line), number
            except json.JSONDecodeError as error:
                raise ConfigError(f"{where}:{number}: not JSON ({error.msg})") from error


def json_list(text: str, where: str) -> Iterator[tuple[Any, int]]:
    """Items of one JSON list. ``where``: setting and file, for ConfigError."""
    decoder = json.JSONDecoder()
    delimiters: tuple[str, ...] = ("[",)
    position, line = 0, 1
    while True:
        start = _skip_space(text, position)
        line += text.count("\n", position, start)
        if not text.startswith(delimiters, start):
            raise ConfigError(f"{where}:{line}: expected {' or '.join(delimiters)} of a JSON list")
        if text[start] == "]":
            return
        item_start = _skip_space(text, start + 1)
        line += text.count("\n", start, item_start)
        try:
            item, position = decoder.raw_decode(text, item_start)
        except json.JSONDecodeError as error:
            raise ConfigError(f"{where}:{error.lineno}: not JSON ({error.msg})") from error
        yield item, line
        line += text.count("\n", item_start, position)
        delimiters = (",", "]")


def is_text(value: Any) -> TypeGuard[str]:
    """A string that UTF-8 can hold: JSON escapes can spell half a surrogate pair, which cannot be encoded."""
    return isinstance(value, str) and not any("\ud800" <= char <= "\udfff" for char in value)


def _skip_space(text: str, position: int) -> int:
    space = SPACE.match(text, position)
    return space.end() if space else position
