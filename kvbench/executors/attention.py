"""The attention function that replaces a Hugging Face model's own: K and V live in our pool.

Registered once under :data:`NAME`; the model then calls it once per layer with the keyword
``kv_step``, which says where this step's KV is written and read.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from kernels import BaseSlots, BlockTables, Kernels
from kernels.cpu_decoder import Attention

NAME = "kvbench"


class AttentionStep(Protocol):
    """What one forward pass does with a layer's query, key and value."""

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int, softcap: float
    ) -> Tensor:
        """query ``[T, num_query_heads, head_dim]``, key and value ``[T, num_kv_heads, head_dim]``; like query."""

    def notice(self, extra: dict[str, Any]) -> None:
        """Keywords of the model's call that the kernels do not know."""


@dataclass
class PooledStep:
    """Writes the step's KV at ``slots``, then attends: decode rows first, prefill rows after them.

    kv: ``[num_layers, 2, num_slots, num_kv_heads, head_dim]``. slots: int64 ``[T]``.
    decode_lengths, prefill_lengths: int32 per row. query_starts: int32 ``[prefill rows + 1]``.
    """

    kernels: Kernels
    kv: Tensor
    slots: Tensor
    num_decode: int
    decode_where: BlockTables | BaseSlots
    decode_lengths: Tensor
    prefill_where: BlockTables | BaseSlots
    prefill_lengths: Tensor
    query_starts: Tensor

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int, softcap: float
    ) -> Tensor:
        keys, values = self.kv[layer, 0], self.kv[layer, 1]
        self.kernels.store_kv(key, value, keys, values, self.slots)
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        split = self.num_decode
        options: dict[str, Any] = {"scale": scale, "window": window, "softcap": softcap}
        if split:
            self.kernels.decode_attention(
                query[:split],
                keys,
                values,
                self.decode_where,
                self.decode_lengths,
                out=out[:split],
                **options,
            )
        if split < len(query):
            self.kernels.prefill_attention(
                query[split:],
                keys,
                values,
                self.prefill_where,
                self.query_starts,
                self.prefill_lengths,
                out=out[split:],
                **options,
            )
        return out

    def parts(self) -> tuple[Attention, Attention]:
        """The same as :meth:`attend` does, for all layers at once: decode rows, prefill rows."""
        one_each = np.arange(self.num_decode + 1, dtype=np.int32)
        return (
            Attention(0, self.decode_where, one_each, self.decode_lengths),
            Attention(self.num_decode, self.prefill_where, self.query_starts.numpy(), self.prefill_lengths),
        )

    def notice(self, extra: dict[str, Any]) -> None:
        """Nothing: what a model may pass was checked at start (:mod:`kvbench.executors.inspection`)."""


@dataclass
class DecodeStep:
    """Writes the KV of one token per row at ``slots`` (-1: nowhere), then attends. Touches the device alone.

    kv: as in :class:`PooledStep`. slots: int64 ``[rows]``. lengths: int32 ``[rows]``; 0 for a row that is padding.
    """

    kernels: Kernels
    kv: Tensor
    slots: Tensor
    where: BlockTables | BaseSlots
    lengths: Tensor

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int, softcap: float
    ) -> Tensor:
        keys, values = self.kv[layer, 0], self.kv[layer, 1]
        self.kernels.store_kv(key, value, keys, values, self.slots)
        return self.kernels.decode_attention(
            query, keys, values, self.where, self.lengths, scale=scale, window=window, softcap=softcap
        )

    def notice(self, extra: dict[str, Any]) -> None:
        """Nothing, as :class:`PooledStep`."""


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    kv_step: AttentionStep | None = None,
    **extra: Any,
) -> tuple[Tensor, None]:
    """``transformers`` calling convention: query ``[1, heads, T, head_dim]`` to ``[1, T, heads, head_dim]``."""
    if kv_step is None:
        raise RuntimeError("the kvbench attention function needs the keyword kv_step")
    kv_step.notice(extra)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out = kv_step.attend(
        int(module.layer_idx),  # type: ignore[arg-type]
        query[0].transpose(0, 1).contiguous(),
        key[0].transpose(0, 1).contiguous(),
        value[0].transpose(0, 1).contiguous(),
        scale,
        sliding_window or 0,
        softcap or 0.0,
    )
    return out.unsqueeze(0), None


# Causality and windows are the kernels' business. An attention function without a mask function of its name gets no
# mask; with one, even one that returns none, transformers would read positions back from the device at every forward.
AttentionInterface.register(NAME, _attention)


def forward(
    model: PreTrainedModel, tokens: Tensor, positions: Tensor, keep: Tensor | int, step: AttentionStep
) -> Tensor:
    """Logits of packed tokens, ``[kept, vocab]``. tokens, positions: int64 ``[T]``; keep: which (0: all of them)."""
    return model(tokens[None], position_ids=positions[None], use_cache=False, logits_to_keep=keep, kv_step=step).logits[
        0
    ]
