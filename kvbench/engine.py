"""The engine: admit, grow (preempt until it fits), copy, run, sample, retire, record."""

import math
from collections import deque
from collections.abc import Callable, Iterable

import numpy as np
from numpy.typing import NDArray

from kvbench.allocator import Allocator, IntArray, Layout, consecutive
from kvbench.beam import FloatArray
from kvbench.group import Group, Status
from kvbench.plan import Executor, SampleSpec, StepOutput, StepPlan
from kvbench.recorder import Recorder
from kvbench.sampling import uniform
from kvbench.scheduler import Decision, Scheduler
from kvbench.sequences import SequenceTable


class Engine:
    """Serves requests, in order of arrival, until all have ended.

    eos: token ids that end a sequence (unless its request ignores them).
    on_finish: called with each group that ends (progress).
    audit: check every slot of the pool at every step (slow).
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        recorder: Recorder,
        *,
        eos: tuple[int, ...] = (),
        on_finish: Callable[[Group], None] = lambda group: None,
        audit: bool = False,
    ) -> None:
        self.allocator: Allocator = scheduler.allocator
        self.table: SequenceTable = scheduler.table
        self.scheduler = scheduler
        self.executor = executor
        self.recorder = recorder
        self.eos = eos
        self._on_finish = on_finish
        self._audit = audit
        self._can_leap = executor.foresee(1, 1, 1) is not None

    def run(self, groups: Iterable[Group]) -> float:
        """Serve ``groups`` (sorted by arrival); returns the time at which the last one ended, in seconds."""
        arrivals = deque(groups)
        self.executor.start()
        while arrivals or self.scheduler.has_work:
            self._receive(arrivals)
            next_s = arrivals[0].request.arrival_s if arrivals else math.inf
            if not self.scheduler.has_work:
                if arrivals:
                    self.recorder.step(Decision(), self.executor.now(), "idle")
                    self.executor.wait_until(next_s)
            elif not (self._can_leap and self._leap(next_s)):
                self._step()
        return self.executor.now()

    def _receive(self, arrivals: deque[Group]) -> None:
        while arrivals and arrivals[0].request.arrival_s <= self.executor.now():
            group = arrivals.popleft()
            if group.status is Status.REJECTED:
                self._end(group)
            else:
                self.scheduler.add(group)

    def _step(self) -> None:
        start_s = self.executor.now()
        decision = self.scheduler.schedule()
        if self._audit:
            self._check()
        step = self.recorder.step(decision, start_s, "prefill" if decision.is_prefill else "decode")
        plan, rows_to_fill = self._plan(decision)
        planned_s = self.executor.now()
        for group in decision.groups:
            group.admitted_s = start_s if group.admitted_s is None else group.admitted_s
        output = self.executor.run(plan)
        self.recorder.timed(step, {"schedule": planned_s - start_s} | output.seconds)
        self._accept(decision, plan, rows_to_fill, output)

    def _leap(self, until_s: float) -> bool:
        """Take at once all steps before ``until_s`` that need no decision, with the effect of taking them one
        by one. False, with nothing done, if the very next one needs one.
        """
        num_steps = self.scheduler.quiet_steps()
        if not num_steps:
            return False
        table, rows = self.table, self.scheduler.running_rows
        seconds = self.executor.foresee(len(rows), int(table.length[rows].sum()), num_steps)
        assert seconds is not None
        times = np.cumsum(np.concatenate([[self.executor.now()], seconds]))  # when each step starts, and the end
        growth = self.allocator.grow(rows, int(np.searchsorted(times[:-1], until_s)))
        if growth is None:
            return False
        count = growth.num_steps
        self.recorder.leap(growth, times[:count], seconds[:count], *self.scheduler.refusals(growth))
        self.executor.wait_until(times[count])
        table.computed[rows] += count
        table.length[rows] += count
        ends = times[1 : count + 1].tolist()
        for group in self.scheduler.running:
            group.token_times_s.extend(ends)
        if self._audit:
            self._check()
        ending = np.zeros(self.allocator.pool.max_rows, bool)
        ending[rows] = table.length[rows] == table.limit[rows]
        if ending.any():
            for group in list(self.scheduler.running):
                self._end_sequences(group, ending[group.rows])
        return True

    def _check(self) -> None:
        """Every slot of the pool is accounted for, by the allocator and in its summary."""
        self.allocator.check_integrity()
        usage = self.allocator.usage()
        total = usage.token_states + usage.vacant + usage.rounding + usage.free
        assert total == usage.num_slots, f"the parts sum to {total}, the pool has {usage.num_slots} slots"

    # -- planning ----------------------------------------------------------------------------------

    def _plan(self, decision: Decision) -> tuple[StepPlan, IntArray]:
        """The step's plan, and the row that each pick's token will be appended to."""
        table, allocator = self.table, self.allocator
        rows, num_new = np.concatenate(decision.rows), np.concatenate(decision.num_new)
        comes_later = num_new > 1  # decode rows first
        slots = np.concatenate(decision.slots)[np.argsort(np.repeat(comes_later, num_new), kind="stable")]
        order = np.argsort(comes_later, kind="stable")
        rows, num_new = rows[order], num_new[order]
        starts = table.computed[rows]
        positions = consecutive(starts, num_new)
        sample, rows_to_fill = self._sample_spec(decision, rows, starts + num_new == table.length[rows])
        paged = allocator.layout is Layout.PAGED
        plan = StepPlan(
            copies=decision.copies,
            late_copies=decision.late_copies,
            rows=rows,
            num_new=num_new,
            num_decode=int((num_new == 1).sum()),
            tokens=table.tokens[np.repeat(rows, num_new), positions],
            positions=positions,
            slots=slots,
            lengths=starts + num_new,
            sample=sample,
            block_tables=allocator.block_tables(rows) if paged else None,
            block_size=allocator.block_size,
            base_slots=None if paged else allocator.base_slots(rows),
        )
        return plan, rows_to_fill

    def _sample_spec(self, decision: Decision, rows: IntArray, ready: IntArray) -> tuple[SampleSpec, IntArray]:
        """Rows that have caught up yield a token each; a fresh prompt yields one for each of its sequences."""
        table = self.table
        picks = np.flatnonzero(ready & ~table.is_beam[rows])
        beams = np.flatnonzero(ready & table.is_beam[rows])
        to_fill = rows[picks]
        if decision.is_prefill:
            siblings = {int(group.rows[0]): group.rows for group in decision.groups}
            families = [siblings[int(row)] for row in to_fill]
            picks = np.repeat(picks, [len(family) for family in families])
            to_fill = np.concatenate([to_fill[:0], *families])
        spec = SampleSpec(
            rows=picks,
            temperature=table.temperature[to_fill],
            top_p=table.top_p[to_fill],
            uniforms=self._uniforms(to_fill),
            beam_rows=beams,
            num_candidates=max(
                (group.beam.num_candidates for group in decision.groups if group.beam is not None), default=0
            ),
        )
        return spec, to_fill

    def _uniforms(self, rows: IntArray) -> NDArray[np.float64]:
        """What decides the next token of each row; zeros where all of them are greedy."""
        table = self.table
        if not table.temperature[rows].any():
            return np.zeros(len(rows))
        return uniform(table.seed[rows], table.request_id[rows], table.member[rows], table.length[rows])

    # -- accepting ---------------------------------------------------------------------------------

    def _accept(self, decision: Decision, plan: StepPlan, rows_to_fill: IntArray, output: StepOutput) -> None:
        table = self.table
        if decision.is_prefill:  # a group's rows share the prompt that one of them computed
            for group, num_new in zip(decision.groups, decision.num_new, strict=True):
                table.computed[group.rows] = num_new[0]
        else:
            table.computed[plan.rows] = plan.lengths
        now = self.executor.now()
        advanced = np.zeros(self.allocator.pool.max_rows, bool)
        advanced[rows_to_fill] = advanced[plan.rows[plan.sample.beam_rows]] = True
        table.push(rows_to_fill, output.tokens)
        ended = table.length[rows_to_fill] == table.limit[rows_to_fill]
        ended |= table.stops_at_eos[rows_to_fill] & np.isin(output.tokens, self.eos)
        ending = np.zeros(self.allocator.pool.max_rows, bool)
        ending[rows_to_fill[ended]] = True
        beams = _BeamCandidates(plan, output)
        for group in decision.groups:
            if advanced[group.rows[0]]:
                group.token_times_s.append(now)
                if group.beam is not None:
                    self._advance_beams(group, *beams.of(group))
                elif ended.any():
                    self._end_sequences(group, ending[group.rows])

    def _advance_beams(self, group: Group, log_probs: FloatArray, token_ids: IntArray) -> None:
        table, beam, rows = self.table, group.beam, group.rows
        assert beam is not None
        generated = table.tokens[rows[: len(log_probs)], group.prompt_length : int(table.length[rows[0]])]
        parents, tokens = beam.advance(log_probs, token_ids, generated)
        if beam.done:
            for i, hypothesis in enumerate(beam.hypotheses):
                group.outputs[i] = hypothesis.tokens
                group.scores.append(hypothesis.score)
            self._end_sequences(group, np.ones(len(rows), bool))
            return
        if len(log_probs) == len(rows):  # otherwise the beams have just been born, all with the prompt
            self._reorder(group, parents)
        table.push(group.rows, tokens)

    def _reorder(self, group: Group, parents: IntArray) -> None:
        """Beam ``i`` continues old beam ``parents[i]``: a survivor keeps its row, its copies take dead rows."""
        survivors, first = np.unique(parents, return_index=True)
        dead = np.setdiff1d(group.rows, group.rows[survivors])
        rows = group.rows[parents]
        is_copy = np.ones(len(parents), bool)
        is_copy[first] = False
        rows[is_copy] = dead
        old, group.rows = group.rows, rows
        if len(dead):
            self.scheduler.release(dead)
            self.scheduler.fork(group, old[parents[is_copy]], dead)

    def _end_sequences(self, group: Group, which: NDArray[np.bool_]) -> None:
        """End the group's rows where ``which``, and the group with its last row."""
        table = self.table
        if not which.any():
            return
        rows, group.rows = group.rows[which], group.rows[~which]
        for row in rows:
            self.recorder.end_sequence(int(table.uid[row]), int(table.computed[row]))
            if group.beam is None:
                generated = table.tokens[row, group.prompt_length : table.length[row]]
                group.outputs[int(table.member[row])] = generated.astype(np.int64)
        self.scheduler.release(rows)
        table.release(rows)
        if len(group.rows) == 0:
            self.scheduler.retire(group)
            self._end(group)

    def _end(self, group: Group) -> None:
        group.finished_s = self.executor.now()
        self.recorder.end_group(group)
        self._on_finish(group)


class _BeamCandidates:
    """Finds each beam group's candidates in a step's output."""

    def __init__(self, plan: StepPlan, output: StepOutput) -> None:
        self._output = output
        self._index = {int(row): i for i, row in enumerate(plan.rows[plan.sample.beam_rows])}

    def of(self, group: Group) -> tuple[FloatArray, IntArray]:
        """Log probabilities and token ids, ``[beams, k]``: one beam after a fresh prompt, else all."""
        assert group.beam is not None
        where = [self._index[int(row)] for row in group.rows if int(row) in self._index]
        k = group.beam.num_candidates
        return self._output.log_probs[where, :k], self._output.token_ids[where, :k]
