"""What happened in a run: one record per step and one per request."""

from typing import Any

import numpy as np
import pandas as pd

from kvbench.accounting import Attribution
from kvbench.allocator import Allocator
from kvbench.group import Group, Status
from kvbench.scheduler import Decision, Scheduler
from kvbench.sequences import SequenceTable

SECONDS = ("schedule_s", "copy_s", "model_s", "sample_s")
PARTS = ("token_states", "reservation", "internal_fragmentation", "rounding", "free")


class Recorder:
    """Collects records while the engine runs; tables afterwards.

    A step's record describes the pool while its model ran, and holds until the next record: weighted by
    duration, records average to exactly what the pool looked like over time, idle gaps included.
    """

    def __init__(self, allocator: Allocator, scheduler: Scheduler, table: SequenceTable) -> None:
        self._allocator = allocator
        self._scheduler = scheduler
        self._table = table
        self._attribution = Attribution(allocator.pool.max_rows)
        self._steps: list[dict[str, Any]] = []
        self._groups: list[Group] = []

    def step(self, decision: Decision, start_s: float, kind: str) -> dict[str, Any]:
        """Record the pool as the step's model is about to see it; the engine adds the times."""
        running = self._scheduler.running
        rows = np.concatenate([np.empty(0, np.int64), *(group.rows for group in running)])
        capacity = self._allocator.capacity(rows)
        self._attribution.observe(len(self._steps), rows, self._table.uid[rows], capacity)
        usage = self._allocator.usage()
        record = {
            "start_s": start_s,
            "kind": kind,
            "num_running": len(running),
            "num_sequences": len(rows),
            "num_waiting": len(self._scheduler.waiting),
            "num_preempted": len(self._scheduler.preempted),
            "num_new_tokens": sum(int(new.sum()) for new in decision.num_new),
            "refused": decision.refused,
            "token_states": usage.token_states,
            "vacant": usage.vacant,
            "rounding": usage.rounding,
            "free": usage.free,
            "stranded": usage.free if decision.stranded else 0,
            "mapped": usage.mapped,
            "host_held": usage.host_held,
            "num_preemptions": decision.num_preemptions,
            "num_recomputed_tokens": decision.num_recomputed_tokens,
            **{f"{cause}_slots": count for cause, count in decision.copied_slots.items()},
            **dict.fromkeys(SECONDS, 0.0),
        }
        self._steps.append(record)
        return record

    def end_sequence(self, uid: int, num_tokens: int) -> None:
        self._attribution.end(uid, num_tokens)

    def end_group(self, group: Group) -> None:
        self._groups.append(group)

    def steps(self, end_s: float) -> pd.DataFrame:
        """One row per step; ``duration_s`` reaches to the next step's start, the last one's to ``end_s``."""
        if not self._steps:  # every request was rejected at once
            self.step(Decision(), 0.0, "idle")
        steps = pd.DataFrame(self._steps)
        steps["duration_s"] = np.diff(steps["start_s"], append=end_s)
        internal = self._attribution.internal_fragmentation(len(steps))
        steps["internal_fragmentation"] = internal
        steps["reservation"] = steps.pop("vacant") - internal
        return steps

    def requests(self) -> pd.DataFrame:
        """One row per request, in request order."""
        groups = sorted(self._groups, key=lambda group: group.request.request_id)
        return pd.DataFrame([_request_record(group) for group in groups])


def _request_record(group: Group) -> dict[str, Any]:
    request, done = group.request, group.status is Status.FINISHED
    outputs = [group.outputs[i] for i in sorted(group.outputs)]
    longest = max((len(output) for output in outputs), default=0)
    first, latency, tpot = None, None, None
    if done:
        assert group.finished_s is not None
        first = group.token_times_s[0] - request.arrival_s
        latency = group.finished_s - request.arrival_s
        rounds = len(group.token_times_s)
        tpot = (latency - first) / (rounds - 1) if rounds > 1 else None
    return {
        "request_id": request.request_id,
        "status": group.status.value,
        "error": group.error,
        "arrival_s": request.arrival_s,
        "queueing_s": group.admitted_s - request.arrival_s if group.admitted_s is not None else None,
        "ttft_s": first,
        "tpot_s": tpot,
        "latency_s": latency,
        "normalized_latency_s": latency / longest if latency is not None else None,
        "prompt_tokens": group.prompt_length,
        "output_tokens": sum(len(output) for output in outputs),
        "num_sequences": request.num_sequences,
        "num_preemptions": group.num_preemptions,
        "num_recomputed_tokens": group.num_recomputed_tokens,
        "num_swapped_slots": group.num_swapped_slots,
        "token_times_s": group.token_times_s,
        "outputs": [output.tolist() for output in outputs],
        "scores": group.scores,
    }
