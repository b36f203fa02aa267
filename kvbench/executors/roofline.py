"""Decoding without tensors: a virtual clock that a cost model advances. Tokens have no meaning here."""

import numba
import numpy as np
from numba import types

from kvbench.executors.cost_model import CostModel
from kvbench.plan import Seconds, StepOutput, StepPlan


class RooflineExecutor:
    """Runs step plans in virtual time. Every token is 0, every candidate of a beam equally likely."""

    draws_tokens = False

    def __init__(self, cost: CostModel) -> None:
        self._cost = cost
        self._now = 0.0

    def start(self) -> None:
        self._now = 0.0

    def now(self) -> float:
        return self._now

    def wait_until(self, time_s: float) -> None:
        self._now = max(self._now, time_s)

    def run(self, plan: StepPlan) -> StepOutput:
        sample = plan.sample
        num_sampled = len(sample.rows) + len(sample.beam_rows)
        num_tokens, kv_tokens, pairs = _work(plan.num_new, plan.lengths)
        copy_s = sum(self._cost.copy_s(copies) for copies in (*plan.copies, *plan.late_copies))
        model_s = self._cost.step_s(num_tokens, num_sampled, kv_tokens, pairs)
        self._now += copy_s + model_s
        candidates = len(sample.beam_rows), sample.num_candidates
        return StepOutput(
            np.zeros(len(sample.rows), np.int64),
            np.zeros(candidates, np.float32),
            np.zeros(candidates, np.int64),
            {"copy": copy_s, "model": model_s},
        )

    def foresee(self, num_rows: int, kv_tokens: int, num_steps: int, until_s: float) -> tuple[Seconds, Seconds]:
        return self._cost.decodes_s(num_rows, kv_tokens, num_steps, self._now, until_s)


_READ = types.Array(types.int64, 1, "A", readonly=True)


@numba.njit(types.Tuple((types.int64, types.float64, types.float64))(_READ, _READ), cache=True)
def _work(num_new, lengths):
    """Of all rows: new tokens, tokens read, query-key pairs (a token attends to those before it and to itself)."""
    num_tokens = num_read = num_pairs = 0
    for new, length in zip(num_new, lengths):  # noqa: B905 (numba knows no strict)
        num_tokens += new
        num_read += length
        num_pairs += new * (2 * length - new + 1)
    return num_tokens, float(num_read), num_pairs / 2
