"""Beam search replayed from recordings of real runs, for executors that have no logits.

What beam search does to memory is told by its *parents* alone: which old beam each new beam continues.
``kvbench.record_beams`` notes them, ``resources/beams/width<k>.npz`` holds those that ship.
"""

import json
import re
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from kvbench.allocator import IntArray
from kvbench.beam import FloatArray, Generated, Hypothesis
from kvbench.errors import ConfigError
from kvbench.sampling import uniform

SHIPPED = resources.files("kvbench") / "resources" / "beams"
_NOTHING = np.empty(0, np.int64)


@dataclass(frozen=True)
class Recordings:
    """Parents of every step of real beam searches of one width.

    parents: int8 ``[requests, steps, width]``; at each step new beam ``i``, by score, continued old beam
        ``parents[i]``. The first step is the beams' birth: all parents are 0.
    prompts: int32, token ids of the requests' prompts, one after the other.
    prompt_lengths: int32 ``[requests]``.
    provenance: the run's configuration, model and environment; JSON types.
    """

    parents: NDArray[np.int8]
    prompts: NDArray[np.int32]
    prompt_lengths: NDArray[np.int32]
    provenance: dict[str, Any]

    def save(self, file: IO[bytes]) -> None:
        np.savez_compressed(
            file,
            parents=self.parents,
            prompts=self.prompts,
            prompt_lengths=self.prompt_lengths,
            provenance=np.array(json.dumps(self.provenance)),
        )

    @classmethod
    def load(cls, file: IO[bytes]) -> "Recordings":
        with np.load(file) as arrays:
            provenance = json.loads(str(arrays["provenance"]))
            return cls(arrays["parents"], arrays["prompts"], arrays["prompt_lengths"], provenance)


def shipped_widths() -> list[int]:
    """Beam widths that recordings ship for."""
    names = (re.fullmatch(r"width(\d+)\.npz", file.name) for file in SHIPPED.iterdir())
    return sorted(int(name[1]) for name in names if name)


def shipped(width: int) -> Recordings:
    """Raises ConfigError on a width without recordings."""
    if width not in shipped_widths():
        legal = ", ".join(map(str, shipped_widths()))
        raise ConfigError(f"workload.beam_width: {width} has no recorded beams to replay; use one of {legal}")
    with (SHIPPED / f"width{width}.npz").open("rb") as file:
        return Recordings.load(file)


@cache
def shipped_parents(width: int) -> IntArray:
    """Parents of all shipped recordings of ``width``, int64 ``[requests, steps, width]``, read-only."""
    parents = shipped(width).parents.astype(np.int64)
    parents.setflags(write=False)
    return parents


class ReplayedBeams:
    """A request's beams (`kvbench.beam.Beams`) as they went in a recording.

    Tokens and scores are 0 and candidates are neither needed nor looked at.

    recordings: int64 ``[requests, steps, width]``, see ``shipped_parents``. Which one is replayed
        depends on ``seed`` and ``request_id`` only. Beyond its end the request goes on with the second half
        of another, and so on: fewer beams die late in a search than early.
    max_new_tokens: length at which every beam finishes.
    """

    num_candidates = 0

    def __init__(self, recordings: IntArray, max_new_tokens: int, *, seed: int, request_id: int) -> None:
        self.width = recordings.shape[2]
        self.done = False
        self._parents = _parents_of(recordings, max_new_tokens - 1, seed, request_id)
        self._tokens = np.zeros(self.width, np.int64)
        self._num_new = 0

    @property
    def hypotheses(self) -> list[Hypothesis]:
        if not self.done:
            return []
        return [Hypothesis(np.zeros(self._num_new, np.int64), 0.0) for _ in range(self.width)]

    def advance(self, log_probs: FloatArray, token_ids: IntArray, generated: Generated) -> tuple[IntArray, IntArray]:
        """See ``Beams.advance``; the arguments do not matter."""
        step = self._num_new
        self._num_new = step + 1
        if step == len(self._parents):
            self.done = True
            return _NOTHING, _NOTHING
        return self._parents[step], self._tokens


def _parents_of(recordings: IntArray, num_steps: int, seed: int, request_id: int) -> IntArray:
    """Parents of ``num_steps`` steps, int64 ``[num_steps, width]``: a view where one recording suffices."""
    length = recordings.shape[1]
    half = length // 2
    num_more = max(0, -(-(num_steps - length) // (length - half)))
    chosen = (uniform(seed, request_id, 0, np.arange(1 + num_more)) * len(recordings)).astype(np.int64)
    first = recordings[chosen[0]]
    return np.concatenate([first, *recordings[chosen[1:], half:]])[:num_steps] if num_more else first[:num_steps]
