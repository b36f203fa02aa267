"""Decoder layers over a pool give what they give with attention from outside."""

import dataclasses

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels import BaseSlots, BlockTables, cpu
from kernels.cpu_decoder import Attention, Decoder, Layer
from kernels.cpu_linear import PackedWeight

SIZE, HEADS, KV_HEADS, HEAD_DIM, INNER, NUM_SLOTS = 48, 4, 2, 16, 40, 64
WINDOWS = (0, 3, 0)


def weight(generator: torch.Generator, rows: int, columns: int, dtype: torch.dtype, **kind: bool) -> PackedWeight:
    return PackedWeight((torch.randn(rows, columns, generator=generator) / columns**0.5).to(dtype), **kind)


def layers(dtype: torch.dtype) -> list[Layer]:
    """Whose order is not that of the pool's layers."""
    g = torch.Generator().manual_seed(0)
    return [
        Layer(
            index=len(WINDOWS) - 1 - i,
            input_norm=torch.rand(SIZE, generator=g),
            input_epsilon=1e-5,
            qkv=weight(g, (HEADS + 2 * KV_HEADS) * HEAD_DIM, SIZE, dtype),
            scale=0.2 + i / 10,
            window=window,
            output=weight(g, SIZE, HEADS * HEAD_DIM, dtype),
            mlp_norm=torch.rand(SIZE, generator=g),
            mlp_epsilon=1e-6,
            gate_up=weight(g, 2 * INNER, SIZE, dtype, is_gated=True),
            down=weight(g, SIZE, INNER, dtype),
        )
        for i, window in enumerate(WINDOWS)
    ]


@dataclasses.dataclass
class Step:
    """Two sequences decode and two prefill, at random places."""

    hidden: Tensor
    cos: Tensor
    sin: Tensor
    kv: Tensor
    slots: Tensor
    parts: list[Attention]


def step(dtype: torch.dtype, *, paged: bool, context: int = 5, prompts: tuple[int, ...] = (3, 20)) -> Step:
    g = torch.Generator().manual_seed(1)
    kv = torch.randn(len(WINDOWS), 2, NUM_SLOTS, KV_HEADS, HEAD_DIM, generator=g).to(dtype)
    lengths = [context, context + 2, *prompts]
    new = [1, 1, *prompts]
    bases = np.cumsum([0, *lengths[:-1]])
    where: list[BlockTables | BaseSlots] = []
    for part in np.split(bases, [2]):
        tables = (part[:, None] + np.arange(32)).astype(np.int32)
        where.append(BlockTables(torch.from_numpy(tables), 1) if paged else BaseSlots(torch.from_numpy(part)))
    slots = [slot for b, n, m in zip(bases, lengths, new, strict=True) for slot in range(b + n - m, b + n)]
    starts = [np.array([0, 1, 2], np.int32), np.cumsum([0, *prompts]).astype(np.int32)]
    size = torch.tensor(lengths, dtype=torch.int32)
    parts = [Attention(f, w, s, n) for f, w, s, n in zip((0, 2), where, starts, (size[:2], size[2:]), strict=True)]
    random = [torch.randn(len(slots), columns, generator=g) for columns in (SIZE, HEAD_DIM, HEAD_DIM)]
    return Step(*random, kv, torch.tensor(slots), parts)


def attended(decoder: Decoder, s: Step) -> Tensor:
    """What the layers give with the attention of each on its own."""

    def attend(layer: Layer, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        keys, values = s.kv[layer.index]
        cpu.store_kv(key, value, keys, values, s.slots)
        results = []
        for part in s.parts:
            rows = query[part.first : part.first + part.query_starts[-1]]
            starts, options = torch.from_numpy(part.query_starts), {"scale": layer.scale, "window": layer.window}
            results.append(cpu.prefill_attention(rows, keys, values, part.where, starts, part.lengths, **options))
        return torch.cat(results)

    return decoder.run(s.hidden, s.cos, s.sin, attend).clone()


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("paged", [True, False])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_over_a_pool(dtype: torch.dtype, tolerance: float, paged: bool, num_threads: int) -> None:
    """bfloat16: attention from outside rounds its operands, which it does not within."""
    decoder = Decoder(layers(dtype), HEADS, KV_HEADS, HEAD_DIM, dtype)
    threads = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        for options in ({}, {"context": 1}, {"prompts": ()}, {"prompts": (2, 30)}):  # smaller and larger again
            mine, other = (step(dtype, paged=paged, **options) for _ in range(2))
            got = decoder.run_pooled(mine.hidden, mine.cos, mine.sin, mine.kv, mine.slots, mine.parts).clone()
            expected = attended(decoder, other)
            assert float((got - expected).norm() / expected.norm()) < tolerance
            assert float((mine.kv - other.kv).float().norm() / other.kv.float().norm()) < tolerance
    finally:
        torch.set_num_threads(threads)


def test_slots_outside_the_pool_are_refused() -> None:
    decoder = Decoder(layers(torch.float32), HEADS, KV_HEADS, HEAD_DIM, torch.float32)
    for slot in (-1, NUM_SLOTS):
        s = step(torch.float32, paged=True)
        s.slots[3] = slot
        with pytest.raises(IndexError, match="a new token's slot is outside the pool"):
            decoder.run_pooled(s.hidden, s.cos, s.sin, s.kv, s.slots, s.parts)
    s = step(torch.float32, paged=True)
    s.parts[1].where.tables[0, 1] = NUM_SLOTS
    with pytest.raises(IndexError, match="a block table or base slot names slots outside the pool"):
        decoder.run_pooled(s.hidden, s.cos, s.sin, s.kv, s.slots, s.parts)
