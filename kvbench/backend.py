"""What an executor brings along before there is a pool: a model, and the memory it leaves."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from kvbench.allocator import Allocator, Pool
from kvbench.beam import Beams
from kvbench.models import Tokenizer
from kvbench.plan import Executor
from kvbench.request import Request


@dataclass(frozen=True)
class Backend:
    """One way to execute steps, chosen by ``executor=...``.

    device: of the tensors; the CPU where there are none. tokenizer: None where tokens have no meaning.
    max_tokens: most tokens (prompt and output) of one sequence, by the model. eos: ids that end a sequence.
    device_bytes, host_bytes: memory free for the pool's tiers; shares_memory: both are the same memory.
    make: the executor for a pool. beams: the beam search of a request.
    record: what a run record says of all this, JSON types.
    """

    device: torch.device
    name: str
    tokenizer: Tokenizer | None
    vocab_size: int
    max_tokens: int
    eos: tuple[int, ...]
    bytes_per_slot: int
    device_bytes: int
    host_bytes: int
    shares_memory: bool
    make: Callable[[Pool, Allocator], Executor]
    beams: Callable[[Request], Beams]
    record: dict[str, Any]
