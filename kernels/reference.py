"""The specification: every operation in plain torch, in float64, one sequence at a time."""

import torch
from torch import Tensor

from kernels.addressing import BaseSlots, BlockTables


def store_kv(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> None:
    written = slots != -1
    key_cache[slots[written]] = key[written]
    value_cache[slots[written]] = value[written]


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
    out = torch.empty_like(query) if out is None else out
    for i, length in enumerate(lengths.tolist()):
        slots = where.slots(i, length)
        out[i : i + 1] = _attend(query[i : i + 1], key_cache[slots], value_cache[slots], scale, window, softcap)
    return out


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
    out = torch.empty_like(query) if out is None else out
    starts = query_starts.tolist()
    for i, length in enumerate(lengths.tolist()):
        rows = slice(starts[i], starts[i + 1])
        slots = where.slots(i, length)
        out[rows] = _attend(query[rows], key_cache[slots], value_cache[slots], scale, window, softcap)
    return out


def copy_slots(kv: Tensor, ranges: Tensor) -> None:
    transfer_slots(kv, kv, ranges)


def transfer_slots(source_kv: Tensor, destination_kv: Tensor, ranges: Tensor) -> None:
    for source, destination, count in ranges.tolist():
        destination_kv[:, :, destination : destination + count] = source_kv[:, :, source : source + count]


def _attend(query: Tensor, key: Tensor, value: Tensor, scale: float, window: int, softcap: float) -> Tensor:
    """Attention of a sequence's last tokens over all of it.

    query: ``[num_queries, num_query_heads, head_dim]``; key, value: ``[length, num_kv_heads, head_dim]``.
    """
    num_queries, num_query_heads, _ = query.shape
    length, num_kv_heads, _ = key.shape
    key, value = (x.double().repeat_interleave(num_query_heads // num_kv_heads, dim=1) for x in (key, value))

    scores = torch.einsum("qhd,khd->hqk", query.double(), key) * scale
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    key_position = torch.arange(length, device=query.device)
    query_position = torch.arange(length - num_queries, length, device=query.device)[:, None]
    visible = key_position <= query_position
    if window > 0:
        visible &= key_position > query_position - window
    probabilities = scores.masked_fill(~visible, -torch.inf).softmax(dim=-1)
    return torch.einsum("hqk,khd->qhd", probabilities, value).to(query.dtype)
