"""Reading KV in either layout reads every token's K and V once, and nothing else."""

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from kernels import BaseSlots, BlockTables
from kernels.cpu_read import read_kv


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@example(lengths=[0], block_size=1, seed=0)
@given(
    lengths=st.lists(st.integers(0, 70), min_size=1, max_size=5),
    block_size=st.sampled_from([0, 1, 3, 16, 40]),
    seed=st.integers(0, 99),
)
def test_every_token_once(dtype: torch.dtype, lengths: list[int], block_size: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    count, blocks_each = len(lengths), -(-max(lengths) // max(1, block_size))
    where: BlockTables | BaseSlots = BaseSlots(torch.arange(count) * 70)
    num_slots = 70 * count
    if block_size:
        order = torch.randperm(count * blocks_each, generator=generator, dtype=torch.int32)
        where, num_slots = BlockTables(order.view(count, -1), block_size), order.numel() * block_size
    words = torch.randint(0, 100, (2, num_slots, 2, 8 if dtype == torch.float32 else 4), generator=generator)
    kv = words.float().view(dtype).contiguous()  # small integers: sums are exact in any order
    sums = read_kv(kv[0], kv[1], where, torch.tensor(lengths, dtype=torch.int32))
    expected = [float(words[:, where.slots(i, length)].sum()) for i, length in enumerate(lengths)]
    assert sums.tolist() == expected
