"""``executor=roofline``: a model's shape and a device's profile instead of tensors."""

from dataclasses import asdict

import torch

from kvbench import models
from kvbench.allocator import Allocator, IntArray, Pool
from kvbench.backend import Backend
from kvbench.config import Config
from kvbench.device_profile import DeviceProfile
from kvbench.errors import ConfigError
from kvbench.executors.cost_model import CostModel
from kvbench.executors.roofline import RooflineExecutor
from kvbench.geometry import shape_of
from kvbench.recorded_beams import ReplayedBeams, shipped_parents
from kvbench.request import Request
from kvbench.workload_config import WorkloadConfig, length_source


def validate(cfg: Config) -> None:
    """Raises ConfigError where ``cfg`` asks for what virtual time cannot give."""
    if cfg.device.profile is None:
        raise ConfigError(
            f"device: executor=roofline needs the profile of a device, and device={cfg.device.name} has none; "
            "choose one such as device=a100_40gb, or measure yours with +experiment=calibrate"
        )
    cfg.device.profile.check()
    if not cfg.workload.ignore_eos:
        raise ConfigError("workload.ignore_eos: executor=roofline draws no tokens, so no EOS either; set it to true")
    if length_source(cfg.workload) is None:
        raise ConfigError(
            "workload: executor=roofline serves lengths, not texts; use workload=sharegpt_paper, alpaca_paper, trace "
            "or lengths"
        )
    if cfg.workload.mode == "beam":
        _recordings(cfg.workload)


def load(cfg: Config) -> Backend:
    """Read the model's configuration, not its weights. Raises ConfigError. ``cfg`` has been validated."""
    assert cfg.device.profile is not None
    profile: DeviceProfile = cfg.device.profile
    dtype = models.parse_dtype(cfg.dtype.value)
    config = models.configuration(cfg.model)
    shape = shape_of(config, cfg.model.kv_heads)
    cost = CostModel(shape, profile, dtype.itemsize)

    def make(pool: Pool, allocator: Allocator) -> RooflineExecutor:
        return RooflineExecutor(cost)

    def beams(request: Request) -> ReplayedBeams:
        sampling, recordings = request.sampling, _recordings(cfg.workload)
        return ReplayedBeams(recordings, request.max_new_tokens, seed=sampling.seed, request_id=request.request_id)

    return Backend(
        device=torch.device("cpu"),
        name=cfg.model.name,
        tokenizer=None,
        vocab_size=config.get_text_config().vocab_size,
        max_tokens=models.max_tokens(cfg.model, config),
        eos=(),
        bytes_per_slot=shape.bytes_per_slot(dtype),
        device_bytes=max(0, profile.memory_bytes * profile.num_devices - shape.num_parameters * dtype.itemsize),
        host_bytes=profile.host_memory_bytes,
        shares_memory=False,
        make=make,
        beams=beams,
        record={"model": {"source": "configuration", "name": cfg.model.name}, "geometry": asdict(shape)},
    )


def _recordings(cfg: WorkloadConfig) -> IntArray:
    """Parents of the beam searches to replay, int64 ``[requests, steps, width]``. Raises ConfigError."""
    recordings = shipped_parents(cfg.beam_width)
    if cfg.recording is None:
        return recordings
    if not 0 <= cfg.recording < len(recordings):
        raise ConfigError(f"workload.recording: {cfg.recording} is not an integer from 0 to {len(recordings) - 1}")
    return recordings[cfg.recording : cfg.recording + 1]
