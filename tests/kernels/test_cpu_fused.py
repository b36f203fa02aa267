"""What a decoder layer does between its products, against float64."""

import pytest
import torch
from torch import Tensor

from kernels.cpu_fused import add_rms_norm, array, rms_norm, rotary, silu_mul

DTYPES = [torch.float32, torch.bfloat16]
EPSILON = 1e-5
every_dtype = pytest.mark.parametrize("dtype", DTYPES)
every_size = pytest.mark.parametrize(("num_rows", "size"), [(1, 2), (3, 7), (5, 64), (4, 576), (33, 130)])


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_rounded_once(got: Tensor, exact: Tensor, scale: Tensor | None = None) -> None:
    """Within float32's error of sums of terms as large as ``scale``, then half a unit of the dtype."""
    scale = exact.abs() if scale is None else scale
    bound = 1e-6 * scale
    if got.dtype == torch.bfloat16:
        bound = bound + exact.abs() * torch.finfo(torch.bfloat16).eps / 2
    assert ((got.double() - exact).abs() <= bound).all()


def exact_norm(x: Tensor, weight: Tensor) -> Tensor:
    x = x.double()
    return weight.double() * x / (x.square().mean(-1, keepdim=True) + EPSILON).sqrt()


@every_dtype
@every_size
def test_rms_norm(num_rows: int, size: int, dtype: torch.dtype) -> None:
    x, weight = random(num_rows, size, dtype=dtype), random(size, dtype=dtype, seed=1)
    x[0] *= 1e-3  # a row in which epsilon counts
    before, out = x.clone(), torch.empty_like(x)
    rms_norm(array(x), array(weight), EPSILON, array(out))
    assert torch.equal(x, before)
    assert_rounded_once(out, exact_norm(x, weight))


@every_dtype
@every_size
def test_add_rms_norm(num_rows: int, size: int, dtype: torch.dtype) -> None:
    residual, x = random(num_rows, size, dtype=dtype), random(num_rows, size, dtype=dtype, seed=1)
    weight, out = random(size, dtype=dtype, seed=2), torch.empty_like(x)
    total = residual + x
    add_rms_norm(array(residual), array(x), array(weight), EPSILON, array(out))
    assert torch.equal(residual, total)
    assert_rounded_once(out, exact_norm(total, weight))


@every_dtype
@pytest.mark.parametrize(("num_tokens", "num_heads", "num_rotated", "head_dim"), [(1, 4, 2, 2), (7, 5, 4, 64)])
def test_rotary(num_tokens: int, num_heads: int, num_rotated: int, head_dim: int, dtype: torch.dtype) -> None:
    heads = random(num_tokens, num_heads, head_dim, dtype=dtype)
    cos, sin = (random(num_tokens, head_dim, dtype=dtype, seed=seed) for seed in (1, 2))
    before = heads.clone()
    rotary(array(heads), num_rotated, array(cos), array(sin))
    x = before[:, :num_rotated].double()
    halves = x.chunk(2, dim=-1)
    turned = torch.cat([-halves[1], halves[0]], dim=-1)
    terms = x * cos[:, None].double(), turned * sin[:, None].double()
    assert_rounded_once(heads[:, :num_rotated], terms[0] + terms[1], terms[0].abs() + terms[1].abs())
    assert torch.equal(heads[:, num_rotated:], before[:, num_rotated:])


@every_dtype
@every_size
def test_silu_mul(num_rows: int, size: int, dtype: torch.dtype) -> None:
    gate_up, out = 4 * random(num_rows, 2 * size, dtype=dtype), torch.empty(num_rows, size, dtype=dtype)
    silu_mul(gate_up, out)
    gate, up = gate_up.double().chunk(2, dim=1)
    exact = gate * gate.sigmoid() * up
    error = 1e-6 if dtype == torch.float32 else 1.01 * torch.finfo(dtype).eps  # half a unit, twice
    assert ((out.double() - exact).abs() <= error * exact.abs()).all()


def test_bfloat16_is_rounded_to_nearest_even() -> None:
    """Sums half way between two bfloat16, overflow, infinities and values that are not numbers."""
    x = torch.tensor([1.0, 1.0, 1.0078125, -1.0078125, 3.38e38, torch.inf, torch.nan, torch.inf]).bfloat16()
    y = torch.tensor([2**-8, 3 * 2**-8, 2**-8, -(2**-8), 3.38e38, 1.0, 1.0, -torch.inf]).bfloat16()
    residual, total = x.clone()[None], (x.float() + y.float()).bfloat16()
    add_rms_norm(
        array(residual), array(y[None]), array(torch.ones_like(x)), EPSILON, array(torch.empty(1, 8).bfloat16())
    )
    torch.testing.assert_close(residual[0], total, rtol=0, atol=0, equal_nan=True)


@every_dtype
def test_a_row_does_not_depend_on_the_batch(dtype: torch.dtype) -> None:
    x, weight = random(9, 130, dtype=dtype), random(130, dtype=dtype, seed=1)
    together, alone = torch.empty_like(x), torch.empty_like(x)
    rms_norm(array(x), array(weight), EPSILON, array(together))
    for row in range(9):
        rms_norm(array(x[row : row + 1]), array(weight), EPSILON, array(alone[row : row + 1]))
    assert torch.equal(alone, together)


def test_arrays_that_do_not_fit_are_refused() -> None:
    x, weight = array(torch.zeros(2, 8)), array(torch.zeros(8))
    with pytest.raises(ValueError, match="rms_norm: shapes differ"):
        rms_norm(x, weight, EPSILON, x[:1])
    with pytest.raises(ValueError, match="rms_norm: shapes differ"):
        rms_norm(x, weight[:4], EPSILON, x)
    with pytest.raises(ValueError, match="add_rms_norm: shapes differ"):
        add_rms_norm(x[:1], x, weight, EPSILON, x)
    with pytest.raises(ValueError, match="rotary: shapes differ"):
        rotary(x.reshape(2, 2, 4), 1, x, x)
    with pytest.raises(ValueError, match="rotary: shapes differ"):
        rotary(x.reshape(2, 1, 8), 2, x, x)
    for tensor in (torch.zeros(4, 8).T, torch.zeros(2, dtype=torch.float16)):
        with pytest.raises(ValueError, match="expected a contiguous float32 or bfloat16"):
            array(tensor)
