"""CPU linear layers against float64."""

import ctypes

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from kernels import cpu_program, openmp
from kernels.cpu_linear import ADD, PackedWeight, linear

DTYPES = [torch.float32, torch.bfloat16]
BOUND = {torch.float32: 1e-6, torch.bfloat16: torch.finfo(torch.bfloat16).eps / 2}


def layer(
    num_rows: int, in_features: int, out_features: int, weight_dtype: torch.dtype, x_dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(num_rows + in_features + out_features)
    weight = torch.randn(out_features, in_features, generator=generator).to(weight_dtype)
    bias = torch.randn(out_features, generator=generator).to(weight_dtype)
    return torch.randn(num_rows, in_features, generator=generator).to(x_dtype), weight, bias


def exact(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())


def relative_error(got: Tensor, expected: Tensor) -> float:
    return float((got.double() - expected).norm() / expected.norm())


@given(
    num_rows=st.integers(1, 40) | st.sampled_from([64, 100]),
    in_features=st.integers(1, 40) | st.sampled_from([576, 577, 578, 579]),
    out_features=st.integers(1, 100),
    weight_dtype=st.sampled_from(DTYPES),
    x_dtype=st.sampled_from(DTYPES),
    with_bias=st.booleans(),
)
@example(12, 64, 64, torch.float32, torch.float32, False)
@example(13, 63, 65, torch.bfloat16, torch.bfloat16, True)
@example(700, 579, 40, torch.bfloat16, torch.float32, True)  # several blocks of rows
def test_agrees_with_float64(num_rows, in_features, out_features, weight_dtype, x_dtype, with_bias):
    x, weight, bias = layer(num_rows, in_features, out_features, weight_dtype, x_dtype)
    bias = bias if with_bias else None
    got = linear(x, PackedWeight(weight, bias))
    assert got.dtype == x_dtype
    expected = exact(x, weight, bias)
    # Each sum is as good as float32's and rounded by half a unit of the result's dtype at most.
    scale = exact(x.abs(), weight.abs(), None if bias is None else bias.abs())
    error = (got.double() - expected).abs()
    rounding = 0.0 if x_dtype == torch.float32 else expected.abs() * BOUND[x_dtype]
    assert (error <= rounding + 1e-6 * scale).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_rows", "size"), [(1, 1), (7, 15), (13, 16), (30, 100)])
def test_gated(num_rows, size, dtype):
    x, weight, bias = layer(num_rows, 40, 2 * size, dtype, torch.float32)
    got = linear(3 * x, PackedWeight(weight, bias, is_gated=True))
    gate, up = exact(3 * x, weight, bias).chunk(2, dim=1)
    # An error of a sum counts up to 1.1 times in silu, and up to the gate's size in the product.
    sums = exact(3 * x.abs(), weight.abs(), bias.abs()).chunk(2, dim=1)
    bound = 2e-6 * (sums[0] * up.abs() + sums[1] * gate.abs())
    assert got.shape == (num_rows, size)
    assert ((got - gate * gate.sigmoid() * up).abs() <= bound).all()


def test_extreme_gates():
    gates = torch.tensor([-1e4, -80.0, 0.0, 80.0, 1e4, torch.nan])
    weight = torch.cat([gates, torch.ones(6)])[:, None]
    got = linear(torch.ones(1, 1), PackedWeight(weight, is_gated=True))[0]
    torch.testing.assert_close(got, torch.nn.functional.silu(gates), rtol=1e-6, atol=1e-30, equal_nan=True)


@pytest.mark.parametrize("out_features", [31, 64])
def test_results_added_to_what_is_there(out_features):
    x, weight, bias = layer(14, 40, out_features, torch.bfloat16, torch.float32)
    packed = PackedWeight(weight, bias)
    out = torch.randn(14, out_features)
    before = out.clone()
    arguments = packed.arguments(ADD)
    arguments.x, arguments.output = x.data_ptr(), out.data_ptr()
    arguments.num_rows, arguments.num_blocks = len(x), 1
    cpu_program.run_one(packed.function, ctypes.addressof(arguments), packed.num_panels, 2)
    assert torch.equal(out, before + linear(x, packed))


def test_results_are_rounded_to_nearest_even():
    """Sums that bfloat16 can hold only rounded, ties among them, and values that are not numbers."""
    special = torch.tensor([0x7FFFFFFF, 0x7F800001], dtype=torch.int32).view(torch.float32)  # both NaN
    sums = torch.cat([1 + torch.arange(512) * 2.0**-9, torch.tensor([3.4e38, -3.4e38, torch.inf]), special])
    x = torch.zeros(len(sums), 2, dtype=torch.bfloat16)
    x[:, 0] = 1.0
    weight = torch.zeros(len(sums), 2)
    got = linear(x[:1], PackedWeight(weight, sums))[0]
    torch.testing.assert_close(got, sums.to(torch.bfloat16), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_depends_neither_on_the_batch_nor_on_threads(dtype):
    x, weight, bias = layer(61, 5770, 70, dtype, dtype)  # three blocks of rows
    packed = PackedWeight(weight, bias)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        together = linear(x, packed)
        for num_rows in range(1, len(x)):
            assert torch.equal(linear(x[-num_rows:], packed), together[-num_rows:])
        torch.set_num_threads(2)
        for _ in range(20):
            assert torch.equal(linear(x, packed), together)
    finally:
        torch.set_num_threads(threads)


def test_threads_without_openmp(monkeypatch):
    monkeypatch.setattr(openmp, "_gomp_parallel", lambda: None)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    x, weight, bias = layer(5, 64, 500, torch.float32, torch.float32)
    assert relative_error(linear(x, PackedWeight(weight, bias)), exact(x, weight, bias)) < 1e-6


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("out_features", [1, 31, 33, 64])
def test_nothing_outside_the_operands_is_used(dtype, out_features):
    """The surroundings of x are NaN, those of the result stay as they were."""
    x, weight, bias = layer(17, 33, out_features, dtype, dtype)
    surrounded = torch.full((19, 33), torch.nan, dtype=dtype)
    surrounded[1:-1] = x
    results = torch.full((19, out_features), 7.0, dtype=dtype)
    got = linear(surrounded[1:-1], PackedWeight(weight, bias), out=results[1:-1])
    assert got.data_ptr() == results[1].data_ptr()
    assert (results[[0, -1]] == 7).all()
    assert relative_error(got, exact(x, weight, bias)) < BOUND[dtype]


def test_a_row_that_is_not_a_number_stays_alone():
    x, weight, bias = layer(9, 40, 50, torch.float32, torch.float32)
    x[4, 7] = torch.nan
    is_nan = linear(x, PackedWeight(weight, bias)).isnan()
    assert is_nan[4].all()
    assert is_nan.sum() == 50


def test_a_packed_weight_is_a_copy():
    x, weight, bias = layer(3, 20, 30, torch.float32, torch.float32)
    packed = PackedWeight(weight, bias)
    before = linear(x, packed)
    weight.fill_(0)
    bias.fill_(0)
    assert torch.equal(linear(x, packed), before)


def test_rows_apart_in_memory_and_no_rows():
    x, weight, bias = layer(8, 20, 30, torch.float32, torch.float32)
    packed = PackedWeight(weight, bias)
    assert torch.equal(linear(x[::2], packed), linear(x, packed)[::2])
    assert linear(x[:0], packed).shape == (0, 30)


def test_tensors_that_do_not_fit_are_refused():
    x, weight, _ = layer(8, 20, 30, torch.float32, torch.float32)
    packed = PackedWeight(weight)
    for bad in (x[:, :-1], x[0], x.half()):
        with pytest.raises(ValueError, match="x must be"):
            linear(bad, packed)
    for bad in (torch.empty(8, 29), torch.empty(30, 8).T, torch.empty(8, 30, dtype=torch.bfloat16)):
        with pytest.raises(ValueError, match="out must be"):
            linear(x, packed, out=bad)
    for bad in (weight.half(), weight[0], weight[:0]):
        with pytest.raises(ValueError, match="weight must be"):
            PackedWeight(bad)
    with pytest.raises(ValueError, match="an even number of rows"):
        PackedWeight(weight[:3], is_gated=True)
