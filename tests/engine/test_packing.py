"""Packed and fused linear layers compute what the loaded ones do."""

import pytest
import torch

from kvbench import torch_backend
from kvbench.config import Config, Dtype, Linear
from kvbench.errors import ConfigError
from kvbench.executors.packing import MakeLinear, OneDNNLinear, PanelLinear, pack_linears
from tests.tiny_models import FAMILIES, tiny_model

every_way = pytest.mark.parametrize("make", [OneDNNLinear, PanelLinear])


@torch.inference_mode()
@every_way
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("num_tokens", [1, 5, 40])
def test_packed_models_give_the_same_logits(family: str, num_tokens: int, make: MakeLinear) -> None:
    model = tiny_model(family)
    ids = torch.arange(num_tokens)[None] * 7 % 128
    expected = model(ids, use_cache=False).logits
    pack_linears(model, make)
    assert not any(type(module) is torch.nn.Linear for module in model.modules())
    torch.testing.assert_close(model(ids, use_cache=False).logits, expected, rtol=1e-4, atol=1e-4)


@every_way
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
def test_packed_layer_is_as_exact_as_its_dtype(dtype: torch.dtype, bias: bool, make: MakeLinear) -> None:
    torch.manual_seed(0)
    layer = torch.nn.Linear(96, 80, bias=bias).to(dtype)
    x = torch.randn(3, 7, 96).to(dtype)
    exact = torch.nn.functional.linear(x.double(), layer.weight.double(), layer.bias.double() if bias else None)
    got = make(layer.weight, layer.bias)(x)
    assert got.dtype == dtype
    assert got.shape == exact.shape
    error = ((got.double() - exact).norm() / exact.norm()).item()
    assert error < (1e-6 if dtype == torch.float32 else 4e-3)


@torch.inference_mode()
@every_way
def test_fused_projections_refuse_another_input(make: MakeLinear) -> None:
    model = tiny_model("llama")
    pack_linears(model, make)
    attention = model.model.layers[0].self_attn
    attention.q_proj(torch.randn(1, 2, 64))
    with pytest.raises(RuntimeError, match="another input"):
        attention.k_proj(torch.randn(1, 2, 64))


@pytest.mark.parametrize(
    ("device", "dtype", "in_hardware", "expected"),
    [
        ("cpu", Dtype.float32, True, Linear.panels),
        ("cpu", Dtype.bfloat16, False, Linear.panels),
        ("cpu", Dtype.bfloat16, True, Linear.packed),
        ("cpu", Dtype.float16, True, Linear.torch),
        ("cuda", Dtype.bfloat16, True, Linear.torch),
    ],
)
def test_automatic_choice(device, dtype, in_hardware, expected, monkeypatch) -> None:
    monkeypatch.setattr(torch_backend, "has_bfloat16", lambda: in_hardware)
    cfg = Config(dtype=dtype)
    assert torch_backend._linear(cfg, torch.device(device)) is expected
    cfg.executor.linear = Linear.panels
    if expected is Linear.torch:
        with pytest.raises(ConfigError, match=r"executor.linear: panels needs device=cpu"):
            torch_backend._linear(cfg, torch.device(device))
    else:
        assert torch_backend._linear(cfg, torch.device(device)) is Linear.panels
