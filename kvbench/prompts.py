"""Prompt texts: those that ship with kvbench, or a file of JSON lines, ShareGPT-style JSON or plain text."""

import logging
from importlib import resources
from pathlib import Path
from typing import Any

from kvbench.errors import ConfigError
from kvbench.input_files import read_text
from kvbench.json_files import is_text, json_lines, json_list

SETTING = "workload.prompts"
SHIPPED = resources.files("kvbench") / "resources" / "prompts.jsonl"
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
        prompts = [_prompt_of(item, name, line) for item, line in json_lines(text, f"{SETTING}: {name}")]
    elif suffix == ".json":
        prompts = [_prompt_of(item, name, line) for item, line in json_list(text, f"{SETTING}: {name}")]
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


def _prompt_of(item: Any, name: str, line: int) -> str | None:
    """The text of one JSON item; None for a conversation without a human turn."""
    if isinstance(item, dict) and "conversations" in item:
        return _first_human_turn(item["conversations"], name, line)
    text = item.get("prompt", item.get("text")) if isinstance(item, dict) else item
    if not is_text(text) or not text.strip():
        raise _malformed(name, line, "a non-empty string, or an object with prompt, text or conversations, is needed")
    return text


def _first_human_turn(turns: Any, name: str, line: int) -> str | None:
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        raise _malformed(name, line, "conversations must be a list of objects with from and value")
    for turn in turns:
        if turn.get("from") in HUMAN:
            text = turn.get("value")
            if not is_text(text):
                raise _malformed(name, line, "the value of a human turn must be a string")
            if text.strip():
                return text
    return None


def _malformed(name: str, line: int, what: str) -> ConfigError:
    return ConfigError(f"{SETTING}: {name}:{line}: {what}")
