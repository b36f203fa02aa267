"""A Hugging Face decoder's layers as one module of few operations, for steps of few tokens on the CPU.

A layer of ``transformers`` is about 60 small calls of torch and a dozen modules, which at decode batch sizes
take longer than its products. Here all layers are one call of :mod:`kernels.cpu_decoder`.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.activations import SiLUActivation
from transformers.modeling_outputs import CausalLMOutput
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaForCausalLM
from transformers.models.mistral.modeling_mistral import MistralDecoderLayer, MistralForCausalLM
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer, Qwen2ForCausalLM

from kernels import cpu
from kernels.cpu_decoder import Decoder, Layer
from kernels.cpu_linear import PackedWeight
from kvbench.executors.attention import AttentionStep, PooledStep
from kvbench.executors.inspection import check_unchanged

# The layers that compute what LeanLayers does, and where each keeps its attention window.
_WINDOWS: dict[type[nn.Module], Callable[[Any], int | None]] = {
    LlamaDecoderLayer: lambda attention: None,
    MistralDecoderLayer: lambda attention: attention.config.sliding_window,
    Qwen2DecoderLayer: lambda attention: attention.sliding_window,
}

_MODELS = (LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM)  # embedding, such layers, norm, output layer


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
    if type(model) not in _MODELS:
        return f"{type(model).__name__} is not one of {', '.join(kind.__name__ for kind in _MODELS)}"
    return None


def use_lean_layers(model: PreTrainedModel) -> None:
    """Replace the layers of ``model``, which must have no :func:`obstacle` and unpacked linear layers, in place.

    The model is then called with packed tokens, as the engine does, and in no other way.
    Raises ConfigError if it gives other logits.
    """

    decoder: Any = model.base_model

    def replace() -> None:
        decoder.layers = nn.ModuleList([LeanLayers(decoder.layers)])
        model.forward = functools.partial(_forward, model)

    check_unchanged(model, replace, "executor.layers: lean")


def _forward(
    model: Any,
    input_ids: Tensor,
    *,
    position_ids: Tensor,
    logits_to_keep: Tensor | int,
    kv_step: AttentionStep,
    **unused: Any,
) -> CausalLMOutput:
    """``model.forward`` without masks, caches and options, which take a millisecond; norm and logits as kept."""
    decoder = model.base_model
    hidden = decoder.embed_tokens(input_ids)
    positions = decoder.rotary_emb(hidden, position_ids)
    hidden = decoder.layers[0](hidden, position_embeddings=positions, kv_step=kv_step)
    kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep  # 0: all
    return CausalLMOutput(logits=model.lm_head(decoder.norm(hidden[:, kept])))


class LeanLayers(nn.Module):
    """All decoder layers of a model, called as ``transformers`` calls one. Empties the given list of its layers."""

    def __init__(self, layers: nn.ModuleList) -> None:
        super().__init__()
        attention: Any = layers[0].self_attn
        head_dim: int = attention.head_dim
        heads = attention.q_proj.out_features // head_dim, attention.k_proj.out_features // head_dim
        dtype = attention.q_proj.weight.dtype
        packed: list[Layer] = []
        for i in range(len(layers)):
            packed.append(_packed(layers[i]))
            layers[i] = nn.Identity()  # so that a model never stands twice in memory
        self._decoder = Decoder(packed, *heads, head_dim, dtype)

    def forward(
        self,
        hidden_states: Tensor,
        *,
        position_embeddings: tuple[Tensor, Tensor],
        kv_step: AttentionStep,
        **unused: Any,
    ) -> Tensor:
        """hidden_states: ``[1, T, hidden_size]``; like it. position_embeddings: cosines, sines ``[1, T, head_dim]``."""
        cos, sin = position_embeddings
        inputs = hidden_states[0], cos[0], sin[0]
        if isinstance(kv_step, PooledStep) and kv_step.kernels is cpu:
            out = self._decoder.run_pooled(*inputs, kv_step.kv, kv_step.slots, kv_step.parts())
        else:
            out = self._decoder.run(*inputs, functools.partial(_attend, kv_step))
        return out.to(hidden_states.dtype)[None]


def _attend(kv_step: AttentionStep, layer: Layer, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return kv_step.attend(layer.index, query, key, value, layer.scale, layer.window, 0.0)


def _packed(layer: Any) -> Layer:
    attention, mlp = layer.self_attn, layer.mlp
    return Layer(
        index=attention.layer_idx,
        input_norm=layer.input_layernorm.weight.detach().float(),
        input_epsilon=layer.input_layernorm.variance_epsilon,
        qkv=_fused(attention.q_proj, attention.k_proj, attention.v_proj),
        scale=attention.scaling,
        window=_WINDOWS[type(layer)](attention) or 0,
        output=_fused(attention.o_proj),
        mlp_norm=layer.post_attention_layernorm.weight.detach().float(),
        mlp_epsilon=layer.post_attention_layernorm.variance_epsilon,
        gate_up=_fused(mlp.gate_proj, mlp.up_proj, is_gated=True),
        down=_fused(mlp.down_proj),
    )


def _fused(*layers: nn.Linear, is_gated: bool = False) -> PackedWeight:
    bias = None if layers[0].bias is None else torch.cat([layer.bias.detach() for layer in layers])
    return PackedWeight(torch.cat([layer.weight.detach() for layer in layers]), bias, is_gated=is_gated)
