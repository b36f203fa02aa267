"""What happened in a run: one record per step and one per request."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from kvbench.accounting import Attribution, note_growth
from kvbench.allocator import Allocator, Growth
from kvbench.decision import Decision
from kvbench.group import Group, Status
from kvbench.plan import Seconds
from kvbench.scheduler import Scheduler
from kvbench.sequences import SequenceTable
from kvbench.step_table import StepTable

SECONDS = ("schedule_s", "copy_s", "model_s", "sample_s")
PARTS = ("token_states", "reservation", "internal_fragmentation", "rounding", "free")
KINDS = ("idle", "prefill", "decode", "mixed")
_CAUSES = ("cow", "fork", "prompt", "swap_out", "swap_in")
_QUEUES = ("num_running", "num_sequences", "num_waiting", "num_preempted")
_COLUMNS = (
    *("start_s", "kind", *_QUEUES, "num_new_tokens", "refused"),
    *("token_states", "vacant", "free", "mapped", "cached", "rounding", "host_held", "stranded"),
    *("num_preemptions", "num_recomputed_tokens", *(f"{cause}_slots" for cause in _CAUSES), *SECONDS),
)
_START, _STRANDED, _MODEL = (_COLUMNS.index(name) for name in ("start_s", "stranded", "model_s"))
_POOL = slice(_COLUMNS.index("token_states"), _COLUMNS.index("cached") + 1)  # what `note_growth` writes
_STATE = slice(_COLUMNS.index("kind"), _COLUMNS.index("refused") + 1)
_HELD = slice(_COLUMNS.index("rounding"), _COLUMNS.index("host_held") + 1)
_NONE, _UNTIMED = (0,) * len(_CAUSES), (0.0,) * len(SECONDS)
_DECODE = KINDS.index("decode")


class Recorder:
    """Collects records while the engine runs; tables afterwards.

    A step's record describes the pool while its model ran, and holds until the next record: weighted by
    duration, records average to exactly what the pool looked like over time, idle gaps included.

    keep_tokens: whether requests' records hold what was generated.
    """

    def __init__(
        self, allocator: Allocator, scheduler: Scheduler, table: SequenceTable, *, keep_tokens: bool = True
    ) -> None:
        self._allocator = allocator
        self._scheduler = scheduler
        self._table = table
        self._keep_tokens = keep_tokens
        self._attribution = Attribution(allocator.pool.max_rows)
        self._steps = StepTable(_COLUMNS)
        self._ended: list[Group] = []

    def step(self, decision: Decision, start_s: float, kind: str) -> int:
        """Record the pool as the step's model is about to see it; the record's index, see :meth:`timed`."""
        rows = self._scheduler.held_rows
        self._attribution.observe(len(self._steps), rows, self._table.uid[rows], self._allocator.capacity(rows)[None])
        usage = self._allocator.usage()
        return self._steps.append(
            (
                *(start_s, KINDS.index(kind), *self._queues(), decision.num_new_tokens, decision.refused),
                *(usage.token_states, usage.vacant, usage.free, usage.mapped, usage.cached, usage.rounding),
                *(usage.host_held, usage.free if decision.stranded else 0),
                *(decision.num_preemptions, decision.num_recomputed_tokens),
                *map(decision.copied_slots.get, _CAUSES, _NONE),
                *_UNTIMED,
            )
        )

    def timed(self, step: int, seconds: Mapping[str, float]) -> None:
        """What the parts of a recorded step took."""
        for part, value in seconds.items():
            self._steps.set(step, f"{part}_s", value)

    def leap(self, growth: Growth, starts_s: Seconds, model_s: Seconds, stranded: NDArray[np.bool_] | None) -> None:
        """Record decode steps that were taken at once. starts_s, model_s, stranded: ``[growth.num_steps]``.

        stranded: of the queue's head, which stood refused; None if nobody did.
        """
        rows, prefixes = self._scheduler.held_rows, self._scheduler.prefixes.rows
        capacities = growth.capacities
        if len(prefixes):
            capacities = np.hstack([capacities, np.tile(self._allocator.capacity(prefixes), (growth.num_steps, 1))])
        self._attribution.observe(len(self._steps), rows, self._table.uid[rows], capacities)
        before, num_grown = growth.before, growth.capacities.shape[1]
        shared = np.zeros(len(_COLUMNS))
        shared[_STATE] = (_DECODE, *self._queues(), num_grown, stranded is not None)
        shared[_HELD] = before.rounding, before.host_held
        steps = self._steps.extend(shared, growth.num_steps)
        steps[:, _START], steps[:, _MODEL] = starts_s, model_s
        note_growth(steps[:, _POOL], growth.taken, num_grown, *before)
        if stranded is not None:
            steps[:, _STRANDED] = np.where(stranded, growth.free, 0)

    def end_sequence(self, uid: int, num_tokens: int) -> None:
        self._attribution.end(uid, num_tokens)

    def end_group(self, group: Group) -> None:
        self._ended.append(group)

    def steps(self, end_s: float) -> pd.DataFrame:
        """One row per step; ``duration_s`` reaches to the next step's start, the last one's to ``end_s``."""
        if not len(self._steps):  # every request was rejected at once
            self.step(Decision(), 0.0, "idle")
        steps = self._steps.frame({"start_s": float, "refused": bool} | dict.fromkeys(SECONDS, float))
        steps["kind"] = np.array(KINDS)[steps["kind"]]
        steps["duration_s"] = np.diff(steps["start_s"], append=end_s)
        internal = self._attribution.internal_fragmentation(len(steps))
        steps["internal_fragmentation"] = internal
        steps["reservation"] = steps.pop("vacant") - internal
        return steps

    def requests(self) -> pd.DataFrame:
        """One row per request, in request order."""
        groups = sorted(self._ended, key=lambda group: group.request.request_id)
        return pd.DataFrame([_request_record(group, self._keep_tokens) for group in groups])

    def _queues(self) -> tuple[int, int, int, int]:
        scheduler = self._scheduler
        num_sequences = len(scheduler.running_rows)
        return len(scheduler.running), num_sequences, len(scheduler.waiting), len(scheduler.preempted)


def _request_record(group: Group, keep_tokens: bool) -> dict[str, Any]:
    request, done = group.request, group.status is Status.FINISHED
    outputs = [group.outputs[i] for i in sorted(group.outputs)]
    longest = max((len(output) for output in outputs), default=0)
    times = group.token_times_s
    first, latency, tpot = None, None, None
    if done:
        assert group.finished_s is not None
        first = float(times[0]) - request.arrival_s
        latency = group.finished_s - request.arrival_s
        tpot = (latency - first) / (len(times) - 1) if len(times) > 1 else None
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
        "num_cached_tokens": group.num_cached_tokens,
        "num_recomputed_tokens": group.num_recomputed_tokens,
        "num_swapped_slots": group.num_swapped_slots,
        "token_times_s": times,
        "outputs": [output.tolist() for output in outputs] if keep_tokens else [],
        "scores": group.scores,
    }
