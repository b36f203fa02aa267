"""Serving a handful of requests on a model, and what ``transformers`` says the tokens should be."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig, PreTrainedModel

import kernels
from allocators.buddy import BuddyAllocator
from allocators.paged import PagedAllocator
from allocators.paged_prefix import PagedPrefixAllocator
from allocators.paged_swap import PagedSwapAllocator
from allocators.static import StaticAllocator
from kvbench.allocator import Allocator, Capability, Pool
from kvbench.beam import BeamSearch
from kvbench.config import Preemption, Prefill, Reservation, SchedulerConfig
from kvbench.engine import Engine
from kvbench.executors.inspection import inspect
from kvbench.executors.lean import use_lean_layers
from kvbench.executors.static_decode import Action, StaticDecode
from kvbench.executors.storage import KVStorage
from kvbench.executors.torch_executor import TorchExecutor
from kvbench.group import Group
from kvbench.recorder import Recorder
from kvbench.request import Request
from kvbench.reservation import kv_tokens, reserved_tokens
from kvbench.scheduler import Scheduler
from kvbench.sequences import SequenceTable
from tests.engine.tape import Tape

ALLOCATORS = {
    "static": (StaticAllocator, Reservation.max),
    "buddy_max": (BuddyAllocator, Reservation.max),
    "buddy_pow2": (BuddyAllocator, Reservation.pow2),
    "buddy_oracle": (BuddyAllocator, Reservation.oracle),
    "paged": (PagedAllocator, Reservation.max),
    "paged_swap": (PagedSwapAllocator, Reservation.max),
    "paged_prefix": (PagedPrefixAllocator, Reservation.max),
}


Record = Callable[[Action], Action]


def as_it_is(action: Action) -> Action:
    """Runs a step's operations one by one, on its fixed tensors."""
    return action


@dataclass
class Setting:
    """How a law's run differs from the default one. ``options`` go to the allocator's constructor."""

    allocator: str = "paged"
    num_slots: int = 4096
    num_host_slots: int = 4096
    max_tokens: int = 128
    max_rows: int = 64
    preemption: Preemption = Preemption.auto
    force_preemption_every: int = 0
    prefill: Prefill = Prefill.separate
    max_batched_tokens: int = 200
    implementation: str = "cpu"
    lean: bool = False
    record: Record | None = None  # decode on fixed tensors, in steps recorded by this
    options: dict[str, Any] | None = None


@dataclass
class Served:
    groups: list[Group]
    recorder: Recorder
    allocator: Allocator
    end_s: float


def serve(
    model: PreTrainedModel, requests: list[Request], setting: Setting, eos: tuple[int, ...] = (), audit: bool = True
) -> Served:
    """Run the real engine over ``requests``, auditing every slot at every step."""
    geometry = inspect(model)
    if setting.lean:
        model = copy.deepcopy(model)
        use_lean_layers(model)
    kind, policy = ALLOCATORS[setting.allocator]
    swaps = Capability.SWAP in kind.supports
    pool = Pool(setting.num_slots, setting.max_rows, setting.max_tokens, setting.num_host_slots if swaps else 0)
    allocator = kind(pool, **(setting.options or {}))
    operations = kernels.load(setting.implementation)
    storage = KVStorage(
        geometry,
        pool.num_slots,
        pool.num_host_slots,
        dtype=model.dtype,
        device=model.device,
        kernels=operations,
    )
    decode = static_decode(model, storage, allocator, setting.record) if setting.record else None
    executor = TorchExecutor(model, storage, operations, decode)
    table = SequenceTable(pool.max_rows, pool.max_tokens)
    config = SchedulerConfig(
        preemption=setting.preemption,
        force_preemption_every=setting.force_preemption_every,
        prefill=setting.prefill,
        max_batched_tokens=setting.max_batched_tokens,
    )
    scheduler = Scheduler(allocator, table, config)
    recorder = Recorder(allocator, scheduler, table)
    engine = Engine(scheduler, executor, recorder, eos=eos, audit=audit)
    groups = [make_group(request, allocator, policy, setting.max_tokens, eos) for request in requests]
    end_s = engine.run(groups)
    return Served(groups, recorder, allocator, end_s)


def static_decode(
    model: PreTrainedModel,
    storage: KVStorage,
    allocator: Allocator,
    record: Record,
) -> StaticDecode:
    return StaticDecode(
        model,
        storage.kv,
        record.kernels if isinstance(record, Tape) else storage.kernels,
        layout=allocator.layout,
        block_size=allocator.block_size,
        max_rows=allocator.pool.max_rows,
        max_tokens=allocator.pool.max_tokens,
        record=record,
    )


def make_group(request: Request, allocator: Allocator, policy: Reservation, limit: int, eos: tuple[int, ...]) -> Group:
    reserves = Capability.RESERVES_GROWTH in allocator.supports
    need = reserved_tokens(policy, request, limit) if reserves else kv_tokens(request)
    assert need <= allocator.max_admissible_tokens(request.num_sequences)
    sampling, beam = request.sampling, None
    if sampling.mode == "beam":
        beam = BeamSearch(
            sampling.beam_width,
            request.max_new_tokens,
            () if sampling.ignore_eos else eos,
            sampling.length_penalty,
            sampling.early_stopping,
        )
    return Group(request, need, beam)


@torch.inference_mode()
def generate(
    model: PreTrainedModel, request: Request, eos: tuple[int, ...] = ()
) -> tuple[list[list[int]], list[float]]:
    """What ``transformers`` generates for a greedy or beam request: token ids and, for beams, scores."""
    sampling = request.sampling
    width = sampling.beam_width if sampling.mode == "beam" else 1
    stops = list(eos) if eos and not sampling.ignore_eos else None
    model.set_attn_implementation("eager")
    model.generation_config = GenerationConfig()  # so that eos_token_id=None means none
    out = model.generate(
        torch.from_numpy(np.asarray(request.prompt, np.int64))[None],
        attention_mask=torch.ones(1, len(request.prompt), dtype=torch.long),
        generation_config=GenerationConfig(
            do_sample=False,
            num_beams=width,
            num_return_sequences=width,
            max_new_tokens=request.max_new_tokens,
            length_penalty=sampling.length_penalty,
            early_stopping=sampling.early_stopping,
            eos_token_id=stops,
            pad_token_id=0 if stops is None else stops[0],
            return_dict_in_generate=True,
            output_scores=True,
        ),
    )
    sequences = [row[len(request.prompt) :].tolist() for row in out.sequences]
    if stops is not None:
        sequences = [_cut(tokens, stops) for tokens in sequences]
    return sequences, out.sequences_scores.tolist() if width > 1 else []


def _cut(tokens: list[int], stops: list[int]) -> list[int]:
    ends = [i for i, token in enumerate(tokens) if token in stops]
    return tokens[: ends[0] + 1] if ends else tokens
