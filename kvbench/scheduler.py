"""Iteration-level scheduling: who runs in the next step, and who gives way.

First come, first served. A step is either a prefill of newly admitted groups or a decode of all
running ones; with ``prefill=mixed`` it is both at once, as in Orca (Yu et al., OSDI 2022), and the
running ones' growth goes first; who is swapped in beside them goes on with the next step. When the pool
is exhausted the latest arrival is preempted, by swap or by recompute, and nobody new is admitted while a
preempted group waits.
"""

import sys
from bisect import insort
from collections import deque
from collections.abc import Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

from kvbench.allocator import Allocator, Capability, Growth, IntArray
from kvbench.config import Batching, Preemption, Prefill, SchedulerConfig
from kvbench.content import block_keys
from kvbench.decision import Decision
from kvbench.group import Group, Status
from kvbench.prefixes import ResidentPrefixes, resident
from kvbench.refusal import Refusal
from kvbench.request import Request
from kvbench.rounds import Rounds
from kvbench.sequences import SequenceTable


class Scheduler:
    """Queues of groups over one allocator. ``running`` and ``preempted`` are in arrival order."""

    def __init__(self, allocator: Allocator, table: SequenceTable, config: SchedulerConfig) -> None:
        self.allocator = allocator
        self.table = table
        self.config = config
        self.waiting: deque[Group] = deque()
        self.running: list[Group] = []
        self.preempted: list[Group] = []
        self.rounds = Rounds()
        self.prefixes = ResidentPrefixes(allocator, table)
        self._swaps = Capability.SWAP in allocator.supports and config.preemption is not Preemption.recompute
        self._reserves = Capability.RESERVES_GROWTH in allocator.supports
        self._caches = Capability.PREFIX_CACHE in allocator.supports
        self._mixes = config.prefill is Prefill.mixed
        is_limited = config.batching is Batching.continuous
        self._max_batched_tokens = config.max_batched_tokens if is_limited else sys.maxsize
        self._granted = Decision()  # copies of forks made since the last step
        self._refusal = Refusal(allocator)
        self._running_rows: IntArray | None = None  # of the running groups, while nothing changes them
        self._decode_steps = 0

    def load_prefixes(self, requests: Iterable[Request]) -> Iterator[Decision]:
        """Place the prefixes of the requests to come, where the allocator can share them: a step for each."""
        for prefix_id, tokens in resident(requests, self.allocator.supports).items():
            row, grant = self.prefixes.add(prefix_id, tokens)
            decision = Decision(slots=[grant.slots])
            decision.run(row, np.array([len(tokens)]), len(tokens))
            yield decision

    def add(self, group: Group) -> None:
        if self._caches:
            group.content = block_keys(group.request, self.allocator.block_size)
        self.waiting.append(group)

    @property
    def num_queued(self) -> int:
        return len(self.waiting) + len(self.preempted)

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running or self.preempted)

    def admit(self) -> Decision:
        """Begin the next step; call only while ``has_work``. Whoever can come in does, for their prefill; where that
        shall not keep running groups from growing, only in :meth:`complete`.
        """
        decision, self._granted = self._granted, Decision()
        if not (self._mixes and self.running):
            self._bring_in(decision)
        elif self._is_queued:
            self._refusal.repeat(decision)
        return decision

    def complete(self, decision: Decision) -> None:
        """Have the step run something: where nobody came in, every running group decodes that slots suffice for."""
        while not decision.groups:
            if not self.running:
                raise RuntimeError("the queue's head does not fit an empty pool: it should have been rejected")
            self._force_preemption(decision)
            self._grow(decision)
            joins = self._mixes and not decision.refused and not decision.num_preemptions
            if joins or not decision.decodes:
                self._bring_in(decision)

    def commit(self, groups: list[Group]) -> None:
        """The KV of the groups' prompts is written; whoever was refused may find it."""
        if self._caches:
            self.allocator.commit(np.concatenate([group.rows for group in groups]))
            self._refusal.lift()

    def fork(self, groups: list[Group], parents: IntArray, children: IntArray) -> None:
        """``children`` continue ``parents``, rows of the groups; a group that the pool has no room for starts over."""
        self.table.copy(parents, children)
        grant = self.allocator.fork(parents, children)
        if grant is not None:
            self._granted.take(grant, "fork")
            return
        for group in groups:
            own = np.isin(children, group.rows)
            if own.any():
                self._fork_or_drop(group, parents[own], children[own])

    def _fork_or_drop(self, group: Group, parents: IntArray, children: IntArray) -> None:
        grant = self.allocator.fork(parents, children)
        if grant is not None:
            self._granted.take(grant, "fork")
            return
        self.release(np.setdiff1d(group.rows, children))
        self._drop_kv(group, self._granted)

    def release(self, rows: IntArray) -> None:
        """Free the rows in the pool; whoever was refused may ask again."""
        self.allocator.free(rows)
        self._refusal.lift()
        self.rows_changed()

    def retire(self, group: Group) -> None:
        self._leave(group, Status.FINISHED)

    @property
    def running_rows(self) -> IntArray:
        """Rows of all running groups, in arrival order."""
        if self._running_rows is None:
            rows = [group.rows for group in self.running]
            self._running_rows = np.concatenate(rows) if rows else np.empty(0, np.int64)
        return self._running_rows

    @property
    def held_rows(self) -> IntArray:
        """Rows on the device: of the running groups, then of the prefixes."""
        prefixes = self.prefixes.rows
        return np.concatenate([self.running_rows, prefixes]) if len(prefixes) else self.running_rows

    def rows_changed(self) -> None:
        """The rows of a running group are others, or in another order."""
        self._running_rows = None

    def quiet_steps(self, decision: Decision) -> tuple[int, int]:
        """Decode steps ahead, the one that ``decision`` begins first, that need no other decision, as long as the
        pool holds out and nobody arrives; and the tokens of the running rows now.

        They end with the one that ends a sequence. (0, 0): the step does more than decode, or beams, EOS, catching
        up, or a preemption by force could intervene.
        """
        does_more = decision.groups or decision.copies or decision.num_preemptions or self._may_ask
        if does_more or not self.running or self.config.force_preemption_every:
            return 0, 0
        return self.table.quiet_steps(self.running_rows)

    def stranded(self, growth: Growth) -> NDArray[np.bool_] | None:
        """For each of steps taken at once, whether the queue's head, which stood refused, was stranded as it began.

        None: nobody stood refused.
        """
        return self._refusal.stranded(growth) if self._refusal.stands and self._is_queued else None

    # -- admission ---------------------------------------------------------------------------------

    @property
    def _is_queued(self) -> bool:
        """Whether somebody would come in if there were room."""
        return bool(self.preempted or (self.waiting and not self._batch_is_closed))

    @property
    def _batch_is_closed(self) -> bool:
        return self.config.batching is Batching.static and bool(self.running)

    @property
    def _may_ask(self) -> bool:
        """Whether the queue's head could come in, for all that is known."""
        if self._refusal.stands or not self._is_queued:
            return False
        return bool(self.preempted) or self.table.num_free >= self.waiting[0].request.num_sequences

    def _bring_in(self, decision: Decision) -> None:
        self._resume(decision)
        if not self.preempted:
            self._admit(decision)

    def _resume(self, decision: Decision) -> None:
        """Bring preempted groups back, oldest first, until one does not fit."""
        while self.preempted and not self._refusal.repeat(decision):
            group = self.preempted[0]
            if group.status is Status.SWAPPED:
                grant = self.allocator.swap_in(group.rows)
                if grant is None:
                    return self._refusal.note(decision, int(self.table.computed[group.rows].sum()))
                decision.take(grant, "swap_in")
                group.num_swapped_slots += grant.num_copied_slots
            elif not self._start(group, decision):
                return None
            self.preempted.pop(0)
            self._run(group, decision)
        return None

    def _admit(self, decision: Decision) -> None:
        if self._batch_is_closed:
            return
        while self.waiting and not self._refusal.repeat(decision):
            group = self.waiting[0]
            if self.table.num_free < group.request.num_sequences:
                return
            group.rows = self.table.acquire(group.request)
            if not self._start(group, decision):
                self.table.release(group.rows)
                group.rows = group.rows[:0]
                return
            self.waiting.popleft()
            self._run(group, decision)

    def _start(self, group: Group, decision: Decision) -> bool:
        """Place a group's tokens (a fresh prompt, or a recomputation) and plan the prefill of what is not cached.

        Several sequences share one prefill of the prompt; what they have generated since is caught up
        by the next decode step, whose rows may bring several tokens each.
        """
        rows = group.rows
        num_tokens = int(self.table.length[rows[0]]) if len(rows) == 1 else group.prompt_length
        num_resident = num_cached = self.prefixes.num_cached(group.request)
        if group.content is not None:
            num_cached = self.allocator.num_cached_tokens(num_tokens, group.content)
        num_new = num_tokens - num_cached
        if decision.prefills and decision.num_new_tokens + num_new > self._max_batched_tokens:
            return False
        if num_resident:
            grant = self.prefixes.extend(group.request, rows, num_new)
        else:
            grant = self.allocator.allocate(rows, num_tokens, max_tokens=group.max_tokens, content=group.content)
        if grant is None:
            # Beside the new tokens: those of a resident prefix in a partly filled block, and any found elsewhere,
            # whose blocks may count as free.
            asked = num_tokens - num_resident + num_resident % (self.allocator.block_size or 1)
            self._refusal.note(decision, len(rows) * group.max_tokens if self._reserves else asked)
            return False
        # A prefix was computed before; the copy of its last block is written to in this step.
        decision.take(grant, "cow" if num_resident else "prompt", late=not num_resident)
        decision.run(rows[:1], np.array([num_new]), num_new)
        decision.prefills.append(group)
        self.table.computed[rows] = num_cached
        if not group.num_preemptions:
            group.num_cached_tokens = num_cached
        else:
            again = group.num_lost_tokens - len(rows) * num_cached
            group.num_recomputed_tokens += again
            decision.num_recomputed_tokens += again
        return True

    def _run(self, group: Group, decision: Decision) -> None:
        """The group runs from this step on, in whose decode, if it has one already, it takes no part."""
        group.status = Status.RUNNING
        group.first_round = len(self.rounds) + bool(decision.decodes)
        insort(self.running, group, key=_arrival)
        self.rows_changed()

    # -- growth and preemption ---------------------------------------------------------------------

    def _grow(self, decision: Decision) -> None:
        """Slots for the next token of every running sequence; the latest arrivals yield until it fits."""
        while self.running:
            rows = self.running_rows
            num_new = self.table.pending(rows)
            grant = self.allocator.append(rows, num_new)
            if grant is not None:
                decision.take(grant, "cow")
                decision.run(rows, num_new, int(num_new.sum()))
                decision.decodes += self.running
                return
            if len(self.running) == 1:
                raise RuntimeError("one group does not fit the empty pool: it should have been rejected at arrival")
            self._preempt(self.running[-1], decision)

    def _force_preemption(self, decision: Decision) -> None:
        every = self.config.force_preemption_every
        if every and self.running:
            self._decode_steps += 1
            if self._decode_steps % every == 0:  # in turn, latest arrival first
                turn = self._decode_steps // every - 1
                self._preempt(self.running[-1 - turn % len(self.running)], decision)

    def _preempt(self, group: Group, decision: Decision) -> None:
        grant = self.allocator.swap_out(group.rows) if self._swaps else None
        if grant is None:  # by choice, or because the host tier is full
            self.release(group.rows)
            self._drop_kv(group, decision)
            return
        self._refusal.lift()
        decision.take(grant, "swap_out")
        group.num_swapped_slots += grant.num_copied_slots
        self._stop(group, Status.SWAPPED, decision)

    def _drop_kv(self, group: Group, decision: Decision) -> None:
        group.num_lost_tokens = int(self.table.computed[group.rows].sum())
        self.table.computed[group.rows] = 0
        self._stop(group, Status.PREEMPTED, decision)

    def _stop(self, group: Group, status: Status, decision: Decision) -> None:
        self._leave(group, status)
        group.num_preemptions += 1
        decision.num_preemptions += 1
        insort(self.preempted, group, key=_arrival)

    def _leave(self, group: Group, status: Status) -> None:
        """The group runs no more."""
        group.status = status
        group.round_times_s.append(self.rounds.since(group.first_round))
        self.running.remove(group)
        self.rows_changed()


def _arrival(group: Group) -> tuple[float, int]:
    return group.request.arrival_s, group.request.request_id
