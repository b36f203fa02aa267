"""Lean decoder layers compute what the model's own do."""

import copy
import dataclasses

import pytest
import torch

from kvbench import torch_backend
from kvbench.config import Config, Layers, Linear
from kvbench.errors import ConfigError
from kvbench.executors import lean
from kvbench.executors.inspection import _forward, _Probe, inspect
from tests.engine.harness import Setting, serve
from tests.engine.test_same_tokens import check, family, name_of, undisturbed
from tests.tiny_models import FAMILIES, tiny_model

ELIGIBLE = ("llama", "qwen2", "mistral")
SETTINGS = [
    Setting("static", lean=True),
    Setting("paged", options={"block_size": 8}, lean=True),
    Setting("paged_swap", options={"block_size": 16}, force_preemption_every=2, lean=True),
]


@torch.inference_mode()
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("name", ELIGIBLE)
def test_logits_are_the_models_own(name: str, dtype: torch.dtype, tolerance: float) -> None:
    model = tiny_model(name).to(dtype)
    inspect(model)
    expected = _forward(model, kv_step=_Probe())
    lean.use_lean_layers(model)
    got = _forward(model, kv_step=_Probe())
    assert float((got - expected).norm() / expected.norm()) < tolerance


@pytest.mark.parametrize("setting", SETTINGS, ids=name_of)
@pytest.mark.parametrize("name", ELIGIBLE)
def test_engine_gives_the_same_tokens(name: str, setting: Setting) -> None:
    model, requests, eos, expected = family(name)
    served = serve(model, requests, setting, eos)
    check(model, served, expected, undisturbed(name))


@pytest.mark.parametrize("name", FAMILIES)
def test_obstacles(name: str) -> None:
    assert (lean.obstacle(tiny_model(name)) is None) == (name in ELIGIBLE)


def test_obstacles_within_a_layer() -> None:
    model = tiny_model("llama")
    gelu, mixed, half, fused = (copy.deepcopy(model) for _ in range(4))
    gelu.model.layers[1].mlp.act_fn = torch.nn.GELU()
    mixed.model.layers[1].input_layernorm.bfloat16()
    fused.model.layers[1].mlp.down_proj = torch.nn.Identity()
    for broken, why in ((gelu, "GELU"), (mixed, "not all float32"), (half.half(), "not all float32"), (fused, "plain")):
        assert why in str(lean.obstacle(broken))


def test_a_change_of_the_logits_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    inspect(model)
    packed = lean._packed
    monkeypatch.setattr(lean, "_packed", lambda layer: dataclasses.replace(packed(layer), input_epsilon=1.0))
    with pytest.raises(ConfigError, match=r"executor.layers: lean changes the logits of LlamaForCausalLM"):
        lean.use_lean_layers(model)


@pytest.mark.parametrize("changed", [{"index": 0}, {"window": 5}])
def test_other_calls_of_attention_are_refused(changed: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    inspect(model)
    packed = lean._packed
    monkeypatch.setattr(lean, "_packed", lambda layer: dataclasses.replace(packed(layer), **changed))
    with pytest.raises(ConfigError, match=r"executor.layers: lean calls attention otherwise than LlamaForCausalLM"):
        lean.use_lean_layers(model)


def test_choice() -> None:
    cfg = Config()
    assert torch_backend._layers(cfg, Linear.panels, None) is Layers.lean
    assert torch_backend._layers(cfg, Linear.packed, None) is Layers.model
    assert torch_backend._layers(cfg, Linear.panels, "why") is Layers.model
    cfg.executor.layers = Layers.model
    assert torch_backend._layers(cfg, Linear.panels, None) is Layers.model
    cfg.executor.layers = Layers.lean
    assert torch_backend._layers(cfg, Linear.panels, None) is Layers.lean
    with pytest.raises(ConfigError, match=r"executor.layers: lean cannot be had: why; use auto or model"):
        torch_backend._layers(cfg, Linear.panels, "why")
    with pytest.raises(ConfigError, match=r"linear layers are torch, not panels \(executor.linear\)"):
        torch_backend._layers(cfg, Linear.torch, None)
