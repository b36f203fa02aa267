"""Beam search over one request, with the semantics of ``transformers`` ``generate``.

Source: ``GenerationMixin._beam_search`` of transformers 5 (``do_sample=False``). Pure host code: the
executor supplies the best candidates of every running beam.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvbench.allocator import IntArray

FloatArray = NDArray[np.float32]
Generated = Callable[[], NDArray[np.signedinteger]]


@dataclass(frozen=True)
class Hypothesis:
    """A finished beam: generated token ids (EOS included) and the length-penalised score."""

    tokens: IntArray
    score: float


class Beams(Protocol):
    """What the engine asks of one request's beams.

    done: no step follows; ``hypotheses``, best first, are final.
    num_candidates: best candidates each running beam must offer to ``advance``.
    """

    done: bool

    @property
    def num_candidates(self) -> int: ...

    @property
    def hypotheses(self) -> list[Hypothesis]: ...

    def advance(self, log_probs: FloatArray, token_ids: IntArray, generated: Generated) -> tuple[IntArray, IntArray]:
        """Choose the beams of the next step.

        log_probs: float32 ``[beams, k]`` best log probabilities of every running beam, descending.
        token_ids: int64 ``[beams, k]`` their tokens.
        generated: gives the tokens that the beams have generated so far, ``[beams, num_new]``.
        Returns ``(parents, tokens)``, int64 ``[width]`` each: new beam ``i`` continues beam
        ``parents[i]`` with ``tokens[i]``. Meaningless once ``done``.
        """


@dataclass
class BeamSearch:
    """State of one request's beams; beam ``i`` is the one with the ``i``-th best score.

    max_new_tokens: length at which every beam finishes.
    eos: token ids that finish a beam (empty: none does).
    early_stopping: ``True``, ``False`` or ``"never"`` as in ``GenerationConfig``.
    """

    width: int
    max_new_tokens: int
    eos: tuple[int, ...] = ()
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    done: bool = field(default=False, init=False)
    hypotheses: list[Hypothesis] = field(default_factory=list, init=False)
    scores: FloatArray = field(init=False)
    num_new: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.scores = np.zeros(1, np.float32)

    @property
    def num_candidates(self) -> int:
        """Candidates each running beam must offer, so that ``width`` unfinished ones remain."""
        return max(2, 1 + len(self.eos)) * self.width

    def advance(self, log_probs: FloatArray, token_ids: IntArray, generated: Generated) -> tuple[IntArray, IntArray]:
        """See ``Beams.advance``."""
        total = (log_probs + self.scores[:, None]).ravel()
        best = np.argsort(-total, kind="stable")[: self.num_candidates]
        parents, tokens, totals = best // log_probs.shape[1], token_ids.ravel()[best], total[best]
        self.num_new += 1
        at_limit = self.num_new == self.max_new_tokens
        finished = np.ones(len(best), bool) if at_limit else np.isin(tokens, self.eos)
        top = np.flatnonzero(finished[: self.width])
        if len(top):
            histories = generated()
            self._finish([(histories[parents[i]], tokens[i], totals[i]) for i in top])
        going = np.flatnonzero(~finished)[: self.width]
        if len(going) == self.width:
            self.scores = totals[going]
        self.done = at_limit or self._nothing_to_gain()
        return parents[going], tokens[going]

    def _finish(self, beams: list[tuple[NDArray[np.signedinteger], int, np.float32]]) -> None:
        if self.early_stopping is True and len(self.hypotheses) == self.width:
            return
        norm = np.float32(self.num_new**self.length_penalty)
        self.hypotheses += [
            Hypothesis(np.append(tokens, token).astype(np.int64), float(total / norm)) for tokens, token, total in beams
        ]
        self.hypotheses.sort(key=lambda hypothesis: -hypothesis.score)
        del self.hypotheses[self.width :]

    def _nothing_to_gain(self) -> bool:
        full = len(self.hypotheses) == self.width
        if full and self.early_stopping is True:
            return True
        longest = self.early_stopping == "never" and self.length_penalty > 0
        length = self.max_new_tokens if longest else self.num_new
        best_possible = float(self.scores[0]) / length**self.length_penalty
        return full and best_possible <= self.hypotheses[-1].score
