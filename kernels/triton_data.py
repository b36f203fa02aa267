"""Movement of KV in Triton: storing new tokens, copying slots within a pool and between pools.

All kernels move bytes and compute nothing; the limit is memory (PCIe between tiers). Per slot of
``b`` bytes, over all layers: storing and copying read ``b`` and write ``b``; a transfer between tiers
reads and writes ``b`` on each tier (staging) and moves ``b`` over the link.

Storing is not fused with the rotary embedding, which a model applies before it calls attention. Per layer, fusing
would save one write and one read of a new token's K, half of what storing moves; attention then reads the K and V of
``L`` tokens, so that is ``1 / L`` of its bytes: 0.2 % at 512 tokens of context. What a rotary embedding of small
operations costs a decode step is their launches, which a CUDA graph makes cheap and which fusing the keys' half
would not remove: the queries' half would still be launched. It would pay as part of a rewritten layer only.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.memory import upload
from kernels.triton_launch import INTERPRETED, Launch

# Elements per program: 8 of half precision, one 16-byte access, for each of 128 threads.
CHUNK = 1024
SLOTS_PER_PROGRAM = 8
STAGING_BYTES = 64 * 1024 * 1024


@triton.jit
def store_kernel(
    key,
    value,
    key_cache,
    value_cache,
    slots,
    key_stride,
    key_head_stride,
    value_stride,
    value_head_stride,
    HEAD_DIM: tl.constexpr,
    SLOT_SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """One program: a chunk of one token's K and V."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    if slot < 0:
        return
    elements = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    mask = elements < SLOT_SIZE
    head, dim = elements // HEAD_DIM, elements % HEAD_DIM
    destination = slot * SLOT_SIZE + elements
    new_key = tl.load(key + token * key_stride + head * key_head_stride + dim, mask=mask)
    new_value = tl.load(value + token * value_stride + head * value_head_stride + dim, mask=mask)
    tl.store(key_cache + destination, new_key, mask=mask)
    tl.store(value_cache + destination, new_value, mask=mask)


@triton.jit(do_not_specialize=["num_slots"])
def copy_kernel(
    source,
    destination,
    source_slots,
    destination_slots,
    num_slots,
    source_plane_stride,
    destination_plane_stride,
    SLOT_SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """One program: a chunk of SLOTS slots in one plane, a layer's K or V."""
    indices = tl.program_id(0) * SLOTS + tl.arange(0, SLOTS)
    plane = tl.program_id(1).to(tl.int64)
    elements = tl.program_id(2) * CHUNK + tl.arange(0, CHUNK)
    listed = indices < num_slots
    mask = listed[:, None] & (elements < SLOT_SIZE)[None, :]
    from_slot = tl.load(source_slots + indices, mask=listed, other=0)[:, None]
    to_slot = tl.load(destination_slots + indices, mask=listed, other=0)[:, None]
    from_plane = source + plane * source_plane_stride
    to_plane = destination + plane * destination_plane_stride
    moved = tl.load(from_plane + from_slot * SLOT_SIZE + elements[None, :], mask=mask)
    tl.store(to_plane + to_slot * SLOT_SIZE + elements[None, :], moved, mask=mask)


def store_kv(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> None:
    store_launch(key, value, key_cache, value_cache, slots).run()


def store_launch(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> Launch:
    num_tokens, num_kv_heads, head_dim = key.shape
    caches_contiguous = key_cache.is_contiguous() and value_cache.is_contiguous()
    if not (caches_contiguous and key.stride(2) == value.stride(2) == 1):
        raise ValueError("key_cache, value_cache and each head of key and value must be contiguous")
    slot_size = num_kv_heads * head_dim
    arguments: dict[str, Any] = {
        "key": key,
        "value": value,
        "key_cache": key_cache,
        "value_cache": value_cache,
        "slots": slots,
        "key_stride": key.stride(0),
        "key_head_stride": key.stride(1),
        "value_stride": value.stride(0),
        "value_head_stride": value.stride(1),
        "HEAD_DIM": head_dim,
        "SLOT_SIZE": slot_size,
    }
    return Launch(store_kernel, (num_tokens, triton.cdiv(slot_size, CHUNK)), {**arguments, "CHUNK": CHUNK})


def copy_slots(kv: Tensor, ranges: Tensor) -> None:
    for batch in independent_batches(ranges):
        source, destination = (upload(slots, kv.device) for slots in slots_of(batch))
        copy_launch(kv, kv, source, destination).run()


def copy_launch(source_kv: Tensor, destination_kv: Tensor, source_slots: Tensor, destination_slots: Tensor) -> Launch:
    """Copy slots of all layers in one launch; slots: int64 ``[n]`` on the pools' device."""
    num_layers, _, _, num_kv_heads, head_dim = source_kv.shape
    if not (source_kv.is_contiguous() and destination_kv.is_contiguous()):
        raise ValueError("a pool must be contiguous")
    slot_size = num_kv_heads * head_dim
    num_slots = source_slots.shape[0]
    return Launch(
        copy_kernel,
        (triton.cdiv(num_slots, SLOTS_PER_PROGRAM), num_layers * 2, triton.cdiv(slot_size, CHUNK)),
        {
            "source": source_kv,
            "destination": destination_kv,
            "source_slots": source_slots,
            "destination_slots": destination_slots,
            "num_slots": num_slots,
            "source_plane_stride": source_kv.stride(1),
            "destination_plane_stride": destination_kv.stride(1),
            "SLOT_SIZE": slot_size,
            "CHUNK": min(CHUNK, triton.next_power_of_2(slot_size)),
            "SLOTS": SLOTS_PER_PROGRAM,
        },
    )


def slots_of(ranges: Tensor) -> tuple[Tensor, Tensor]:
    """Source and destination of every slot that the ranges name, int64 ``[sum of counts]`` each."""
    source, destination, count = ranges.unbind(1)
    first = count.cumsum(0) - count
    offset = torch.arange(int(count.sum())) - first.repeat_interleave(count)
    return source.repeat_interleave(count) + offset, destination.repeat_interleave(count) + offset


def independent_batches(ranges: Tensor) -> list[Tensor]:
    """The ranges in order, cut so that within a batch any order has the effect of the given one."""
    if ranges.shape[0] <= 1 or _independent(ranges[ranges[:, 2] > 0]):
        return [ranges]
    middle = ranges.shape[0] // 2
    return independent_batches(ranges[:middle]) + independent_batches(ranges[middle:])


def _independent(ranges: Tensor) -> bool:
    """No destination overlaps another destination or a source."""
    source, destination, count = ranges.unbind(1)
    starts, order = destination.sort()
    stops = starts + count[order]
    if bool((stops[:-1] > starts[1:]).any()):
        return False
    # The last destination that starts before a source ends is the only one that can reach into it.
    last = torch.searchsorted(starts, source + count) - 1
    return not bool(((last >= 0) & (stops[last] > source)).any())


def transfer_slots(source_kv: Tensor, destination_kv: Tensor, ranges: Tensor) -> None:
    """As :meth:`kernels.Kernels.transfer_slots`, in steps of a staging buffer of 64 MiB per tier.

    To the host it waits for the stream, since the host then scatters; from the host it does not.
    """
    source_slots, destination_slots = slots_of(ranges)
    slot_bytes = source_kv[:, :, 0].numel() * source_kv.element_size()
    step = max(1, STAGING_BYTES // slot_bytes)
    for source, destination in zip(source_slots.split(step), destination_slots.split(step), strict=True):
        _scatter(_to_tier(_gather(source_kv, source), destination_kv.device), destination_kv, destination)


def _gather(kv: Tensor, slots: Tensor) -> Tensor:
    """The slots, packed: ``[num_layers, 2, n, num_kv_heads, head_dim]`` on the pool's tier."""
    staged = _staging(kv, (*kv.shape[:2], len(slots), *kv.shape[3:]), kv.device)
    if _on_host(kv):
        torch.index_select(kv, 2, slots, out=staged)
    else:
        copy_launch(kv, staged, upload(slots, kv.device), torch.arange(len(slots), device=kv.device)).run()
    return staged


def _to_tier(staged: Tensor, device: torch.device) -> Tensor:
    if staged.device == device:
        return staged
    arrived = _staging(staged, staged.shape, device)
    return arrived.copy_(staged, non_blocking=device.type == "cuda")


def _scatter(staged: Tensor, kv: Tensor, slots: Tensor) -> None:
    if _on_host(kv):
        kv.index_copy_(2, slots, staged)
    else:
        copy_launch(staged, kv, torch.arange(len(slots), device=kv.device), upload(slots, kv.device)).run()


def _staging(like: Tensor, shape: tuple[int, ...], device: torch.device) -> Tensor:
    """A buffer on the device, page-locked on the host so that copies run at the link's speed."""
    pinned = device.type == "cpu" and torch.cuda.is_available()
    return torch.empty(shape, dtype=like.dtype, device=device, pin_memory=pinned)


def _on_host(kv: Tensor) -> bool:
    """Whether the host moves this pool's slots: kernels run on CUDA tensors, or interpreted on any."""
    return kv.device.type == "cpu" and not INTERPRETED
