"""What crosses the line between scheduler and executor, once per step."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvbench.allocator import Copies, IntArray

Seconds = NDArray[np.float64]
_NO_INT32, _NO_INT64 = np.empty(0, np.int32), np.empty(0, np.int64)
_NO_FLOAT32, _NO_FLOAT64 = np.empty(0, np.float32), np.empty(0, np.float64)


@dataclass
class SampleSpec:
    """Which logits become tokens, and how. One *pick* is one token to draw.

    rows: int64 ``[picks]``, index into ``StepPlan.rows`` whose last logits are used (may repeat).
    beam_rows: int64 ``[beams]``, index into ``StepPlan.rows``: rows whose best candidates are wanted.
    num_candidates: how many of them.
    temperature (0: greedy) and top_p: float32 ``[picks]``; uniforms: float64 ``[picks]``. Left out for an executor
        that draws no tokens.
    """

    rows: IntArray
    beam_rows: IntArray
    num_candidates: int = 0
    temperature: NDArray[np.float32] = field(default_factory=lambda: _NO_FLOAT32)
    top_p: NDArray[np.float32] = field(default_factory=lambda: _NO_FLOAT32)
    uniforms: NDArray[np.float64] = field(default_factory=lambda: _NO_FLOAT64)

    @classmethod
    def greedy(cls, num_rows: int) -> "SampleSpec":
        """The most likely token of every row."""
        zeros = np.zeros(num_rows, np.float32)
        rows, none = np.arange(num_rows), np.empty(0, np.int64)
        return cls(rows, none, temperature=zeros, top_p=zeros + 1, uniforms=zeros.astype(np.float64))


@dataclass
class StepPlan:
    """One step: run ``copies``, write KV of the new tokens at ``slots``, attend, sample, run ``late_copies``.

    rows: int64 ``[n]``, the rows that run; the first ``num_decode`` bring one token each.
    num_new: int64 ``[n]``, tokens each row brings; ``T`` is their sum.
    lengths: int64 ``[n]``, tokens of each row whose KV exists after the step.
    tokens int32, positions int64, slots int64: ``[T]``, packed row after row. block_tables int32
        ``[n, max_blocks]`` of ``block_size`` (paged) or base_slots int64 ``[n]`` (contiguous). All of them are
        left out for an executor that draws no tokens.
    late_copies: replicate prompts written by this step.
    """

    copies: Sequence[Copies]
    late_copies: Sequence[Copies]
    rows: IntArray
    num_new: IntArray
    num_decode: int
    lengths: IntArray
    sample: SampleSpec
    tokens: NDArray[np.int32] = field(default_factory=lambda: _NO_INT32)
    positions: IntArray = field(default_factory=lambda: _NO_INT64)
    slots: IntArray = field(default_factory=lambda: _NO_INT64)
    block_tables: NDArray[np.int32] | None = None
    block_size: int = 0
    base_slots: IntArray | None = None


@dataclass
class StepOutput:
    """tokens: int64 ``[picks]``; log_probs float32 and token_ids int64: ``[beams, num_candidates]``.

    seconds: the step's time by part (``copy``, ``model``, ``sample``).
    """

    tokens: IntArray
    log_probs: NDArray[np.float32]
    token_ids: IntArray
    seconds: dict[str, float] = field(default_factory=dict)


class Executor(Protocol):
    """Runs step plans and owns the clock.

    draws_tokens: its tokens come out of a model; otherwise they are placeholders and not recorded.
    """

    draws_tokens: bool

    def start(self) -> None:
        """Set the clock to zero."""

    def now(self) -> float:
        """Seconds since the run's start."""

    def wait_until(self, time_s: float) -> None:
        """Return when ``now()`` has reached ``time_s``."""

    def run(self, plan: StepPlan) -> StepOutput:
        """Execute one step."""

    def foresee(self, num_rows: int, kv_tokens: int, num_steps: int, until_s: float) -> tuple[Seconds, Seconds] | None:
        """The next steps, at most ``num_steps``, that start before ``until_s``, in which ``num_rows`` rows decode
        one token each and nothing else happens.

        When each of the n steps starts, and the last one ends, float64 ``[n + 1]``; the seconds that :meth:`run`
        would take for each, ``[n]``. kv_tokens: tokens whose KV the first of them reads, its new ones included.
        None where time is measured, not computed: such steps cannot be leapt over.
        """
