"""A request in flight: its sequences are admitted, preempted and resumed together."""

from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from kvbench.allocator import IntArray
from kvbench.beam import Beams
from kvbench.plan import Seconds
from kvbench.request import Request


class Status(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"  # KV dropped, to be recomputed
    SWAPPED = "swapped"  # KV on the host tier
    FINISHED = "finished"
    REJECTED = "rejected"


@dataclass(eq=False, slots=True)
class Group:
    """One request's sequences and what happened to them.

    max_tokens: the reservation, in tokens whose KV a sequence may hold.
    rows: live rows; for beam search ``rows[i]`` holds the beam with the ``i``-th best score.
    outputs: generated token ids of each finished sequence (its index in the request) or of each beam
        hypothesis, best first; scores: of the hypotheses.
    content: keys of the prompt's full blocks, for an allocator that finds them by content.
    num_cached_tokens: tokens of the prompt whose KV was in the pool when the group was first admitted.
    num_lost_tokens: tokens whose KV was dropped and is yet to be computed again.
    first_round: number of the first decode step since the group last began to run.
    round_times_s: when each step that gave the group a token per sequence returned, in pieces; those of its decode
        steps are added when it stops running.
    """

    request: Request
    max_tokens: int
    beam: Beams | None = None
    status: Status = Status.WAITING
    rows: IntArray = field(default_factory=lambda: np.empty(0, np.int64))
    outputs: dict[int, IntArray] = field(default_factory=dict)
    scores: list[float] = field(default_factory=list)
    content: IntArray | None = None
    admitted_s: float | None = None
    first_round: int = 0
    round_times_s: list[Seconds] = field(default_factory=list)
    finished_s: float | None = None
    error: str | None = None
    num_cached_tokens: int = 0
    num_lost_tokens: int = 0
    num_preemptions: int = 0
    num_recomputed_tokens: int = 0
    num_swapped_slots: int = 0

    @property
    def token_times_s(self) -> Seconds:
        """When each token of a sequence came (the first one: time to first token); call when the group has ended."""
        return np.concatenate([np.empty(0), *self.round_times_s])

    @property
    def prompt_length(self) -> int:
        return len(self.request.prompt)
