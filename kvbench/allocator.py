"""The interface every KV-cache allocator implements.

An allocator is bookkeeping only: it decides which slots of the pool hold which tokens. It never
sees a tensor, a kernel, a clock or a file. One *slot* holds one token's K and V over all layers.

Sequences are named by a **row**, a small dense integer that the engine hands out and recycles, so
that per-sequence state is numpy arrays indexed by row and a verb serves a whole batch at once.

Two outcomes only:

* ``None`` means "pool exhausted, nothing changed". It is an ordinary event that drives preemption.
* Misuse (a row that is unknown, busy or in the wrong tier, a verb outside ``supports``) raises
  :class:`AllocatorMisuse` and changes nothing.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from enum import Enum
from typing import ClassVar, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvbench.allocator_checks import AllocatorMisuse, ArgumentChecks, IntArray, as_indices


class AllocatorConfigError(ValueError):
    """The pool and the allocator's options cannot work together; the message names the setting."""


class Layout(Enum):
    """What a kernel must follow to read a sequence."""

    PAGED = "paged"  # a block table per row
    CONTIGUOUS = "contiguous"  # one base slot per row


class Capability(Enum):
    """What an allocator offers beyond the common verbs."""

    FORK_SHARES = "fork_shares"  # forked rows share storage until one of them writes
    SWAP = "swap"  # rows can move to the host tier and back
    PREFIX_CACHE = "prefix_cache"  # admissions start behind blocks whose content was computed before
    RESERVES_GROWTH = "reserves_growth"  # admission takes room for `max_tokens`; append cannot fail


class Tier(Enum):
    """Where slots live."""

    DEVICE = "device"
    HOST = "host"


@dataclass(frozen=True)
class Pool:
    """What an allocator has to manage.

    num_slots: slots on the device tier.
    num_host_slots: slots on the host tier (0: no swap space).
    max_rows: rows are ``0 <= row < max_rows``.
    max_tokens: the most tokens any row may hold (the model's limit).
    """

    num_slots: int
    max_rows: int
    max_tokens: int
    num_host_slots: int = 0


@dataclass(frozen=True)
class Copies:
    """Slot-range copies to run in order.

    ranges: int64 ``[n, 3]``, each row ``(source slot, destination slot, number of slots)``.
    """

    source: Tier
    destination: Tier
    ranges: IntArray


@dataclass(eq=False, slots=True)  # not frozen: that would double the time to make one
class Grant:
    """A verb succeeded.

    copies: move KV that the verb's effect depends on. Those of :meth:`Allocator.allocate` duplicate a
        prompt that is yet to be computed: they run once its KV is written. Copies of every other verb
        run before the next KV write.
    slots: int64 ``[new tokens]``, where to write the KV of the tokens that the verb added, row after
        row: of :meth:`Allocator.append` for every row, of :meth:`Allocator.allocate` for ``rows[0]``
        alone; empty for every other verb. Valid until the next verb on these rows.
    num_cached_tokens: leading tokens of an admitted prompt whose KV is there already. They are not new:
        they have no entry in ``slots``.
    """

    copies: tuple[Copies, ...] = ()
    slots: IntArray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    num_cached_tokens: int = 0

    @property
    def num_copied_slots(self) -> int:
        return sum(int(copies.ranges[:, 2].sum()) for copies in self.copies)


class Usage(NamedTuple):
    """The pool at this moment, in slots. ``token_states + vacant + rounding + free == num_slots``.

    token_states: slots holding the KV of a live token, shared slots counted once.
    vacant: held by a sequence and empty now (reservation or internal fragmentation: which of the
        two is known only at the sequence's end, see ``kvbench.accounting``).
    rounding: taken by the allocator's granularity, never handed to a sequence.
    free: held by nobody; ``withheld`` of them are kept back from admission (watermark).
    mapped: slots the rows hold if shared slots count once per row (``mapped == held`` unshared).
    host_held: slots held on the host tier.
    cached: the part of ``free`` that still holds KV which an admission may find (PREFIX_CACHE). Whoever
        needs slots gets them as if they were empty: the content is evicted then, not before.
    """

    num_slots: int
    token_states: int
    vacant: int
    rounding: int
    free: int
    withheld: int
    mapped: int
    host_held: int
    cached: int = 0

    @property
    def held(self) -> int:
        """Slots handed to sequences, shared slots counted once."""
        return self.token_states + self.vacant


class Growth(NamedTuple):
    """Decode steps taken at once: one token more for each of ``n`` rows in each of them.

    before: the pool before the first step. What it is after each follows from the slots ``taken``.
    taken: int64 ``[num_steps]``, slots that were free before and are held after each step.
    capacities: int64 ``[num_steps, n]``, of the rows that grew.
    """

    before: Usage
    taken: IntArray
    capacities: IntArray

    @property
    def num_steps(self) -> int:
        return len(self.taken)

    @property
    def free(self) -> IntArray:
        return self.before.free - self.taken


class Allocator(ArgumentChecks, ABC):
    """Verbs take row arrays (int64 ``[n]``, distinct unless said otherwise). See the module docs."""

    layout: ClassVar[Layout]
    supports: ClassVar[frozenset[Capability]]
    block_size: int = 0  # slots per block; 0 where the layout is CONTIGUOUS

    def __init__(self, pool: Pool) -> None:
        super().__init__(pool.max_rows, pool.max_tokens)
        self.pool = pool

    @abstractmethod
    def allocate(
        self, rows: ArrayLike, num_tokens: int, *, max_tokens: int, content: IntArray | None = None
    ) -> Grant | None:
        """Admit a group: all ``rows`` start with the same ``num_tokens`` prompt tokens (>= 1).

        With FORK_SHARES the rows share the prompt's slots; otherwise each gets a region of its own
        and the grant's copies replicate ``rows[0]``'s prompt, to run once it is written. The grant's
        slots are those of ``rows[0]``'s prompt.
        ``max_tokens``: the most tokens any of the rows will ever hold (``num_tokens <= max_tokens <=
        pool.max_tokens``); allocators with RESERVES_GROWTH take room for it now, others ignore it.
        ``content``: a key for each leading full block of the tokens, int64 ``[at most num_tokens //
        block_size]``; equal keys mean equal tokens from the first one to the block's end. Blocks without
        a key are never shared by content. With PREFIX_CACHE the rows take the longest run of leading
        blocks whose keys are known from commits (``Grant.num_cached_tokens``, less than ``num_tokens``, so
        that one token at least is computed); others ignore it.
        Keeps the watermark, unless no row is on the device. All or nothing. What was refused stays refused
        until rows are freed, swapped out or committed: appends and forks never make room.
        """

    def num_cached_tokens(self, num_tokens: int, content: IntArray) -> int:
        """What ``Grant.num_cached_tokens`` of such an :meth:`allocate` would be at this moment. Changes nothing."""
        return 0

    def commit(self, rows: ArrayLike) -> None:
        """The KV of every token that the rows hold is written: from now on admissions may find their blocks
        by the keys that :meth:`allocate` was given. A row that is freed before never offers anything. What is
        appended has no keys. PREFIX_CACHE only.
        """
        raise AllocatorMisuse(f"{type(self).__name__} keeps no content")

    @abstractmethod
    def append(self, rows: ArrayLike, num_tokens: ArrayLike = 1) -> Grant | None:
        """Slots for the next ``num_tokens`` (scalar or ``[n]``, >= 1) tokens of every row: ``Grant.slots``.

        A shared slot range is copied before it is written (copy-on-write); the last sharer writes
        in place. May use the watermark's slots. All or nothing over the batch. Misuse: a row that
        would outgrow its reservation (RESERVES_GROWTH) or ``pool.max_tokens``.
        """

    def grow(self, rows: IntArray, num_steps: int) -> Growth | None:
        """Up to ``num_steps`` appends of one token to every row, with the effect of calling :meth:`append`
        as often; stops before the first that would be refused, need a copy or be misuse. None: not even one.

        For time that is computed, where thousands of steps need no decision. Optional: an allocator that
        leaves it out is stepped one by one.
        """
        return None

    @abstractmethod
    def fork(self, parents: ArrayLike, children: ArrayLike) -> Grant | None:
        """``children[i]`` (free rows) continue the tokens of ``parents[i]`` (may repeat). All or nothing.

        With RESERVES_GROWTH a child reserves what its parent did. Needs no watermark.
        """

    @abstractmethod
    def free(self, rows: ArrayLike) -> None:
        """Release the rows, whichever tier they are on."""

    def swap_out(self, rows: ArrayLike) -> Grant | None:
        """Move everything the rows hold to the host tier; sharing among ``rows`` is kept."""
        raise AllocatorMisuse(f"{type(self).__name__} does not support swap")

    def swap_in(self, rows: ArrayLike) -> Grant | None:
        """Bring swapped rows back to the device tier; sharing among ``rows`` is kept.

        Keeps the watermark, like an admission, unless nothing else is on the device.
        """
        raise AllocatorMisuse(f"{type(self).__name__} does not support swap")

    @abstractmethod
    def slots(self, rows: ArrayLike, positions: ArrayLike) -> IntArray:
        """Slot of token ``positions[i]`` of ``rows[i]`` (rows may repeat): int64 ``[n]``.

        Raises on a position the row does not hold: an invalid slot never escapes.
        """

    def block_tables(self, rows: ArrayLike) -> NDArray[np.int32]:
        """PAGED only: int32 ``[n, max blocks over rows]``, in slots of ``block_size``; padded with 0."""
        raise AllocatorMisuse(f"{type(self).__name__} has no block tables")

    def base_slots(self, rows: ArrayLike) -> IntArray:
        """CONTIGUOUS only: slot of token 0 of each row, int64 ``[n]``."""
        raise AllocatorMisuse(f"{type(self).__name__} has no base slots")

    @abstractmethod
    def num_tokens(self, rows: ArrayLike) -> IntArray:
        """Tokens each row holds, int64 ``[n]`` (0 for a free row)."""

    @abstractmethod
    def capacity(self, rows: ArrayLike) -> IntArray:
        """Tokens each row could hold without asking for more, int64 ``[n]``.

        Vacant slots shared by several rows count for one of them only, so that on the device
        ``sum(capacity - num_tokens) == usage().vacant`` over all live rows. A row on the host tier
        cannot grow: its capacity is ``num_tokens``.
        """

    @abstractmethod
    def max_admissible_tokens(self, num_rows: int) -> int:
        """Most tokens each of ``num_rows`` rows of one group could reach in an empty pool.

        The engine rejects a request beyond it at arrival instead of letting it wait for ever.
        Assumes the worst case for sharing (rows share nothing). 0: such a group never fits.
        """

    @abstractmethod
    def usage(self) -> Usage:
        """Counters at this moment, O(1)."""

    @abstractmethod
    def check_integrity(self) -> None:
        """Audit slot by slot: AssertionError on a leak, a double owner or a miscount. Slow."""

    def _free_rows(self, rows: ArrayLike) -> IntArray:
        """Distinct rows that hold nothing on any tier."""
        rows = as_indices(rows)
        lengths = self.num_tokens(rows).tolist()
        if any(lengths):
            busy = [row for row, length in zip(rows.tolist(), lengths, strict=True) if length]
            raise AllocatorMisuse(f"rows {busy} are busy")
        self._check_distinct(rows)
        return rows


def consecutive(starts: IntArray, counts: IntArray) -> IntArray:
    """``starts[i], starts[i] + 1, ...``, ``counts[i]`` of them, one range after the other: int64 ``[sum]``."""
    ends = np.cumsum(counts)
    return np.repeat(starts - (ends - counts), counts) + np.arange(counts.sum())
