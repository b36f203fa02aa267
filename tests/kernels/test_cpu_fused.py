"""What a decoder layer does between its products, against float64."""

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels import cpu_program
from kernels.cpu import KINDS
from kernels.cpu_fused import NORM, ROTATION, rms_norm, rotate_and_store

DTYPES = [torch.float32, torch.bfloat16]
EPSILON = 1e-5


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def norm(x: Tensor, weight: Tensor, num_threads: int = 1) -> Tensor:
    out = torch.full_like(x, torch.nan)
    addresses = x.data_ptr(), weight.data_ptr(), out.data_ptr()
    arguments = np.array((*addresses, x.shape[1], EPSILON, 0), NORM)
    cpu_program.run_one(rms_norm().address, arguments.ctypes.data, len(x), num_threads)
    return out


def rotate(
    qkv: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, num_query_heads: int, key: Tensor, value: Tensor
) -> Tensor:
    query = torch.full((len(qkv), num_query_heads, qkv.shape[2]), torch.nan)
    addresses = [tensor.data_ptr() for tensor in (qkv, cos, sin, query, key, value, slots)]
    kind = KINDS[key.dtype]
    arguments = np.array((*addresses, num_query_heads, key.shape[1], qkv.shape[2], kind), ROTATION)
    cpu_program.run_one(rotate_and_store().address, arguments.ctypes.data, len(qkv), 1)
    return query


@pytest.mark.parametrize(("num_rows", "size"), [(1, 2), (3, 7), (5, 64), (4, 576), (33, 130)])
def test_rms_norm(num_rows: int, size: int) -> None:
    x, weight = random(num_rows, size), random(size, seed=1)
    x[0] *= 1e-3  # a row in which epsilon counts
    before = x.clone()
    exact = x.double()
    exact = weight.double() * exact / (exact.square().mean(-1, keepdim=True) + EPSILON).sqrt()
    assert ((norm(x, weight).double() - exact).abs() <= 1e-6 * exact.abs()).all()
    assert torch.equal(x, before)


def test_a_row_depends_neither_on_the_batch_nor_on_threads() -> None:
    x, weight = random(9, 130), random(130, seed=1)
    together = norm(x, weight)
    assert torch.equal(together, norm(x, weight, num_threads=2))
    assert torch.equal(together, torch.cat([norm(row[None].clone(), weight) for row in x]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("num_tokens", "num_query_heads", "num_kv_heads", "head_dim"), [(1, 2, 2, 2), (7, 4, 1, 64), (5, 6, 2, 24)]
)
def test_rotate_and_store(
    num_tokens: int, num_query_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
) -> None:
    qkv = random(num_tokens, num_query_heads + 2 * num_kv_heads, head_dim)
    cos, sin = random(num_tokens, head_dim, seed=1), random(num_tokens, head_dim, seed=2)
    slots = torch.randperm(11, generator=torch.Generator().manual_seed(3))[:num_tokens]
    key, value = torch.full((2, 11, num_kv_heads, head_dim), 7.0, dtype=dtype)
    query = rotate(qkv, cos, sin, slots, num_query_heads, key, value)

    x = qkv[:, : num_query_heads + num_kv_heads].double()
    low, high = x.chunk(2, dim=-1)
    terms = x * cos[:, None].double(), torch.cat([-high, low], dim=-1) * sin[:, None].double()
    exact, bound = terms[0] + terms[1], 1e-6 * (terms[0].abs() + terms[1].abs())
    assert ((query - exact[:, :num_query_heads]).abs() <= bound[:, :num_query_heads]).all()
    rounding = torch.finfo(dtype).eps / 2 * exact.abs()
    assert ((key[slots] - exact[:, num_query_heads:]).abs() <= (bound + rounding)[:, num_query_heads:]).all()
    assert torch.equal(value[slots], qkv[:, num_query_heads + num_kv_heads :].to(dtype))
    others = torch.ones(11, dtype=torch.bool).index_fill(0, slots, False)
    assert (key[others] == 7).all()
    assert (value[others] == 7).all()


def test_stored_kv_is_rounded_to_nearest_even() -> None:
    """Values half way between two bfloat16, overflow, infinities and values that are not numbers."""
    special = torch.tensor([0x7FFFFFFF, 0x7F800001], dtype=torch.int32).view(torch.float32)  # both NaN
    ties = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8, 3.4e38, torch.inf, -torch.inf])
    values = torch.cat([ties, special])
    qkv = torch.stack([torch.zeros(8), values, values])[None]
    key, value = torch.zeros(2, 1, 1, 8, dtype=torch.bfloat16)
    rotate(qkv, torch.ones(1, 8), torch.zeros(1, 8), torch.zeros(1, dtype=torch.int64), 1, key, value)
    torch.testing.assert_close(value[0, 0], values.bfloat16(), rtol=0, atol=0, equal_nan=True)
