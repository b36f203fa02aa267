"""Packed and fused linear layers compute what the loaded ones do."""

import pytest
import torch

from kvbench.executors.packing import PackedLinear, pack_linears
from tests.tiny_models import FAMILIES, tiny_model


@torch.inference_mode()
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("num_tokens", [1, 5, 40])
def test_packed_models_give_the_same_logits(family: str, num_tokens: int) -> None:
    model = tiny_model(family)
    ids = torch.arange(num_tokens)[None] * 7 % 128
    expected = model(ids, use_cache=False).logits
    pack_linears(model)
    torch.testing.assert_close(model(ids, use_cache=False).logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
def test_packed_layer_is_as_exact_as_its_dtype(dtype: torch.dtype, bias: bool) -> None:
    torch.manual_seed(0)
    layer = torch.nn.Linear(96, 80, bias=bias).to(dtype)
    x = torch.randn(3, 7, 96).to(dtype)
    exact = torch.nn.functional.linear(x.double(), layer.weight.double(), layer.bias.double() if bias else None)
    got = PackedLinear(layer.weight, layer.bias)(x)
    assert got.dtype == dtype
    error = ((got.double() - exact).norm() / exact.norm()).item()
    assert error < (1e-6 if dtype == torch.float32 else 4e-3)


@torch.inference_mode()
def test_fused_projections_refuse_another_input() -> None:
    model = tiny_model("llama")
    pack_linears(model)
    attention = model.model.layers[0].self_attn
    attention.q_proj(torch.randn(1, 2, 64))
    with pytest.raises(RuntimeError, match="another input"):
        attention.k_proj(torch.randn(1, 2, 64))
