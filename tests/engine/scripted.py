"""An executor without a model: tokens from a hash, time from a counter, KV as lists of what was written."""

from collections.abc import Sequence

import numpy as np

from kvbench.allocator import Copies, Tier
from kvbench.plan import StepOutput, StepPlan

VOCAB = 16


class ScriptedExecutor:
    """Checks each plan against a simulated pool while it runs it.

    Every slot remembers the token and position last written to it, so that a plan whose block tables,
    slots or copies are wrong is noticed here, whatever the tokens are.
    """

    draws_tokens = True

    def __init__(self, num_slots: int, num_host_slots: int, seconds_per_step: float = 1.0) -> None:
        self._pools = {
            Tier.DEVICE: np.full((num_slots, 2), -1, np.int64),
            Tier.HOST: np.full((num_host_slots, 2), -1, np.int64),
        }
        self._time = 0.0
        self._seconds_per_step = seconds_per_step

    def start(self) -> None:
        self._time = 0.0

    def now(self) -> float:
        return self._time

    def wait_until(self, time_s: float) -> None:
        self._time = max(self._time, time_s)

    def foresee(self, num_rows: int, kv_tokens: int, num_steps: int, until_s: float) -> None:
        """Every step is to be checked."""

    def run(self, plan: StepPlan) -> StepOutput:
        self._copy(plan.copies)
        pool = self._pools[Tier.DEVICE]
        assert len(np.unique(plan.slots)) == len(plan.slots), "two tokens were given one slot"
        pool[plan.slots] = np.stack([plan.tokens, plan.positions], axis=1)
        histories = [self._history(plan, index) for index in range(len(plan.rows))]
        self._copy(plan.late_copies)
        self._time += self._seconds_per_step
        sample = plan.sample
        tokens = np.array(
            [_next(histories[row], uniform) for row, uniform in zip(sample.rows, sample.uniforms, strict=True)],
            np.int64,
        )
        scores = [_scores(histories[row]) for row in sample.beam_rows]
        best = [np.argsort(-score)[: sample.num_candidates] for score in scores]
        log_probs = np.array([score[order] for score, order in zip(scores, best, strict=True)], np.float32)
        seconds = dict.fromkeys(("copy", "model", "sample"), 0.0)
        return StepOutput(tokens, log_probs, np.array(best, np.int64), seconds)

    def _history(self, plan: StepPlan, index: int) -> tuple[int, ...]:
        """The row's tokens, read the way a kernel would."""
        positions = np.arange(plan.lengths[index])
        if plan.block_tables is not None:
            blocks = plan.block_tables[index, positions // plan.block_size]
            slots = blocks * plan.block_size + positions % plan.block_size
        else:
            assert plan.base_slots is not None
            slots = plan.base_slots[index] + positions
        stored = self._pools[Tier.DEVICE][slots]
        assert (stored[:, 1] == positions).all(), f"row {plan.rows[index]} reads slots that hold other positions"
        return tuple(stored[:, 0].tolist())

    def _copy(self, copies: Sequence[Copies]) -> None:
        for copy in copies:
            for source, destination, count in copy.ranges:
                moved = self._pools[copy.source][source : source + count].copy()
                self._pools[copy.destination][destination : destination + count] = moved


def _next(history: tuple[int, ...], uniform: float) -> int:
    return hash((history, uniform)) % VOCAB


def _scores(history: tuple[int, ...]) -> np.ndarray:
    """Log probabilities of the next token, a function of the whole history."""
    logits = np.random.default_rng(abs(hash(history))).normal(size=VOCAB)
    return logits - np.log(np.exp(logits).sum())
