"""From a configuration to a measured run."""

import math
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from inspect import isabstract
from typing import Any

import torch
from hydra.errors import InstantiationException
from hydra.utils import get_class, instantiate
from transformers import PreTrainedModel

import kernels
from kvbench import models, workload
from kvbench.allocator import Allocator, AllocatorConfigError, Capability, Pool
from kvbench.attention_kernel import settings
from kvbench.beam import BeamSearch
from kvbench.config import Config, DeviceKind, Dtype, Layers, Linear, Oversized, Preemption, Reservation
from kvbench.engine import Engine
from kvbench.errors import ConfigError
from kvbench.executors import inspection, lean
from kvbench.executors.packing import OneDNNLinear, PanelLinear, has_bfloat16, pack_linears
from kvbench.executors.storage import KVStorage
from kvbench.executors.torch_executor import TorchExecutor
from kvbench.group import Group, Status
from kvbench.recorder import Recorder
from kvbench.request import Request
from kvbench.reservation import kv_tokens, reserved_tokens
from kvbench.scheduler import Scheduler
from kvbench.sequences import SequenceTable
from kvbench.sizing import available_bytes, parse_size

_TRIAL_SLOTS = 2**20


def validate(cfg: Config) -> None:
    """Everything about ``cfg`` that can be wrong and be known without loading a model. Raises ConfigError."""
    if not cfg.results_dir:
        raise ConfigError("results_dir: an empty name; give a folder, absolute or relative to the working directory")
    if cfg.executor.kernels not in ("auto", *kernels.IMPLEMENTATIONS):
        legal = ", ".join(("auto", *kernels.IMPLEMENTATIONS))
        raise ConfigError(f"executor.kernels: {cfg.executor.kernels!r} is not one of {legal}")
    for setting, value, least, most in (
        ("max_model_len", cfg.max_model_len, 2, math.inf),
        ("seed", cfg.seed, 0, math.inf),
        ("scheduler.max_num_seqs", cfg.scheduler.max_num_seqs, 1, 2**16),
        ("scheduler.max_batched_tokens", cfg.scheduler.max_batched_tokens, 1, math.inf),
        ("device.num_threads", cfg.device.num_threads, 0, os.cpu_count() or 1),
    ):
        if not least <= value <= most:
            raise ConfigError(f"{setting}: {value} is not an integer from {least} to {most}")
    if cfg.scheduler.force_preemption_every in (1,) or cfg.scheduler.force_preemption_every < 0:
        raise ConfigError("scheduler.force_preemption_every: use 0 (never) or 2 and more")
    _layers(cfg, _linear(cfg, choose_device(cfg.device.name)), obstacle=None)
    workload.validate(cfg.workload)
    _validate_allocator(cfg)
    if cfg.attention is not None:
        settings.validate(cfg.attention, choose_device(cfg.device.name).type)


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


def choose_device(kind: DeviceKind) -> torch.device:
    """``auto`` is CUDA where there is a device. Raises ConfigError where ``cuda`` cannot be had."""
    if kind is DeviceKind.cuda and not torch.cuda.is_available():
        raise ConfigError("device: cuda was asked for and no CUDA device is available; use device=cpu or auto")
    use_cuda = kind is not DeviceKind.cpu and torch.cuda.is_available()
    return torch.device("cuda" if use_cuda else "cpu")


def load_kernels(name: str, device: torch.device) -> tuple[str, kernels.Kernels]:
    """The implementation called ``name`` (``auto``: the device's own), under its own name. Raises ConfigError."""
    if name == "auto":
        name = "triton" if device.type == "cuda" else "cpu"
    try:
        return name, kernels.load(name)
    except kernels.KernelsUnavailable as error:
        raise ConfigError(f"executor.kernels: {error}; use auto") from None


@dataclass
class Job:
    """A run about to start. ``record`` holds what is known of it already, for ``run.json``."""

    engine: Engine
    recorder: Recorder
    groups: list[Group]
    device: torch.device
    bytes_per_slot: int
    record: dict[str, Any]


def build(cfg: Config, on_finish: Callable[[Group], None] = lambda group: None) -> Job:
    """Load the model, size the pool, draw the workload and wire the engine. Raises ConfigError."""
    device = choose_device(cfg.device.name)
    if cfg.device.num_threads:
        torch.set_num_threads(cfg.device.num_threads)
    dtype = models.parse_dtype(cfg.dtype.value)
    loaded = models.load(cfg.model, dtype)
    if cfg.max_model_len > loaded.max_tokens:
        raise ConfigError(f"max_model_len: {cfg.max_model_len} exceeds the {loaded.max_tokens} tokens of {loaded.name}")
    model: PreTrainedModel = loaded.model.to(device)  # type: ignore[arg-type]
    geometry = inspection.inspect(model)
    linear = _linear(cfg, device)
    layers = _layers(cfg, linear, lean.obstacle(model))
    if layers is Layers.lean:
        lean.use_lean_layers(model)
    if linear is not Linear.torch:
        pack_linears(model, PanelLinear if linear is Linear.panels else OneDNNLinear)
    bytes_per_slot = geometry.bytes_per_slot(dtype)
    requests = workload.build(
        cfg.workload,
        loaded.tokenizer,
        vocab_size=model.config.get_text_config().vocab_size,
        max_tokens=cfg.max_model_len,
        seed=cfg.seed,
    )
    pool = _pool(cfg, device, bytes_per_slot)
    allocator = _allocator(cfg, pool)
    eos = _eos(model)
    groups = [_group(cfg, allocator, request, eos, bytes_per_slot) for request in requests]
    implementation, operations = load_kernels(cfg.executor.kernels, device)
    storage = KVStorage(geometry, pool.num_slots, pool.num_host_slots, dtype=dtype, device=device, kernels=operations)
    executor = TorchExecutor(model, storage, operations)
    executor.warm_up(allocator.layout, allocator.block_size)
    table = SequenceTable(pool.max_rows, pool.max_tokens)
    scheduler = Scheduler(allocator, table, cfg.scheduler)
    recorder = Recorder(allocator, scheduler, table)
    engine = Engine(scheduler, executor, recorder, eos=eos, on_finish=on_finish, audit=cfg.debug.audit)
    record = {
        "model": loaded.provenance,
        "kernels": implementation,
        "linear": linear.value,
        "layers": layers.value,
        "geometry": asdict(geometry),
        "bytes_per_slot": bytes_per_slot,
        "pool": asdict(pool),
        "block_size": allocator.block_size,
    }
    return Job(engine, recorder, groups, device, bytes_per_slot, record)


def _linear(cfg: Config, device: torch.device) -> Linear:
    """How linear layers are computed. ``auto``: by what is fastest (``tests/benchmarks/linear.py``).

    On the CPU that is oneDNN for bfloat16 where the processor multiplies it, our panels otherwise.
    """
    can_pack = device.type == "cpu" and cfg.dtype is not Dtype.float16
    chosen = cfg.executor.linear
    if chosen is Linear.auto:
        if not can_pack:
            return Linear.torch
        return Linear.packed if cfg.dtype is Dtype.bfloat16 and has_bfloat16() else Linear.panels
    if chosen is not Linear.torch and not can_pack:
        raise ConfigError(
            f"executor.linear: {chosen.value} needs device=cpu and dtype=float32 or bfloat16; use auto or torch"
        )
    return chosen


def _layers(cfg: Config, linear: Linear, obstacle: str | None) -> Layers:
    """How decoder layers are computed; ``obstacle``: what stands in the way of lean ones in the model itself."""
    chosen = cfg.executor.layers
    if linear is not Linear.panels:
        obstacle = f"linear layers are {linear.value}, not panels (executor.linear)"
    if chosen is Layers.lean and obstacle:
        raise ConfigError(f"executor.layers: lean cannot be had: {obstacle}; use auto or model")
    if chosen is Layers.auto:
        return Layers.model if obstacle else Layers.lean
    return chosen


def _pool(cfg: Config, device: torch.device, bytes_per_slot: int) -> Pool:
    size = parse_size(cfg.pool.size, "pool.size", available_bytes(device))
    host_size = parse_size(cfg.pool.host_size, "pool.host_size", available_bytes(torch.device("cpu")))
    if size > available_bytes(device):
        raise ConfigError(f"pool.size: {size:,} bytes asked for, {available_bytes(device):,} are free")
    if Capability.SWAP not in _allocator_class(cfg).supports:
        host_size = 0
    host_available = available_bytes(torch.device("cpu")) - (size if device.type == "cpu" else 0)
    if host_size > host_available:
        raise ConfigError(
            f"pool.host_size: {host_size:,} bytes asked for, {host_available:,} are free beside pool.size"
        )
    num_slots = size // bytes_per_slot
    if num_slots == 0:
        raise ConfigError(f"pool.size: {size:,} bytes hold no token; one takes {bytes_per_slot:,} bytes")
    return Pool(
        num_slots=num_slots,
        max_rows=cfg.scheduler.max_num_seqs,
        max_tokens=cfg.max_model_len,
        num_host_slots=host_size // bytes_per_slot,
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


def _group(cfg: Config, allocator: Allocator, request: Request, eos: tuple[int, ...], bytes_per_slot: int) -> Group:
    reserves = Capability.RESERVES_GROWTH in allocator.supports
    need = kv_tokens(request)
    if reserves:
        need = reserved_tokens(cfg.allocator.reservation, request, cfg.max_model_len)
    sampling = request.sampling
    beam = None
    if sampling.mode == "beam":
        beam = BeamSearch(
            sampling.beam_width,
            request.max_new_tokens,
            () if sampling.ignore_eos else eos,
            sampling.length_penalty,
            sampling.early_stopping,
        )
    group = Group(request, need, beam)
    count = request.num_sequences
    if count > cfg.scheduler.max_num_seqs:
        raise ConfigError(
            f"scheduler.max_num_seqs: {cfg.scheduler.max_num_seqs} is below the {count} sequences of a request"
        )
    if need > allocator.max_admissible_tokens(count):
        problem = (
            f"request {request.request_id} needs {count} x {need} slots ({count * need * bytes_per_slot:,} bytes) "
            f"under allocator {cfg.allocator.name}, more than the pool of {allocator.pool.num_slots:,} slots can hold"
        )
        if cfg.scheduler.oversized is Oversized.error:
            raise ConfigError(f"pool.size: {problem}; enlarge it or set scheduler.oversized=reject")
        group.status, group.error = Status.REJECTED, problem
    return group


def _eos(model: Any) -> tuple[int, ...]:
    ids = model.generation_config.eos_token_id
    if ids is None:
        ids = model.config.get_text_config().eos_token_id
    return () if ids is None else (ids,) if isinstance(ids, int) else tuple(ids)
