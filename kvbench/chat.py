"""Lengths of chat requests: a prompt is the conversation so far, of which only the end is kept."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kvbench.errors import ConfigError
from kvbench.traces import Trace


@dataclass
class ChatConfig:
    """``workload.chat``.

    mean_rounds: mean of the geometric distribution of a conversation's rounds; None: no conversations.
    max_input: tokens of the conversation's end that a prompt keeps. max_output: most tokens to generate.
    """

    mean_rounds: float | None = None
    max_input: int = 1024
    max_output: int = 1024


def check(cfg: ChatConfig) -> None:
    """Raises ConfigError on a value without meaning."""
    if cfg.mean_rounds is not None and not 1 <= cfg.mean_rounds < math.inf:
        raise ConfigError(f"workload.chat.mean_rounds: {cfg.mean_rounds} is not a finite number >= 1, or null")
    for key in ("max_input", "max_output"):
        if getattr(cfg, key) < 1:
            raise ConfigError(f"workload.chat.{key}: {getattr(cfg, key)} is not an integer >= 1")


def requests(cfg: ChatConfig, draw: Callable[[int], Trace], count: int, rng: np.random.Generator) -> Trace:
    """``count`` requests, each some round of a conversation of its own; ``draw(n)`` gives ``n`` rounds' lengths.

    The prompt of round r holds the inputs and outputs of the r - 1 rounds before it and its own input, cut to
    the last ``max_input`` tokens. Of conversations with geometrically many rounds, the rounds' numbers are
    geometric as well. Asking for more requests does not change the first ones.
    """
    assert cfg.mean_rounds is not None
    number = rng.geometric(1 / cfg.mean_rounds, count)
    last = np.cumsum(number) - 1
    rounds = draw(int(last[-1]) + 1)
    said = np.concatenate([[0], np.cumsum(rounds.input_tokens + rounds.output_tokens)])
    history = said[last] - said[last - number + 1]
    inputs = np.minimum(history + rounds.input_tokens[last], cfg.max_input)
    return Trace(inputs, np.minimum(rounds.output_tokens[last], cfg.max_output))
