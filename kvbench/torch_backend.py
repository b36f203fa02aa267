"""``executor=torch``: a real model, a real pool and kernels."""

import os
from dataclasses import asdict
from typing import Any, TypeVar

import torch
from transformers import PreTrainedModel

import kernels
from kvbench import models
from kvbench.allocator import Allocator, Pool
from kvbench.backend import Backend
from kvbench.beam import BeamSearch
from kvbench.config import Config, Decode, DeviceKind, Dtype, Layers, Linear
from kvbench.errors import ConfigError
from kvbench.executors import inspection, lean
from kvbench.executors.packing import OneDNNLinear, PanelLinear, has_bfloat16, pack_linears
from kvbench.executors.static_decode import CudaGraphs, StaticDecode
from kvbench.executors.storage import KVStorage
from kvbench.executors.torch_executor import TorchExecutor
from kvbench.request import Request
from kvbench.sizing import available_bytes

Choice = TypeVar("Choice", Layers, Decode)


def validate(cfg: Config) -> None:
    """What is wrong with the settings of this executor alone. Raises ConfigError."""
    if cfg.device.profile is not None:
        raise ConfigError(
            f"device: {cfg.device.name} is a profile for executor=roofline; executor=torch takes auto, cpu or cuda"
        )
    if cfg.executor.kernels not in ("auto", *kernels.IMPLEMENTATIONS):
        legal = ", ".join(("auto", *kernels.IMPLEMENTATIONS))
        raise ConfigError(f"executor.kernels: {cfg.executor.kernels!r} is not one of {legal}")
    if not 0 <= cfg.device.num_threads <= (os.cpu_count() or 1):
        raise ConfigError(
            f"device.num_threads: {cfg.device.num_threads} is not an integer from 0 to {os.cpu_count() or 1}"
        )
    if cfg.workload.recording is not None:
        raise ConfigError("workload.recording: must be null with executor=torch, whose beams are searched for")
    if cfg.model.source == models.GEOMETRY:
        raise ConfigError(f"model: {cfg.model.name} is a shape without weights; use it with executor=roofline")
    device = choose_device(cfg.device.name)
    _layers(cfg, _linear(cfg, device), obstacle=None)
    _decode(cfg, device)


def load(cfg: Config) -> Backend:
    """Load the model and prepare its layers. Raises ConfigError."""
    device = choose_device(cfg.device.name)
    if cfg.device.num_threads:
        torch.set_num_threads(cfg.device.num_threads)
    dtype = models.parse_dtype(cfg.dtype.value)
    loaded = models.load(cfg.model, dtype)
    if loaded.tokenizer is None:
        raise ConfigError("workload.prompts: this model has no tokenizer; give model.path one that has")
    model: PreTrainedModel = loaded.model.to(device)  # type: ignore[arg-type]
    geometry = inspection.inspect(model)
    linear = _linear(cfg, device)
    layers = _layers(cfg, linear, lean.obstacle(model))
    if layers is Layers.lean:
        lean.use_lean_layers(model)
    if linear is not Linear.torch:
        pack_linears(model, PanelLinear if linear is Linear.panels else OneDNNLinear)
    decode = _decode(cfg, device)
    implementation, operations = load_kernels(cfg.executor.kernels, device)

    def make(pool: Pool, allocator: Allocator) -> TorchExecutor:
        storage = KVStorage(
            geometry, pool.num_slots, pool.num_host_slots, dtype=dtype, device=device, kernels=operations
        )
        static = _record(model, storage, pool, allocator) if decode is Decode.graphs else None
        executor = TorchExecutor(model, storage, operations, static)
        executor.warm_up(allocator.layout, allocator.block_size)
        return executor

    eos = _eos(model)

    def beams(request: Request) -> BeamSearch:
        sampling = request.sampling
        stops = () if sampling.ignore_eos else eos
        return BeamSearch(
            sampling.beam_width, request.max_new_tokens, stops, sampling.length_penalty, sampling.early_stopping
        )

    return Backend(
        device=device,
        name=loaded.name,
        tokenizer=loaded.tokenizer,
        vocab_size=model.config.get_text_config().vocab_size,
        max_tokens=loaded.max_tokens,
        eos=eos,
        bytes_per_slot=geometry.bytes_per_slot(dtype),
        device_bytes=available_bytes(device),
        host_bytes=available_bytes(torch.device("cpu")),
        shares_memory=device.type == "cpu",
        make=make,
        beams=beams,
        record={
            "model": loaded.provenance,
            "kernels": implementation,
            "linear": linear.value,
            "layers": layers.value,
            "decode": decode.value,
            "geometry": asdict(geometry),
        },
    )


def choose_device(name: str) -> torch.device:
    """``auto`` is CUDA where there is a device. Raises ConfigError where ``cuda`` cannot be had."""
    try:
        kind = DeviceKind(name)
    except ValueError:
        raise ConfigError(f"device.name: {name!r} is not one of {', '.join(k.value for k in DeviceKind)}") from None
    if kind is DeviceKind.cuda and not torch.cuda.is_available():
        raise ConfigError("device: cuda was asked for and no CUDA device is available; use device=cpu or auto")
    use_cuda = kind is not DeviceKind.cpu and torch.cuda.is_available()
    return torch.device("cuda" if use_cuda else "cpu")


def load_kernels(name: str, device: torch.device) -> tuple[str, kernels.Kernels]:
    """The implementation called ``name`` (``auto``: the device's own), under its own name. Raises ConfigError."""
    name = _kernels_name(name, device)
    try:
        return name, kernels.load(name)
    except kernels.KernelsUnavailable as error:
        raise ConfigError(f"executor.kernels: {error}; use auto") from None


def _kernels_name(name: str, device: torch.device) -> str:
    if name != "auto":
        return name
    return "triton" if device.type == "cuda" else "cpu"


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
    return _unless(obstacle, "layers", chosen, Layers.lean, Layers.model)


def _decode(cfg: Config, device: torch.device) -> Decode:
    """How the kernels of decode steps are issued. Raises ConfigError where that cannot be had."""
    chosen, implementation = cfg.executor.decode, _kernels_name(cfg.executor.kernels, device)
    obstacle = None
    if device.type != "cuda":
        obstacle = f"the device is {device.type}, not cuda (device.name)"
    elif implementation != "triton":
        obstacle = f"kernels are {implementation}, not triton (executor.kernels)"
    return _unless(obstacle, "decode", chosen, Decode.graphs, Decode.eager)


def _unless(obstacle: str | None, key: str, chosen: Choice, faster: Choice, other: Choice) -> Choice:
    """What ``executor.<key>`` comes to: auto is ``faster`` unless an obstacle stands in its way.

    Raises ConfigError where ``faster`` is asked for and cannot be had.
    """
    if chosen is faster and obstacle:
        raise ConfigError(f"executor.{key}: {faster.value} cannot be had: {obstacle}; use auto or {other.value}")
    if chosen.value == "auto":
        return other if obstacle else faster
    return chosen


def _record(model: PreTrainedModel, storage: KVStorage, pool: Pool, allocator: Allocator) -> StaticDecode:
    """Decode steps as CUDA graphs. Raises ConfigError where the model's cannot be recorded."""
    try:
        return StaticDecode(
            model,
            storage.kv,
            storage.kernels,
            layout=allocator.layout,
            block_size=allocator.block_size,
            max_rows=pool.max_rows,
            max_tokens=pool.max_tokens,
            record=CudaGraphs(),
        )
    except RuntimeError as error:  # a read of the device by the model's code; memory
        raise ConfigError(
            f"executor.decode: decode steps of {type(model).__name__} cannot be recorded as CUDA graphs: {error}; "
            "use executor.decode=eager, or leave more memory beside the pool (pool.size)"
        ) from error


def _eos(model: Any) -> tuple[int, ...]:
    ids = model.generation_config.eos_token_id
    if ids is None:
        ids = model.config.get_text_config().eos_token_id
    return () if ids is None else (ids,) if isinstance(ids, int) else tuple(ids)
