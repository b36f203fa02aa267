"""A Hugging Face decoder's layers as one module of few operations, for steps of few tokens on the CPU.

A layer of ``transformers`` is about 60 small calls of torch and a dozen modules, which at decode batch sizes
take longer than its products. Here it is nine calls: products by :mod:`kernels.cpu_linear`, what lies between
them by :mod:`kernels.cpu_fused`, on buffers that all layers share.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.activations import SiLUActivation
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from transformers.models.mistral.modeling_mistral import MistralDecoderLayer
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer

from kernels.cpu_fused import add_rms_norm, array, rms_norm, rotary, silu_mul
from kernels.cpu_linear import PackedWeight, linear
from kvbench.executors.attention import AttentionStep
from kvbench.executors.inspection import check_unchanged

# The layers that compute what LeanLayers does, and where each keeps its attention window.
_WINDOWS: dict[type[nn.Module], Callable[[Any], int | None]] = {
    LlamaDecoderLayer: lambda attention: None,
    MistralDecoderLayer: lambda attention: attention.config.sliding_window,
    Qwen2DecoderLayer: lambda attention: attention.sliding_window,
}


def obstacle(model: PreTrainedModel) -> str | None:
    """Why ``model``'s layers cannot be replaced; None if they can."""
    layers = getattr(model.base_model, "layers", None)
    if not isinstance(layers, nn.ModuleList) or not len(layers):
        return f"{type(model).__name__} has no list of layers"
    layer: Any
    for layer in layers:
        if type(layer) not in _WINDOWS:
            legal = ", ".join(kind.__name__ for kind in _WINDOWS)
            return f"{type(model).__name__} has layers of type {type(layer).__name__}, not {legal}"
        if not isinstance(layer.mlp.act_fn, (nn.SiLU, SiLUActivation)):
            return f"{type(model).__name__} has the activation {type(layer.mlp.act_fn).__name__}, not SiLU"
        kinds = {(tensor.dtype, tensor.device.type) for tensor in layer.parameters()}
        if kinds not in ({(torch.float32, "cpu")}, {(torch.bfloat16, "cpu")}):
            return f"{type(model).__name__} has weights that are not all float32 or all bfloat16 on the CPU"
        if {type(module) for name, module in layer.named_modules() if name.endswith("_proj")} != {nn.Linear}:
            return f"{type(model).__name__} has projections that are not plain linear layers"
    return None


def use_lean_layers(model: PreTrainedModel) -> None:
    """Replace the layers of ``model``, which must have no :func:`obstacle` and unpacked linear layers, in place.

    Raises ConfigError if the model then gives other logits.
    """

    decoder: Any = model.base_model

    def replace() -> None:
        decoder.layers = nn.ModuleList([LeanLayers(decoder.layers)])

    check_unchanged(model, replace, "executor.layers: lean")


@dataclass
class _Layer:
    """One layer's weights: packed, or as :mod:`kernels.cpu_fused` takes them."""

    index: int
    input_norm: NDArray
    input_epsilon: float
    qkv: PackedWeight
    scale: float
    window: int
    output: PackedWeight
    mlp_norm: NDArray
    mlp_epsilon: float
    gate_up: PackedWeight
    down: PackedWeight


class _Buffers:
    """What every layer of one step writes: tensors, and with a name ending in ``_`` the same memory as an array."""

    def __init__(self, hidden: Tensor, layer: _Layer, num_query_heads: int, num_kv_heads: int, head_dim: int) -> None:
        self.num_tokens = len(hidden)
        self.hidden = hidden.clone(memory_format=torch.contiguous_format)  # the residual stream
        self.normed = self._new(layer.qkv.in_features)
        self.qkv = self._new(layer.qkv.out_features)
        self.gate_up = self._new(layer.gate_up.out_features)
        self.gated = self._new(layer.down.in_features)
        self.delta = self._new(layer.down.out_features)  # what a layer's half adds to the residual stream
        heads = self.qkv.view(self.num_tokens, -1, head_dim)
        self.query, self.key, self.value = heads.split([num_query_heads, num_kv_heads, num_kv_heads], dim=1)
        self.hidden_, self.normed_, self.delta_, self.heads_ = map(array, (self.hidden, self.normed, self.delta, heads))

    def _new(self, num_features: int) -> Tensor:
        return self.hidden.new_empty(self.num_tokens, num_features)


class LeanLayers(nn.Module):
    """All decoder layers of a model, called as ``transformers`` calls one. Empties the given list of its layers."""

    def __init__(self, layers: nn.ModuleList) -> None:
        super().__init__()
        attention: Any = layers[0].self_attn
        self.head_dim: int = attention.head_dim
        self.num_query_heads = attention.q_proj.out_features // self.head_dim
        self.num_kv_heads = attention.k_proj.out_features // self.head_dim
        self._layers: list[_Layer] = []
        for i in range(len(layers)):
            self._layers.append(_packed(layers[i]))
            layers[i] = nn.Identity()  # so that a model never stands twice in memory

    def forward(
        self,
        hidden_states: Tensor,
        *,
        position_embeddings: tuple[Tensor, Tensor],
        kv_step: AttentionStep,
        **unused: Any,
    ) -> Tensor:
        """hidden_states: ``[1, T, hidden_size]``; like it. position_embeddings: cosines, sines ``[1, T, head_dim]``."""
        cos, sin = (array(part[0].contiguous()) for part in position_embeddings)
        num_rotated = self.num_query_heads + self.num_kv_heads
        first, *others = self._layers
        b = _Buffers(hidden_states[0], first, self.num_query_heads, self.num_kv_heads, self.head_dim)
        rms_norm(b.hidden_, first.input_norm, first.input_epsilon, b.normed_)
        for layer, following in zip(self._layers, [*others, None], strict=True):
            linear(b.normed, layer.qkv, out=b.qkv)
            rotary(b.heads_, num_rotated, cos, sin)
            attended = kv_step.attend(layer.index, b.query, b.key, b.value, layer.scale, layer.window, 0.0)
            linear(attended.view(b.num_tokens, -1), layer.output, out=b.delta)
            add_rms_norm(b.hidden_, b.delta_, layer.mlp_norm, layer.mlp_epsilon, b.normed_)
            linear(b.normed, layer.gate_up, out=b.gate_up)
            silu_mul(b.gate_up, b.gated)
            linear(b.gated, layer.down, out=b.delta)
            if following is not None:  # its first norm is computed with this layer's last sum
                add_rms_norm(b.hidden_, b.delta_, following.input_norm, following.input_epsilon, b.normed_)
        return (b.hidden + b.delta)[None]


def _packed(layer: Any) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    return _Layer(
        index=attention.layer_idx,
        input_norm=array(layer.input_layernorm.weight),
        input_epsilon=layer.input_layernorm.variance_epsilon,
        qkv=_fused(attention.q_proj, attention.k_proj, attention.v_proj),
        scale=attention.scaling,
        window=_WINDOWS[type(layer)](attention) or 0,
        output=_fused(attention.o_proj),
        mlp_norm=array(layer.post_attention_layernorm.weight),
        mlp_epsilon=layer.post_attention_layernorm.variance_epsilon,
        gate_up=_fused(mlp.gate_proj, mlp.up_proj),
        down=_fused(mlp.down_proj),
    )


def _fused(*layers: nn.Linear) -> PackedWeight:
    bias = None if layers[0].bias is None else torch.cat([layer.bias.detach() for layer in layers])
    return PackedWeight(torch.cat([layer.weight.detach() for layer in layers]), bias)
