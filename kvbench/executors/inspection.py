"""Which models the engine can decode: a probe at start instead of wrong tokens later."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kernels import BaseSlots, reference
from kvbench.errors import ConfigError
from kvbench.executors.attention import NAME
from kvbench.geometry import Geometry

_PROBE_TOKENS = 24
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 1e-2}  # relative L2 of logits
_HARMLESS = {"dropout", "is_causal", "position_ids", "cache_position", "use_cache", "output_attentions"}


@dataclass
class _Probe:
    """Attends over this pass's own tokens and notes what the model asked for."""

    layers: list[int] = field(default_factory=list)
    shapes: set[tuple[int, int, int, int]] = field(default_factory=set)
    windows: set[int] = field(default_factory=set)
    extra: set[str] = field(default_factory=set)

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int, softcap: float
    ) -> Tensor:
        self.layers.append(layer)
        self.shapes.add((query.shape[1], key.shape[1], key.shape[2], value.shape[2]))
        self.windows.add(window)
        count = torch.tensor([len(query)], dtype=torch.int32, device=query.device)
        where = BaseSlots(torch.zeros(1, dtype=torch.int64, device=query.device))
        starts = torch.cat([torch.zeros_like(count), count])
        return reference.prefill_attention(
            query,
            key.contiguous(),
            value.contiguous(),
            where,
            starts,
            count,
            scale=scale,
            window=window,
            softcap=softcap,
        )

    def notice(self, extra: dict[str, Any]) -> None:
        self.extra |= {name for name, value in extra.items() if value is not None and name not in _HARMLESS}


@torch.inference_mode()
def inspect(model: PreTrainedModel) -> Geometry:
    """Check that ``model`` decodes correctly through our attention and return its geometry.

    Leaves the model on our attention function. Raises ConfigError naming the missing feature.
    """
    config = model.config.get_text_config()
    name = type(model).__name__
    for feature in _declared_gaps(config):
        raise ConfigError(f"model: {name} needs {feature}, which kvbench's kernels lack; choose another model")
    expected = _eager_logits(model)
    probe = _Probe()
    with _refusing(name):
        model.set_attn_implementation(NAME)
        got = _forward(model, kv_step=probe)
    _check_reached(name, probe, config)
    error = _relative_error(got, expected)
    if not error < _TOLERANCE[model.dtype]:
        raise ConfigError(
            f"model: {name} gives other logits through kvbench's attention (relative error {error:.1e}): "
            "it uses an attention feature that the kernels lack; choose another model"
        )
    heads, kv_heads, head_dim, _ = next(iter(probe.shapes))
    return Geometry(config.num_hidden_layers, heads, kv_heads, head_dim)


@torch.inference_mode()
def check_unchanged(model: PreTrainedModel, change: Callable[[], None], setting: str) -> None:
    """Make a change that must leave an inspected ``model``'s calls of attention as they are, and its logits.

    Raises ConfigError naming ``setting``, which asked for the change; logits may differ by what the dtype allows.
    """
    before, after = _Probe(), _Probe()
    expected = _forward(model, kv_step=before)
    change()
    error = _relative_error(_forward(model, kv_step=after), expected)
    if before != after:
        raise ConfigError(f"{setting} calls attention otherwise than {type(model).__name__}: {after}, not {before}")
    if not error < _TOLERANCE[model.dtype]:
        raise ConfigError(f"{setting} changes the logits of {type(model).__name__} (relative error {error:.1e})")


def _relative_error(got: Tensor, expected: Tensor) -> float:
    return float((got - expected).norm() / expected.norm())


def _declared_gaps(config: Any) -> Iterator[str]:
    if getattr(config, "is_encoder_decoder", False) or getattr(config, "add_cross_attention", False):
        yield "cross-attention"
    if getattr(config, "kv_lora_rank", None):
        yield "multi-head latent attention (MLA)"
    if getattr(config, "alibi", False) or config.model_type in ("bloom", "mpt"):
        yield "ALiBi position biases"
    if config.model_type == "gpt_oss":
        yield "attention sinks"
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if kinds:
        yield f"layers of type {', '.join(sorted(kinds))}"


def _check_reached(name: str, probe: _Probe, config: Any) -> None:
    if sorted(probe.layers) != list(range(config.num_hidden_layers)):
        raise ConfigError(
            f"model: {name} bypasses the registered attention function (reached in {len(probe.layers)} of "
            f"{config.num_hidden_layers} layers), so its KV cannot be pooled; choose another model"
        )
    if probe.extra:
        gaps = ", ".join("attention sinks" if gap == "s_aux" else gap for gap in sorted(probe.extra))
        raise ConfigError(f"model: {name} needs {gaps}, which kvbench's kernels lack; choose another model")
    if len(probe.shapes) > 1 or any(key != value for _, _, key, value in probe.shapes):
        raise ConfigError(f"model: {name} has layers of different head shapes, which one pool cannot hold")
    if _slides(config) and probe.windows == {0}:
        raise ConfigError(f"model: {name} applies its sliding window by masks only, which kvbench does not build")


def _slides(config: Any) -> bool:
    if not getattr(config, "sliding_window", None) or getattr(config, "use_sliding_window", True) is False:
        return False
    return "sliding_attention" in (getattr(config, "layer_types", None) or ["sliding_attention"])


def _eager_logits(model: PreTrainedModel) -> Tensor:
    with _refusing(type(model).__name__):
        model.set_attn_implementation("eager")
        return _forward(model)


def _forward(model: PreTrainedModel, **extra: Any) -> Tensor:
    """Logits of the probe's last two tokens, float32 ``[2, vocab]``: as the engine will ask for them."""
    positions = torch.arange(_PROBE_TOKENS, device=model.device)
    ids = positions[None] * 7 % model.config.get_text_config().vocab_size
    keep = positions[-2:]
    out = model(ids, position_ids=positions[None], use_cache=False, logits_to_keep=keep, **extra)
    return out.logits[0].float()


@contextmanager
def _refusing(name: str) -> Iterator[None]:
    try:
        yield
    except (TypeError, ValueError) as error:  # a keyword it lacks; an attention implementation it refuses
        raise ConfigError(f"model: {name} cannot be driven by kvbench's attention: {error}") from error
