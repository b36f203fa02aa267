"""From a configuration to a measured run."""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from inspect import isabstract
from types import ModuleType
from typing import Any

import torch
from hydra.errors import InstantiationException
from hydra.utils import get_class, instantiate

from kvbench import roofline_backend, torch_backend, workload
from kvbench.allocator import Allocator, AllocatorConfigError, Capability, Pool
from kvbench.backend import Backend
from kvbench.config import Config, Oversized, Preemption, Reservation
from kvbench.engine import Engine
from kvbench.errors import ConfigError
from kvbench.group import Group, Status
from kvbench.prefixes import Prefixes, resident
from kvbench.recorder import Recorder
from kvbench.request import Request
from kvbench.reservation import kv_tokens, reserved_tokens
from kvbench.scheduler import Scheduler
from kvbench.sequences import SequenceTable
from kvbench.sizing import available_bytes, parse_size
from kvbench.workload import Workload

_TRIAL_SLOTS = 2**20


def validate(cfg: Config) -> None:
    """Everything about ``cfg`` that can be wrong and be known without loading a model. Raises ConfigError."""
    if not cfg.results_dir:
        raise ConfigError("results_dir: an empty name; give a folder, absolute or relative to the working directory")
    for setting, value, least, most in (
        ("max_model_len", cfg.max_model_len, 2, math.inf),
        ("seed", cfg.seed, 0, math.inf),
        ("scheduler.max_num_seqs", cfg.scheduler.max_num_seqs, 1, 2**16),
        ("scheduler.max_batched_tokens", cfg.scheduler.max_batched_tokens, 1, math.inf),
    ):
        if not least <= value <= most:
            raise ConfigError(f"{setting}: {value} is not an integer from {least} to {most}")
    if cfg.scheduler.force_preemption_every in (1,) or cfg.scheduler.force_preemption_every < 0:
        raise ConfigError("scheduler.force_preemption_every: use 0 (never) or 2 and more")
    _backend(cfg).validate(cfg)
    workload.validate(cfg.workload)
    _validate_allocator(cfg)


def _validate_allocator(cfg: Config) -> None:
    kind = _allocator_class(cfg)
    swaps = Capability.SWAP in kind.supports
    if cfg.scheduler.preemption is Preemption.swap and not swaps:
        raise ConfigError(
            f"scheduler.preemption: allocator {cfg.allocator.name} cannot swap; use recompute or auto, "
            "or an allocator that can (paged_swap)"
        )
    host = parse_size(cfg.pool.host_size, "pool.host_size", available_bytes(torch.device("cpu")))
    if swaps and host == 0:
        raise ConfigError(f"pool.host_size: allocator {cfg.allocator.name} needs swap space; give it a size above 0")
    if parse_size(cfg.pool.size, "pool.size", 2**40) == 0:
        raise ConfigError("pool.size: the pool needs a size above 0")
    reserves = Capability.RESERVES_GROWTH in kind.supports and cfg.allocator.reservation is not Reservation.max
    if reserves and not cfg.workload.ignore_eos:
        raise ConfigError(
            f"allocator.reservation: {cfg.allocator.reservation.value} needs to know the true output lengths; "
            "set workload.ignore_eos=true or use allocator.reservation=max"
        )
    # A trial with a large pool, for the allocator's own options; the real pool's size depends on the model.
    _allocator(
        cfg,
        Pool(_TRIAL_SLOTS, max_rows=1, max_tokens=min(cfg.max_model_len, _TRIAL_SLOTS), num_host_slots=_TRIAL_SLOTS),
    )


@dataclass
class Job:
    """A run about to start. ``record`` holds what is known of it already, for ``run.json``."""

    engine: Engine
    recorder: Recorder
    groups: list[Group]
    backend: Backend
    record: dict[str, Any]


def build(cfg: Config, on_finish: Callable[[Group], None] = lambda group: None, drawn: Workload | None = None) -> Job:
    """Load the model, size the pool, draw the workload and wire the engine. Raises ConfigError.

    drawn: what to serve instead of drawing ``cfg.workload``.
    """
    backend = _backend(cfg).load(cfg)
    if cfg.max_model_len > backend.max_tokens:
        raise ConfigError(
            f"max_model_len: {cfg.max_model_len} exceeds the {backend.max_tokens} tokens of {backend.name}"
        )
    drawn = drawn or workload.build(
        cfg.workload,
        backend.tokenizer,
        vocab_size=backend.vocab_size,
        max_tokens=cfg.max_model_len,
        seed=cfg.seed,
    )
    prefixes = resident(drawn.requests, _allocator_class(cfg).supports)
    pool = _pool(cfg, backend, len(prefixes))
    allocator = _allocator(cfg, pool)
    remaining = _beside(cfg, pool, prefixes) if prefixes else allocator
    groups = [_group(cfg, remaining, request, backend) for request in drawn.requests]
    executor = backend.make(pool, allocator)
    table = SequenceTable(pool.max_rows, pool.max_tokens)
    scheduler = Scheduler(allocator, table, cfg.scheduler)
    recorder = Recorder(allocator, scheduler, table, keep_tokens=executor.draws_tokens)
    engine = Engine(scheduler, executor, recorder, eos=backend.eos, on_finish=on_finish, audit=cfg.debug.audit)
    record = backend.record | {
        "workload": drawn.provenance,
        "bytes_per_slot": backend.bytes_per_slot,
        "pool": asdict(pool),
        "block_size": allocator.block_size,
    }
    return Job(engine, recorder, groups, backend, record)


def _backend(cfg: Config) -> ModuleType:
    backends = {"torch": torch_backend, "roofline": roofline_backend}
    if cfg.executor.name not in backends:
        raise ConfigError(f"executor.name: {cfg.executor.name!r} is not one of {', '.join(backends)}")
    return backends[cfg.executor.name]


def _pool(cfg: Config, backend: Backend, num_prefixes: int) -> Pool:
    size = parse_size(cfg.pool.size, "pool.size", backend.device_bytes)
    host_size = parse_size(cfg.pool.host_size, "pool.host_size", backend.host_bytes)
    if size > backend.device_bytes:
        raise ConfigError(f"pool.size: {size:,} bytes asked for, {backend.device_bytes:,} are free beside the model")
    if Capability.SWAP not in _allocator_class(cfg).supports:
        host_size = 0
    host_available = backend.host_bytes - (size if backend.shares_memory else 0)
    if host_size > host_available:
        raise ConfigError(
            f"pool.host_size: {host_size:,} bytes asked for, {host_available:,} are free beside pool.size"
        )
    num_slots = size // backend.bytes_per_slot
    if num_slots == 0:
        raise ConfigError(f"pool.size: {size:,} bytes hold no token; one takes {backend.bytes_per_slot:,} bytes")
    return Pool(
        num_slots=num_slots,
        max_rows=cfg.scheduler.max_num_seqs + num_prefixes,
        max_tokens=cfg.max_model_len,
        num_host_slots=host_size // backend.bytes_per_slot,
    )


def _allocator_class(cfg: Config) -> type[Allocator]:
    target = cfg.allocator.make.get("_target_")
    try:
        kind = get_class(str(target))
    except Exception as error:  # whatever importing the user's module may raise
        raise ConfigError(f"allocator.make._target_: cannot import {target}: {error}") from None
    if not issubclass(kind, Allocator) or isabstract(kind):
        raise ConfigError(f"allocator.make._target_: {target} does not implement kvbench.allocator.Allocator")
    return kind


def _allocator(cfg: Config, pool: Pool) -> Allocator:
    try:
        return instantiate(cfg.allocator.make)(pool=pool)
    except AllocatorConfigError as error:
        raise ConfigError(str(error)) from error
    except (InstantiationException, TypeError) as error:
        raise ConfigError(f"allocator.make: {error.__cause__ or error}") from None


def _beside(cfg: Config, pool: Pool, prefixes: Prefixes) -> Allocator:
    """An allocator of what the resident prefixes and the watermark leave of the pool: what fits there fits a run
    that has nothing else to do, even when it is back from the host and shares nothing. Raises ConfigError.
    """
    trial = _allocator(cfg, pool)
    grants = [trial.allocate([i], len(p), max_tokens=len(p)) for i, p in enumerate(prefixes.values())]
    usage = trial.usage()
    left = usage.free - usage.withheld
    if None in grants or left < max(1, trial.block_size):
        tokens = sum(map(len, prefixes.values()))
        raise ConfigError(
            f"workload.prefix: {len(prefixes)} prefixes of {tokens:,} tokens in all leave no room in the pool of "
            f"{pool.num_slots:,} slots; lower workload.prefix.tokens or num_prefixes, or raise pool.size"
        )
    return _allocator(cfg, replace(pool, num_slots=left))


def _group(cfg: Config, allocator: Allocator, request: Request, backend: Backend) -> Group:
    reserves = Capability.RESERVES_GROWTH in allocator.supports
    need = kv_tokens(request)
    if reserves:
        need = reserved_tokens(cfg.allocator.reservation, request, cfg.max_model_len)
    group = Group(request, need, backend.beams(request) if request.sampling.mode == "beam" else None)
    count = request.num_sequences
    if count > cfg.scheduler.max_num_seqs:
        raise ConfigError(
            f"scheduler.max_num_seqs: {cfg.scheduler.max_num_seqs} is below the {count} sequences of a request"
        )
    if need > allocator.max_admissible_tokens(count):
        size = count * need * backend.bytes_per_slot
        beside = " beside the prefixes of workload.prefix" if resident([request], allocator.supports) else ""
        problem = (
            f"request {request.request_id} needs {count} x {need} slots ({size:,} bytes) under allocator "
            f"{cfg.allocator.name}, more than the {allocator.pool.num_slots:,} slots of the pool can hold{beside}"
        )
        if cfg.scheduler.oversized is Oversized.error:
            raise ConfigError(f"pool.size: {problem}; enlarge it or set scheduler.oversized=reject")
        group.status, group.error = Status.REJECTED, problem
    return group
