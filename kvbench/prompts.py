"""Prompt texts: those that ship with kvbench, or a file of JSON lines, ShareGPT-style JSON or plain text."""

import json
import logging
import re
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any, TypeGuard

from kvbench.errors import ConfigError
from kvbench.input_files import read_text

SETTING = "workload.prompts"
SHIPPED = resources.files("kvbench") / "resources" / "prompts.jsonl"
SPACE = re.compile(r"\s+")
HUMAN = ("human", "user")

log = logging.getLogger(__name__)


def read_prompts(path: str | None) -> list[str]:
    """Prompts in file order, at least one; ``None``: the shipped ones.

    ``*.jsonl``: one per line, a string or an object with ``prompt`` or ``text``. ``*.json``: a list of
    those or of ``{"conversations": [{"from": "human", "value": ...}, ...]}``, whose first human turn is
    taken. Any other name: plain text, one prompt per line. Blank lines are skipped.
    Raises ConfigError with the file and the line of what it cannot use.
    """
    if path is None:
        name, text, suffix = SHIPPED.name, SHIPPED.read_text(encoding="utf-8"), ".jsonl"
    else:
        name, text, suffix = path, read_text(path, SETTING), Path(path).suffix
    if suffix == ".jsonl":
        prompts = [_prompt_of(item, name, line) for item, line in _json_lines(text, name)]
    elif suffix == ".json":
        prompts = [_prompt_of(item, name, line) for item, line in _json_list(text, name)]
    else:
        prompts = [line for line in text.replace("\r\n", "\n").split("\n") if line.strip()]
    found = [prompt for prompt in prompts if prompt is not None]
    if len(found) < len(prompts):
        log.warning(
            "%s: %s: skipped %d of %d conversations, which have no human turn",
            SETTING,
            name,
            len(prompts) - len(found),
            len(prompts),
        )
    if not found:
        raise ConfigError(f"{SETTING}: {name} holds no prompt")
    return found


def _json_lines(text: str, name: str) -> Iterator[tuple[Any, int]]:
    # Not splitlines(): JSON strings may hold the other line separators of Unicode.
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            try:
                yield json.loads(line), number
            except json.JSONDecodeError as error:
                raise _malformed(name, number, f"not JSON ({error.msg})") from error


def _json_list(text: str, name: str) -> Iterator[tuple[Any, int]]:
    """Items of a JSON list with the line each begins on."""
    decoder = json.JSONDecoder()
    delimiters: tuple[str, ...] = ("[",)
    position, line = 0, 1
    while True:
        start = _skip_space(text, position)
        line += text.count("\n", position, start)
        if not text.startswith(delimiters, start):
            raise _malformed(name, line, f"expected {' or '.join(delimiters)} of a JSON list of prompts")
        if text[start] == "]":
            return
        item_start = _skip_space(text, start + 1)
        line += text.count("\n", start, item_start)
        try:
            item, position = decoder.raw_decode(text, item_start)
        except json.JSONDecodeError as error:
            raise _malformed(name, error.lineno, f"not JSON ({error.msg})") from error
        yield item, line
        line += text.count("\n", item_start, position)
        delimiters = (",", "]")


def _skip_space(text: str, position: int) -> int:
    space = SPACE.match(text, position)
    return space.end() if space else position


def _prompt_of(item: Any, name: str, line: int) -> str | None:
    """The text of one JSON item; None for a conversation without a human turn."""
    if isinstance(item, dict) and "conversations" in item:
        return _first_human_turn(item["conversations"], name, line)
    text = item.get("prompt", item.get("text")) if isinstance(item, dict) else item
    if not _is_text(text) or not text.strip():
        raise _malformed(name, line, "a non-empty string, or an object with prompt, text or conversations, is needed")
    return text


def _first_human_turn(turns: Any, name: str, line: int) -> str | None:
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        raise _malformed(name, line, "conversations must be a list of objects with from and value")
    for turn in turns:
        if turn.get("from") in HUMAN:
            text = turn.get("value")
            if not _is_text(text):
                raise _malformed(name, line, "the value of a human turn must be a string")
            if text.strip():
                return text
    return None


def _is_text(value: Any) -> TypeGuard[str]:
    """A string that UTF-8 can hold: JSON escapes can spell half a surrogate pair, which cannot be encoded."""
    return isinstance(value, str) and not any("\ud800" <= char <= "\udfff" for char in value)


def _malformed(name: str, line: int, what: str) -> ConfigError:
    return ConfigError(f"{SETTING}: {name}:{line}: {what}")
