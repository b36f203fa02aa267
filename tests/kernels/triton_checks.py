"""Triton kernels against the float64 reference, on any device: shared by interpreter and GPU tests.

Checks take plain cases and raise AssertionError, so that they can run in another process.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernels import reference, triton_attention, triton_data
from kernels.addressing import BaseSlots, BlockTables

# Largest relative error of an output row, by norm.
TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 1e-2}


@dataclass(frozen=True)
class AttentionCase:
    """new: new tokens of each sequence (prefill); block_size 0: contiguous."""

    lengths: tuple[int, ...]
    new: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float32
    heads: tuple[int, int] = (6, 2)
    head_dim: int = 16
    block_size: int = 16
    window: int = 0
    softcap: float = 0.0

    @property
    def options(self) -> dict[str, Any]:
        return {"scale": self.head_dim**-0.5, "window": self.window, "softcap": self.softcap}

    @property
    def name(self) -> str:
        layout = f"block{self.block_size}" if self.block_size else "contiguous"
        lengths = f"{len(self.lengths)}x{max(self.lengths)}"
        options = f"-window{self.window}" * bool(self.window) + f"-softcap{self.softcap}" * bool(self.softcap)
        heads = "/".join(map(str, self.heads))
        return f"{str(self.dtype)[6:]}-{heads}x{self.head_dim}-{layout}-{lengths}{options}"


Case = AttentionCase
half = torch.float16
DECODE_CASES = [
    Case((300, 17, 1, 0)),  # a split context, an odd tail, one token, a padding row
    Case((300, 17, 1, 0), block_size=0),
    Case((1000,), heads=(1, 1), head_dim=8, block_size=8),  # more splits than tiles
    Case((40, 1) * 9, heads=(1, 1)),  # as many programs as fill the device: no split
    Case((33, 16), block_size=1),
    Case((33, 16), block_size=5, heads=(4, 4)),
    Case((70, 1), block_size=256, head_dim=96, heads=(4, 1)),
    Case((130, 64), dtype=half, head_dim=64, heads=(9, 3)),
    Case((130, 64), dtype=half, head_dim=80, heads=(2, 2), block_size=0),
    Case((130, 64, 63), dtype=half, head_dim=128, block_size=64),  # a tile is a block
    Case((70, 31), dtype=half, head_dim=256, heads=(2, 1), block_size=128),
    Case((290, 9), window=7),
    Case((600, 300), window=280, block_size=0, heads=(2, 1)),
    Case((600, 300), window=280, block_size=128, heads=(2, 1)),
    Case((90, 3), softcap=2.0),
    Case((90, 3), softcap=30.0, window=50, dtype=half, block_size=0),
]
PREFILL_CASES = [
    Case((40, 17, 5, 1), new=(40, 3, 0, 1)),  # a prompt, a chunk, nothing, a single token
    Case((40, 17, 5, 1), new=(40, 3, 0, 1), block_size=0),
    Case((1, 2) * 66, new=(1, 2) * 66, heads=(1, 1), head_dim=8, block_size=1),  # sequence search in chunks
    Case((140, 20), new=(130, 20), dtype=half, heads=(2, 1), head_dim=32),  # tall query tiles
    Case((100, 20), new=(33, 20), dtype=half, heads=(2, 1), head_dim=80, block_size=5),
    Case((70, 9), new=(5, 9), dtype=half, heads=(2, 2), head_dim=128, block_size=64),
    Case((20, 9), new=(5, 9), heads=(2, 1), head_dim=96, block_size=256),
    Case((70,), new=(68,), dtype=half, heads=(1, 1), head_dim=256, block_size=0),
    Case((90, 30), new=(30, 30), window=7, heads=(2, 1)),
    Case((150, 150), new=(130, 140), window=60, dtype=half, heads=(2, 1), block_size=0),
    Case((50, 3), new=(20, 3), softcap=2.0, heads=(2, 1)),
]


def check_decode(case: AttentionCase, device: str = "cpu") -> None:
    torch.manual_seed(0)
    key_cache, value_cache, where = _poisoned_pool(case)
    query = _packed_heads(len(case.lengths), case)[0]
    lengths = torch.tensor(case.lengths, dtype=torch.int32)
    expected = reference.decode_attention(query.double(), key_cache, value_cache, where, lengths, **case.options)
    query, key_cache, value_cache = (x.to(device) for x in (query, key_cache, value_cache))
    out = triton_attention.decode_attention(
        query, key_cache, value_cache, _to(where, device), lengths.to(device), **case.options
    )
    _assert_close(out, expected, case)


def check_prefill(case: AttentionCase, device: str = "cpu") -> None:
    torch.manual_seed(0)
    key_cache, value_cache, where = _poisoned_pool(case)
    query = _packed_heads(sum(case.new), case)[0]
    starts = torch.tensor((0, *case.new)).cumsum(0).int()
    lengths = torch.tensor(case.lengths, dtype=torch.int32)
    expected = reference.prefill_attention(
        query.double(), key_cache, value_cache, where, starts, lengths, **case.options
    )
    query, key_cache, value_cache = (x.to(device) for x in (query, key_cache, value_cache))
    starts, lengths = starts.to(device), lengths.to(device)
    out = triton_attention.prefill_attention(
        query, key_cache, value_cache, _to(where, device), starts, lengths, **case.options
    )
    _assert_close(out, expected, case)


def check_store(case: AttentionCase, device: str = "cpu") -> None:
    torch.manual_seed(0)
    num_tokens = sum(case.lengths)
    _, key, value = _packed_heads(num_tokens, case)
    shape = (2 * num_tokens, case.heads[1], case.head_dim)
    expected = torch.randn(2, *shape).to(case.dtype)
    actual = expected.to(device, copy=True)
    slots = torch.randperm(shape[0])[:num_tokens]
    slots[1::3] = -1
    reference.store_kv(key, value, expected[0], expected[1], slots)
    triton_data.store_kv(key.to(device), value.to(device), actual[0], actual[1], slots.to(device))
    assert torch.equal(actual.cpu(), expected), case


def check_copy(ranges: list[tuple[int, int, int]], dtype: torch.dtype, device: str = "cpu") -> None:
    expected = _pool(dtype, num_slots=64)
    actual = expected.to(device, copy=True)
    rows = torch.tensor(ranges, dtype=torch.int64).reshape(-1, 3)
    reference.copy_slots(expected, rows)
    triton_data.copy_slots(actual, rows)
    assert torch.equal(actual.cpu(), expected), ranges


def check_transfer(
    ranges: list[tuple[int, int, int]], source: str = "cpu", destination: str = "cpu", staged_slots: int = 3
) -> None:
    """staged_slots: slots that the staging buffer holds, few so that a transfer takes several steps."""
    pools = _pool(torch.float16, num_slots=64), _pool(torch.float16, num_slots=40)
    source_kv, destination_kv = pools[0].to(source), pools[1].to(destination, copy=True)
    rows = torch.tensor(ranges, dtype=torch.int64).reshape(-1, 3)
    reference.transfer_slots(*pools, rows)
    usual = triton_data.STAGING_BYTES
    triton_data.STAGING_BYTES = staged_slots * pools[0][:, :, 0].nbytes
    try:
        triton_data.transfer_slots(source_kv, destination_kv, rows)
    finally:
        triton_data.STAGING_BYTES = usual
    assert torch.equal(destination_kv.cpu(), pools[1]), ranges


def _pool(dtype: torch.dtype, num_slots: int) -> Tensor:
    return torch.randn(3, 2, num_slots, 2, 24, generator=torch.Generator().manual_seed(num_slots)).to(dtype)


def _packed_heads(num_tokens: int, case: AttentionCase) -> tuple[Tensor, ...]:
    """Query, key and value as views of one fused projection: strided, as models produce them."""
    num_query_heads, num_kv_heads = case.heads
    packed = torch.randn(num_tokens, num_query_heads + 2 * num_kv_heads, case.head_dim).to(case.dtype)
    return packed.split([num_query_heads, num_kv_heads, num_kv_heads], dim=1)


def _poisoned_pool(case: AttentionCase) -> tuple[Tensor, Tensor, BlockTables | BaseSlots]:
    """Caches that hold NaN in every slot that no sequence owns, blocks or regions in shuffled order."""
    num_sequences = len(case.lengths)
    if case.block_size:
        max_blocks = max(-(-length // case.block_size) for length in case.lengths)
        num_blocks = num_sequences * max_blocks
        tables = torch.randperm(num_blocks).reshape(num_sequences, max_blocks).int()
        for i, length in enumerate(case.lengths):
            tables[i, -(-length // case.block_size) :] = num_blocks  # never to be followed: a block of NaN
        where: BlockTables | BaseSlots = BlockTables(tables, case.block_size)
        num_slots = (num_blocks + 1) * case.block_size
    else:
        region = max(case.lengths) + 3
        where = BaseSlots(torch.randperm(num_sequences) * region + 1)
        num_slots = num_sequences * region + 1
    caches = torch.full((2, num_slots, case.heads[1], case.head_dim), torch.nan, dtype=case.dtype)
    for i, length in enumerate(case.lengths):
        slots = where.slots(i, length)
        caches[:, slots] = torch.randn(2, length, *caches.shape[2:]).to(case.dtype)
    return caches[0], caches[1], where


def _to(where: BlockTables | BaseSlots, device: str) -> BlockTables | BaseSlots:
    if isinstance(where, BlockTables):
        return BlockTables(where.tables.to(device), where.block_size)
    return BaseSlots(where.bases.to(device))


def _assert_close(actual: Tensor, expected: Tensor, case: AttentionCase) -> None:
    difference = (actual.cpu().double() - expected).norm(dim=-1)
    error = difference / expected.norm(dim=-1).clamp_min(1e-30)
    assert bool((error <= TOLERANCE[case.dtype]).all()), f"{case.name}: relative errors {error}"
