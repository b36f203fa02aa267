"""One request: a prompt, when it arrives, how many tokens it wants and how they are chosen."""

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from kvbench.errors import ConfigError

MODES = ("greedy", "sample", "beam")


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen; the meaning of each field is that of transformers' ``generate``.

    Raises ConfigError naming ``workload.<field>`` on a value that has no meaning.

    mode: greedy | sample (``n`` sequences share a prompt) | beam (``beam_width`` sequences).
    early_stopping: True | False | "never", beam search only.
    seed: of this request alone, so that its samples do not depend on what runs beside it.
    """

    mode: str = "greedy"
    n: int = 1
    beam_width: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    ignore_eos: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        _require(self.mode in MODES, "mode", self.mode, " | ".join(MODES))
        _require(self.n >= 1, "n", self.n, "an integer >= 1")
        _require(self.beam_width >= 1, "beam_width", self.beam_width, "an integer >= 1")
        _require(self.n == 1 or self.mode == "sample", "n", self.n, "1 unless workload.mode is sample")
        is_beam = self.mode == "beam"
        _require(self.beam_width == 1 or is_beam, "beam_width", self.beam_width, "1 unless workload.mode is beam")
        _require(0 < self.temperature < math.inf, "temperature", self.temperature, "a finite number > 0")
        _require(0 < self.top_p <= 1, "top_p", self.top_p, "a number in (0, 1]")
        _require(math.isfinite(self.length_penalty), "length_penalty", self.length_penalty, "a finite number")
        # By identity: 0 and 1 equal False and True, but transformers takes neither.
        legal = self.early_stopping is True or self.early_stopping is False or self.early_stopping == "never"
        _require(legal, "early_stopping", self.early_stopping, "true | false | never")

    @property
    def num_sequences(self) -> int:
        """Sequences of the request's group."""
        return {"greedy": 1, "sample": self.n, "beam": self.beam_width}[self.mode]


@dataclass(frozen=True, eq=False)
class Request:
    """What the engine is asked to serve.

    prompt: int32 ``[num_tokens]`` token ids, at least one, read-only.
    arrival_s: seconds after the run's start.
    max_new_tokens: most tokens to generate per sequence.
    hash_ids: an id for every 512 tokens of the prompt, the rest included, where a trace states them (equal ids:
        equal content up to there).
    prefix_id: requests with equal ids begin with the same ``num_prefix_tokens`` tokens; None: a prompt of its own.
    is_text: the tokens say what the prompt is; False: they are placeholders, and ``hash_ids`` or ``prefix_id`` do.
    """

    request_id: int
    prompt: NDArray[np.int32]
    arrival_s: float
    max_new_tokens: int
    sampling: Sampling
    hash_ids: tuple[int, ...] = ()
    prefix_id: int | None = None
    num_prefix_tokens: int = 0
    is_text: bool = True

    def __post_init__(self) -> None:
        _require(len(self.prompt) >= 1, "prompts", "an empty prompt", "at least one token")
        _require(self.max_new_tokens >= 1, "output_tokens", self.max_new_tokens, "an integer >= 1")
        _require(0 <= self.arrival_s < math.inf, "arrival", self.arrival_s, "finite seconds >= 0")
        shared, most = self.num_prefix_tokens, len(self.prompt) - 1
        legal = shared == 0 if self.prefix_id is None else 1 <= shared <= most
        _require(legal, "prefix", shared, f"1 to {most} tokens of this prompt, or none and no id")
        self.prompt.setflags(write=False)

    @property
    def num_sequences(self) -> int:
        return self.sampling.num_sequences


def _require(legal: bool, key: str, value: object, wanted: str) -> None:
    if not legal:
        raise ConfigError(f"workload.{key}: {value!r} is not legal; it must be {wanted}")
