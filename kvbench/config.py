"""The configuration schema: names, types and defaults live in ``conf/``, this file types them.

A value of the wrong type, an unknown key or an unknown choice fails while the configuration is
composed, before anything is loaded.
"""

from dataclasses import dataclass, field
from datetime import datetime, timezone
from enum import Enum
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, DictConfig, OmegaConf, open_dict

from kvbench.attention_kernel.settings import AttentionConfig
from kvbench.device_profile import DeviceProfile
from kvbench.models import ModelConfig
from kvbench.workload import WorkloadConfig


class Task(Enum):
    """What a job does."""

    run = "run"  # measure one configuration
    calibrate = "calibrate"  # write a device profile of this machine
    validate = "validate"  # measure, and simulate the same with a profile of this machine
    capacity = "capacity"  # find the rate that one replica sustains
    attention = "attention"  # time attention kernels


class Reservation(Enum):
    """How many tokens a reserving allocator is asked to hold for each sequence."""

    max = "max"  # the model's limit
    pow2 = "pow2"  # the true output, rounded up to a power of two
    oracle = "oracle"  # the true output


class Preemption(Enum):
    """What becomes of the KV of a preempted group."""

    auto = "auto"  # swap where the allocator can, else recompute
    swap = "swap"
    recompute = "recompute"


class Batching(Enum):
    """When waiting groups are admitted."""

    continuous = "continuous"  # whenever there is room: iteration-level scheduling
    static = "static"  # when the running batch has ended, as many as fit: request-level scheduling


class Prefill(Enum):
    """Which step computes the prompts of admitted groups."""

    separate = "separate"  # one of its own, for which the running groups wait
    mixed = "mixed"  # the one in which the running groups decode


class Oversized(Enum):
    """What to do with a request that an empty pool could never hold."""

    error = "error"
    reject = "reject"


class DeviceKind(Enum):
    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class Linear(Enum):
    """How the model's linear layers are computed."""

    auto = "auto"  # on the CPU packed or panels (see kvbench.job), elsewhere torch
    torch = "torch"  # as loaded
    packed = "packed"  # oneDNN, weights reordered once
    panels = "panels"  # kernels.cpu_linear


class Layers(Enum):
    """How the model's decoder layers are computed."""

    auto = "auto"  # lean where linear layers are panels and the model's layers allow it, else model
    model = "model"  # by transformers
    lean = "lean"  # kvbench.executors.lean


class Decode(Enum):
    """How the kernels of a step in which every row decodes are issued."""

    auto = "auto"  # graphs where they can be had, else eager
    graphs = "graphs"  # as one, recorded before the run: kvbench.executors.static_decode
    eager = "eager"  # one by one, as those of a prefill


class Dtype(Enum):
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


@dataclass
class AllocatorConfig:
    name: str = MISSING
    reservation: Reservation = Reservation.max
    make: dict[str, Any] = field(default_factory=dict)


@dataclass
class DeviceConfig:
    name: str = "auto"
    num_threads: int = 0
    profile: DeviceProfile | None = None


@dataclass
class PoolConfig:
    size: Any = MISSING
    host_size: Any = MISSING


@dataclass
class ExecutorConfig:
    name: str = MISSING
    kernels: str = "auto"
    linear: Linear = Linear.auto
    layers: Layers = Layers.auto
    decode: Decode = Decode.auto


@dataclass
class SchedulerConfig:
    max_num_seqs: int = 256
    max_batched_tokens: int = 2560
    batching: Batching = Batching.continuous
    prefill: Prefill = Prefill.separate
    preemption: Preemption = Preemption.auto
    oversized: Oversized = Oversized.error
    force_preemption_every: int = 0


@dataclass
class MeasureConfig:
    progress: bool = True
    samples: bool = True
    slo_ttft_s: float | None = None
    slo_tpot_s: float | None = None


@dataclass
class CalibrationConfig:
    file: str | None = None
    budget_s: float = 40.0
    repeats: int = 3


@dataclass
class CapacityConfig:
    attainment: float = 0.99
    gpu_price_per_hour: float | None = None
    lowest_rate: float = 0.01
    tolerance: float = 0.02


@dataclass
class DebugConfig:
    audit: bool = False


@dataclass
class Config:
    task: Task = Task.run
    experiment: str = "adhoc"
    results_dir: str = "results"
    seed: int = 0
    dtype: Dtype = Dtype.float32
    max_model_len: int = 1024
    resume: bool = False
    allocator: AllocatorConfig = field(default_factory=AllocatorConfig)
    workload: WorkloadConfig = field(default_factory=WorkloadConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    device: DeviceConfig = field(default_factory=DeviceConfig)
    pool: PoolConfig = field(default_factory=PoolConfig)
    executor: ExecutorConfig = field(default_factory=ExecutorConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    measure: MeasureConfig = field(default_factory=MeasureConfig)
    calibration: CalibrationConfig = field(default_factory=CalibrationConfig)
    capacity: CapacityConfig = field(default_factory=CapacityConfig)
    debug: DebugConfig = field(default_factory=DebugConfig)
    attention: AttentionConfig | None = None


ConfigStore.instance().store(name="schema", node=Config)
OmegaConf.register_new_resolver(
    "utc_stamp", lambda: datetime.now(timezone.utc).strftime("%Y%m%dT%H%M%S.%fZ"), use_cache=True, replace=True
)


def typed(cfg: DictConfig) -> Config:
    """The composed configuration as dataclasses. Raises an OmegaConf error on a missing value or an unknown key."""
    # Merged into the bare schema, which takes no key that was appended on the command line (``+key=value``).
    known = OmegaConf.merge(OmegaConf.structured(Config), plain(cfg))
    return OmegaConf.to_object(known)  # type: ignore[return-value]


def plain(cfg: DictConfig) -> dict[str, Any]:
    """The composed configuration as JSON types."""
    return OmegaConf.to_container(_without_hydra(cfg), resolve=True, enum_to_str=True)  # type: ignore[return-value]


def _without_hydra(cfg: DictConfig) -> DictConfig:
    cfg = cfg.copy()
    with open_dict(cfg):
        cfg.pop("hydra", None)
    return cfg
