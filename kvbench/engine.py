"""The engine: admit, grow (preempt until it fits), copy, run, sample, retire, record."""

import math
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial

import numpy as np
from numpy.typing import NDArray

from kvbench.allocator import Allocator, IntArray
from kvbench.beam import Beams
from kvbench.decision import Decision
from kvbench.group import Group, Status
from kvbench.plan import Executor, StepOutput, StepPlan
from kvbench.planner import Planner
from kvbench.recorder import Recorder
from kvbench.scheduler import Scheduler
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
        self._planner = Planner(self.table, self.allocator, draws_tokens=executor.draws_tokens)
        self._placeholders = np.zeros(self.allocator.pool.max_tokens + 1, np.int64)
        self._can_leap = executor.foresee(1, 1, 1, 0.0) is not None

    def run(self, groups: Iterable[Group]) -> float:
        """Serve ``groups`` (sorted by arrival); returns the time at which the last one ended, in seconds."""
        arrivals = deque(groups)
        self._load_prefixes(arrivals)
        self.executor.start()
        while arrivals or self.scheduler.has_work:
            self._receive(arrivals)
            next_s = arrivals[0].request.arrival_s if arrivals else math.inf
            if not self.scheduler.has_work:
                if arrivals:
                    self.recorder.step(Decision(), self.executor.now(), "idle")
                    self.executor.wait_until(next_s)
            else:
                self._advance(next_s)
        end_s = self.executor.now()
        self._free_prefixes()
        return end_s

    def _load_prefixes(self, groups: Iterable[Group]) -> None:
        """Compute what prompts begin with, if the allocator can share it, before time starts."""
        for decision in self.scheduler.load_prefixes(group.request for group in groups):
            plan, _ = self._planner.plan(decision)
            self.executor.run(plan)
            self.table.computed[plan.rows] = plan.lengths

    def _free_prefixes(self) -> None:
        table, rows = self.table, self.scheduler.prefixes.rows
        for row in rows:
            self.recorder.end_sequence(int(table.uid[row]), int(table.computed[row]))
        self.scheduler.prefixes.free()

    def _receive(self, arrivals: deque[Group]) -> None:
        while arrivals and arrivals[0].request.arrival_s <= self.executor.now():
            group = arrivals.popleft()
            if group.status is Status.REJECTED:
                self._end(group)
            else:
                self.scheduler.add(group)

    def _advance(self, until_s: float) -> None:
        """Take the next step; or, where time is computed, all steps before ``until_s`` that need no decision."""
        start_s = self.executor.now()
        decision = self.scheduler.admit()
        if not (self._can_leap and self._leap(decision, until_s)):
            self.scheduler.complete(decision)
            self._step(decision, start_s)

    def _step(self, decision: Decision, start_s: float) -> None:
        if self._audit:
            self._check()
        step = self.recorder.step(decision, start_s, decision.kind)
        plan, rows_to_fill = self._planner.plan(decision)
        planned_s = self.executor.now()
        for group in decision.prefills:
            group.admitted_s = start_s if group.admitted_s is None else group.admitted_s
        output = self.executor.run(plan)
        self.recorder.timed(step, {"schedule": planned_s - start_s} | output.seconds)
        self._accept(decision, plan, rows_to_fill, output)

    def _leap(self, decision: Decision, until_s: float) -> bool:
        """Take at once all steps before ``until_s`` that need no decision but this, with the effect of taking them
        one by one. False, with nothing done, if the very next one needs more.
        """
        num_steps, num_tokens = self.scheduler.quiet_steps(decision)
        if not num_steps:
            return False
        rows = self.scheduler.running_rows
        foreseen = self.executor.foresee(len(rows), num_tokens, num_steps, until_s)
        assert foreseen is not None
        times, seconds = foreseen
        growth = self.allocator.grow(rows, len(seconds))
        if growth is None:
            return False
        count = growth.num_steps
        self.recorder.leap(growth, times[:count], seconds[:count], self.scheduler.stranded(growth))
        self.executor.wait_until(float(times[count]))
        self.scheduler.rounds.extend(times[1 : count + 1])
        ended = self.table.advance(rows, count)
        if self._audit:
            self._check()
        self._end_rows(self.scheduler.running, ended)
        return True

    def _check(self) -> None:
        """Every slot of the pool is accounted for, by the allocator and in its summary."""
        self.allocator.check_integrity()
        usage = self.allocator.usage()
        total = usage.token_states + usage.vacant + usage.rounding + usage.free
        assert total == usage.num_slots, f"the parts sum to {total}, the pool has {usage.num_slots} slots"

    # -- accepting ---------------------------------------------------------------------------------

    def _accept(self, decision: Decision, plan: StepPlan, rows_to_fill: IntArray, output: StepOutput) -> None:
        table = self.table
        table.computed[plan.rows] = plan.lengths
        now = np.array([self.executor.now()])
        ready = decision.decodes
        if decision.prefills:
            self._commit(decision.prefills)
            begun = self._ready(decision.prefills, plan, rows_to_fill)
            for group in begun:
                group.round_times_s.append(now)
            ready = ready + begun
        if decision.decodes:
            self.scheduler.rounds.extend(now)
        ended = table.push(rows_to_fill, output.tokens)
        if self.eos:
            ended |= table.stops_at_eos[rows_to_fill] & np.isin(output.tokens, self.eos)
        beams = [group for group in ready if group.beam is not None]
        self._end_rows(decision.groups, rows_to_fill[ended])
        if beams:
            self._advance_beams(beams, plan, output)

    def _commit(self, prefills: list[Group]) -> None:
        """The groups' prompts are computed: each by one of its rows, for all of them."""
        for group in prefills:
            if len(group.rows) > 1:
                self.table.computed[group.rows] = self.table.computed[group.rows[0]]
        self.scheduler.commit(prefills)

    @staticmethod
    def _ready(prefills: list[Group], plan: StepPlan, rows_to_fill: IntArray) -> list[Group]:
        """Those of the groups that yield tokens; others have more to catch up with."""
        ready = {*rows_to_fill.tolist(), *plan.rows[plan.sample.beam_rows].tolist()}
        return [group for group in prefills if group.rows.item(0) in ready]

    def _advance_beams(self, groups: list[Group], plan: StepPlan, output: StepOutput) -> None:
        """Choose the next beams of every group; those that are born in this step have one candidate row alone."""
        table, going, parents, tokens = self.table, [], [], []
        index = np.empty(self.allocator.pool.max_rows, np.int64)  # into the output, by row
        index[plan.rows[plan.sample.beam_rows]] = np.arange(len(plan.sample.beam_rows))
        for group in groups:
            beam, rows = group.beam, group.rows
            assert beam is not None
            start = int(index[rows[0]])  # a group's rows stand together
            is_born = table.length[rows[0]] == group.prompt_length
            own = slice(start, start + (1 if is_born else len(rows))), slice(beam.num_candidates)
            chosen = beam.advance(output.log_probs[own], output.token_ids[own], partial(self._generated, group))
            if beam.done:
                self._end_beams(group, beam)
            else:
                going.append(group)
                # Those that are born have rows that all hold the prompt, each its own.
                parents.append(np.arange(len(rows)) if is_born else chosen[0])
                tokens.append(chosen[1])
        if going:
            self._reorder(going, parents)
            table.push(np.concatenate([group.rows for group in going]), np.concatenate(tokens))

    def _generated(self, group: Group) -> NDArray[np.int32]:
        """Tokens that the group's rows, all of one length, have generated: ``[rows, num_new]``."""
        return self.table.tokens[group.rows, group.prompt_length : int(self.table.length[group.rows[0]])]

    def _end_beams(self, group: Group, beam: Beams) -> None:
        for i, hypothesis in enumerate(beam.hypotheses):
            group.outputs[i] = hypothesis.tokens
            group.scores.append(hypothesis.score)
        self._end_sequences(group, np.ones(len(group.rows), bool))

    def _reorder(self, groups: list[Group], parents: list[IntArray]) -> None:
        """Beam ``i`` of a group continues its old beam ``parents[i]``: a survivor keeps its row, its copies take
        dead rows. All groups at once.
        """
        old = np.concatenate([group.rows for group in groups])
        ends = np.cumsum([len(group.rows) for group in groups])
        starts = ends - [len(group.rows) for group in groups]
        continued = np.concatenate(parents) + np.repeat(starts, ends - starts)
        survivors, first = np.unique(continued, return_index=True)
        is_copy = np.ones(len(old), bool)
        is_copy[first] = False
        rows, dead = old[continued], np.delete(old, survivors)
        copied = rows[is_copy]
        rows[is_copy] = dead  # as many in each group, and in the groups' order
        for group, start, end in zip(groups, starts, ends, strict=True):
            group.rows = rows[start:end]
        self.scheduler.rows_changed()
        if len(dead):
            self.scheduler.release(dead)
            self.scheduler.fork(groups, copied, dead)

    def _end_rows(self, groups: Iterable[Group], rows: IntArray) -> None:
        """End the sequences on ``rows``, each of one of the ``groups``."""
        if len(rows):
            ending = set(rows.tolist())
            requests = set(self.table.request_id[rows].tolist())
            for group in [group for group in groups if group.request.request_id in requests]:
                self._end_sequences(group, np.array([row in ending for row in group.rows.tolist()]))

    def _end_sequences(self, group: Group, which: NDArray[np.bool_]) -> None:
        """End the group's rows where ``which``, and the group with its last row."""
        table = self.table
        rows, group.rows = group.rows[which], group.rows[~which]
        for row in rows.tolist():
            self.recorder.end_sequence(table.uid.item(row), table.computed.item(row))
            if group.beam is None:
                group.outputs[table.member.item(row)] = self._output(row, group.prompt_length)
        self.scheduler.release(rows)
        table.release(rows)
        if len(group.rows) == 0:
            self.scheduler.retire(group)
            self._end(group)

    def _output(self, row: int, prompt_length: int) -> IntArray:
        """What the row has generated, int64; placeholders share one array."""
        length = self.table.length.item(row)
        if not self.executor.draws_tokens:
            return self._placeholders[: length - prompt_length]
        return self.table.tokens[row, prompt_length:length].astype(np.int64)

    def _end(self, group: Group) -> None:
        group.finished_s = self.executor.now()
        self.recorder.end_group(group)
        self._on_finish(group)
