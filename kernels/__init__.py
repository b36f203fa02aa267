"""Attention over a pool of KV slots, and the movement of KV in it.

A pool is one tensor per tier, ``kv`` of shape ``[num_layers, 2, num_slots, num_kv_heads, head_dim]``;
one *slot* is one token. A layer's ``key_cache`` is ``kv[layer, 0]`` and its ``value_cache`` is
``kv[layer, 1]``, both contiguous ``[num_slots, num_kv_heads, head_dim]``. Block ``b`` is the slots
``[b * block_size, (b + 1) * block_size)``.

Implementations offer the same operations, those of :class:`Kernels`. One is chosen by name with
:func:`load`; nothing is ever replaced silently by another.
"""

import importlib
from typing import Protocol, cast

from torch import Tensor

from kernels.addressing import BaseSlots, BlockTables

__all__ = ["IMPLEMENTATIONS", "BaseSlots", "BlockTables", "Kernels", "KernelsUnavailable", "load"]

IMPLEMENTATIONS = {
    "reference": "kernels.reference",
    "cpu": "kernels.cpu",
    "triton": "kernels.triton_ops",
}


class KernelsUnavailable(RuntimeError):
    """The implementation exists but cannot be used here; the message says why."""


class Kernels(Protocol):
    """The operations of an implementation.

    Query, key, value and caches share one dtype (float32, bfloat16 or float16); sums are float32 or
    better. ``head_dim`` is a multiple of 8. ``num_query_heads`` is a multiple of ``num_kv_heads``:
    query head ``h`` reads KV head ``h // (num_query_heads // num_kv_heads)``. Slots that ``where``
    and ``lengths`` do not name are never read into a result, whatever they hold.

    scale: factor on query-key products.
    window: if > 0, position ``i`` attends the positions ``i - window < j <= i``.
    softcap: if > 0, scaled scores ``s`` become ``softcap * tanh(s / softcap)``.
    out: where to write the result (contiguous, of the query's shape and dtype).
    """

    @staticmethod
    def store_kv(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> None:
        """Write the KV of new tokens.

        key, value: ``[num_tokens, num_kv_heads, head_dim]``.
        slots: int64 ``[num_tokens]``, distinct; -1 for a token that is not written (padding of a batch).
        """

    @staticmethod
    def decode_attention(
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        where: BlockTables | BaseSlots,
        lengths: Tensor,
        *,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
        out: Tensor | None = None,
    ) -> Tensor:
        """Attention of each sequence's last token, whose KV is stored, over the whole sequence.

        query: ``[num_sequences, num_query_heads, head_dim]``.
        lengths: int32 ``[num_sequences]``, tokens in the pool, the last one included. A row of
            length 0 (padding of a batch) yields zeros.
        """

    @staticmethod
    def prefill_attention(
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        where: BlockTables | BaseSlots,
        query_starts: Tensor,
        lengths: Tensor,
        *,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
        out: Tensor | None = None,
    ) -> Tensor:
        """Causal attention of packed new tokens over cached context.

        query: ``[num_tokens, num_query_heads, head_dim]``; rows ``query_starts[i]`` to
            ``query_starts[i + 1]`` are the last tokens of sequence ``i``, whose KV is stored.
        query_starts: int32 ``[num_sequences + 1]``, from 0 to ``num_tokens``, not decreasing.
        lengths: int32 ``[num_sequences]``, tokens in the pool, the new ones included.
        """

    @staticmethod
    def copy_slots(kv: Tensor, ranges: Tensor) -> None:
        """Copy slot ranges within a pool, all layers.

        ranges: int64 ``[n, 3]`` on the host, rows ``(source slot, destination slot, number of slots)``,
            with the effect of running them in order. Source and destination of one row do not overlap.
        """

    @staticmethod
    def transfer_slots(source_kv: Tensor, destination_kv: Tensor, ranges: Tensor) -> None:
        """Copy slot ranges from one pool to another, which may be on different devices.

        The pools differ in ``num_slots`` at most. ``ranges`` as in :meth:`copy_slots`; destinations
        are distinct. On return the source may be overwritten by later work on the same stream.
        """


def load(name: str) -> Kernels:
    """The implementation called ``name``.

    Raises ValueError on an unknown name and KernelsUnavailable where it cannot run.
    """
    if name not in IMPLEMENTATIONS:
        raise ValueError(f"unknown kernels {name!r}: use one of {', '.join(IMPLEMENTATIONS)}")
    try:
        return cast(Kernels, importlib.import_module(IMPLEMENTATIONS[name]))
    except ImportError as error:
        raise KernelsUnavailable(f"kernels {name!r} cannot be used here: {error}") from error
