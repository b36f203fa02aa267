"""From what a scheduler decides to what an executor runs."""

import numpy as np
from numpy.typing import NDArray

from kvbench.allocator import Allocator, IntArray, Layout, consecutive
from kvbench.decision import Decision
from kvbench.plan import SampleSpec, StepPlan
from kvbench.sampling import uniform
from kvbench.sequences import SequenceTable


class Planner:
    """Plans steps of the rows of ``table``. draws_tokens: the executor's; without, plans say nothing of slots."""

    def __init__(self, table: SequenceTable, allocator: Allocator, *, draws_tokens: bool) -> None:
        self._table = table
        self._allocator = allocator
        self._draws_tokens = draws_tokens

    def plan(self, decision: Decision) -> tuple[StepPlan, IntArray]:
        """The step's plan, and the row that each pick's token will be appended to."""
        table, allocator = self._table, self._allocator
        rows, num_new = np.concatenate(decision.rows), np.concatenate(decision.num_new)
        slots = np.concatenate(decision.slots) if self._draws_tokens else None
        is_decode = num_new == 1
        num_decode = int(np.count_nonzero(is_decode))
        if not is_decode[:num_decode].all():  # they go first
            order = np.argsort(~is_decode, kind="stable")
            if slots is not None:
                slots = slots[np.argsort(np.repeat(~is_decode, num_new), kind="stable")]
            rows, num_new = rows[order], num_new[order]
        lengths, picks, beams = table.after(rows, num_new)
        sample, rows_to_fill = self._sample_spec(decision, rows, picks, beams)
        plan = StepPlan(
            copies=decision.copies,
            late_copies=decision.late_copies,
            rows=rows,
            num_new=num_new,
            num_decode=num_decode,
            lengths=lengths,
            sample=sample,
            block_size=allocator.block_size,
        )
        if slots is not None:
            self._place(plan, slots)
        return plan, rows_to_fill

    def _place(self, plan: StepPlan, slots: IntArray) -> None:
        """Add to the plan which tokens come in, and where KV is written and read. slots: in the plan's order."""
        allocator, rows, num_new = self._allocator, plan.rows, plan.num_new
        plan.slots = slots
        plan.positions = consecutive(plan.lengths - num_new, num_new)
        plan.tokens = self._table.tokens[np.repeat(rows, num_new), plan.positions]
        if allocator.layout is Layout.PAGED:
            plan.block_tables = allocator.block_tables(rows)
        else:
            plan.base_slots = allocator.base_slots(rows)

    def _sample_spec(
        self, decision: Decision, rows: IntArray, picks: IntArray, beams: IntArray
    ) -> tuple[SampleSpec, IntArray]:
        """Rows that have caught up (``picks``) yield a token each, a fresh prompt one for each of its sequences."""
        table, to_fill = self._table, rows[picks]
        siblings = {group.rows.item(0): group.rows for group in decision.prefills if len(group.rows) > 1}
        if siblings:
            families = [siblings.get(row.item(), row[None]) for row in to_fill]
            picks = np.repeat(picks, [len(family) for family in families])
            to_fill = np.concatenate([to_fill[:0], *families])
        spec = SampleSpec(picks, beams)
        if self._draws_tokens:
            spec.temperature, spec.top_p = table.temperature[to_fill], table.top_p[to_fill]
            spec.uniforms = self._uniforms(to_fill, spec.temperature > 0)
        if len(beams):
            spec.num_candidates = max(group.beam.num_candidates for group in decision.groups if group.beam is not None)
        return spec, to_fill

    def _uniforms(self, rows: IntArray, sampled: NDArray[np.bool_]) -> NDArray[np.float64]:
        """What decides the next token of each row; 0 unless it is ``sampled``."""
        table, drawn = self._table, np.zeros(len(rows))
        if np.count_nonzero(sampled):
            rows = rows[sampled]
            drawn[sampled] = uniform(table.seed[rows], table.request_id[rows], table.member[rows], table.length[rows])
        return drawn
