"""ShareGPT conversations as lengths: the first human turn that an assistant answers, and the answer."""

from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from kvbench import weights
from kvbench.byte_tokenizer import ByteTokenizer
from kvbench.errors import ConfigError
from kvbench.input_files import read_text
from kvbench.json_files import is_text, json_list
from kvbench.models import Tokenizer
from kvbench.prompts import HUMAN
from kvbench.traces.containers import Row

ASSISTANT = ("gpt", "assistant", "chatgpt", "bard", "bing")
SETTING = "workload.trace.tokenizer"


def conversations(file: str, setting: str) -> Iterator[Row]:
    """Cells are the two texts. No cells: a conversation without such a pair. ``setting``: for ConfigError."""
    text = read_text(file, setting)
    for item, line in json_list(text, f"{setting}: {file}"):
        turns = item.get("conversations") if isinstance(item, dict) else None
        if isinstance(turns, list) and all(isinstance(turn, dict) for turn in turns):
            yield line, _first_pair(turns)
        else:
            yield line, [None, None]


def _first_pair(turns: list[dict[str, Any]]) -> list[Any] | None:
    for question, answer in pairwise(turns):
        if question.get("from") in HUMAN and answer.get("from") in ASSISTANT:
            texts = [question.get("value"), answer.get("value")]
            if "" not in texts:
                return texts
    return None


def counter(tokenizer: Tokenizer) -> Callable[[Any], int]:
    """Counts a text's tokens, without those that begin or end a sequence."""

    def tokens(text: Any) -> int:
        if not is_text(text) or not (num_tokens := len(tokenizer.encode(text, add_special_tokens=False))):
            raise ValueError("text of at least one token")
        return num_tokens

    return tokens


def named_tokenizer(name: str) -> Tokenizer:
    """``bytes`` (one token per byte), ``smollm2``, a local directory or a hub id. Raises ConfigError."""
    if name == "bytes":
        return ByteTokenizer()
    directory = weights.smollm2(weights.cache_root()).directory if name == "smollm2" else Path(name).expanduser()
    local = directory.is_dir()
    refusal = None if local else weights.hub_refusal(name)
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            directory if local else name, local_files_only=local or refusal is not None
        )
        reason: object = None if tokenizer.vocab_size > 0 else "no vocabulary"
    except (OSError, ValueError) as error:
        reason = refusal or str(error).splitlines()[0]
    if reason is not None:
        raise ConfigError(
            f"{SETTING}: {name} is no tokenizer that transformers can load ({reason}); "
            "legal: null (the model's own), bytes, smollm2, a local directory, a hub id"
        )
    return tokenizer
