"""Decoding without tensors: a virtual clock that a cost model advances. Tokens have no meaning here."""

import numpy as np

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
        kv_tokens = float(plan.lengths.sum())
        # A new token attends to those before it and to itself.
        pairs = float((plan.num_new * (2 * plan.lengths - plan.num_new + 1)).sum()) / 2
        copy_s = sum(self._cost.copy_s(copies) for copies in (*plan.copies, *plan.late_copies))
        model_s = float(self._cost.step_s(int(plan.num_new.sum()), num_sampled, kv_tokens, pairs))
        self._now += copy_s + model_s
        candidates = len(sample.beam_rows), sample.num_candidates
        return StepOutput(
            np.zeros(len(sample.rows), np.int64),
            np.zeros(candidates, np.float32),
            np.zeros(candidates, np.int64),
            {"copy": copy_s, "model": model_s},
        )

    def foresee(self, num_rows: int, kv_tokens: int, num_steps: int) -> Seconds:
        read = float(kv_tokens) + np.arange(num_steps, dtype=np.float64) * num_rows
        return self._cost.step_s(num_rows, num_rows, read, read)
