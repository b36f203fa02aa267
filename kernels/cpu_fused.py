# mypy: disable-error-code="call-arg, var-annotated"
# (numba's decorators change signatures in ways that its stubs do not tell)
"""What a decoder layer does between its products, each in one pass over a few rows that are in the caches.

Arguments are numpy arrays over the tensors' memory (:func:`array`), C-contiguous and all of one dtype:
float32, or bfloat16 as its bits in uint16. A wrapped tensor serves many calls, and a call costs about 1 us.
Everything is computed in float32 and rounded once, to nearest even; only the sum of squares in a norm is free
in its order. A row's result depends neither on the other rows nor on the number of threads, which is one.
"""

import math

import numpy as np
import torch
from numba import njit, types
from numba.extending import overload
from numpy.typing import NDArray
from torch import Tensor


def array(tensor: Tensor) -> NDArray:
    """The memory of a contiguous CPU tensor, float32 or bfloat16, as these functions take it."""
    if tensor.dtype not in (torch.float32, torch.bfloat16) or not tensor.is_cpu or not tensor.is_contiguous():
        raise ValueError(f"expected a contiguous float32 or bfloat16 tensor on the CPU, got {tensor.dtype}")
    tensor = tensor.detach()
    return tensor.numpy() if tensor.dtype == torch.float32 else tensor.view(torch.uint16).numpy()


@njit(cache=True)
def rms_norm(x, weight, epsilon, out):
    """``out = weight * x / sqrt(mean(x ** 2) + epsilon)`` by row; x, out: ``[n, size]``; weight: ``[size]``."""
    if x.shape != out.shape or x.shape[1] != len(weight):
        raise ValueError("rms_norm: shapes differ")
    for row in range(len(x)):
        _normalise(x[row], weight, epsilon, out[row])


@njit(cache=True)
def add_rms_norm(residual, x, weight, epsilon, out):
    """``residual += x``, then :func:`rms_norm` of it. residual, x, out: ``[n, size]``; weight: ``[size]``."""
    if residual.shape != x.shape or x.shape != out.shape or x.shape[1] != len(weight):
        raise ValueError("add_rms_norm: shapes differ")
    for row in range(len(x)):
        for i in range(x.shape[1]):
            total = _load(residual[row, i]) + _load(x[row, i])
            residual[row, i] = _rounded(total, x[row, i])
        _normalise(residual[row], weight, epsilon, out[row])


@njit(cache=True)
def rotary(heads, num_rotated, cos, sin):
    """Rotate the first heads of every token in place, pairing element ``i`` with ``i + head_dim / 2``.

    heads: ``[n, num_heads, head_dim]``. num_rotated: heads per token, the others stay. cos, sin: ``[n, head_dim]``.
    """
    num_tokens, num_heads, head_dim = heads.shape
    if cos.shape != (num_tokens, head_dim) or sin.shape != cos.shape or num_rotated > num_heads or head_dim % 2:
        raise ValueError("rotary: shapes differ")
    half = head_dim // 2
    for token in range(num_tokens):
        c, s = cos[token], sin[token]
        for head in range(num_rotated):
            first, second = heads[token, head, :half], heads[token, head, half:]
            for i in range(half):
                a, b = _load(first[i]), _load(second[i])
                low = a * _load(c[i]) - b * _load(s[i])
                high = b * _load(c[half + i]) + a * _load(s[half + i])
                first[i], second[i] = _rounded(low, first[i]), _rounded(high, first[i])


def silu_mul(gate_up: Tensor, out: Tensor) -> None:
    """``out = silu(gate) * up``. gate_up: ``[n, 2 * size]``, gate first; out: ``[n, size]``. Rounded twice.

    By torch, whose exponential is vectorised where numba's is a call for every element.
    """
    gate, up = gate_up.chunk(2, dim=1)
    torch.ops.aten.silu.out(gate, out=out)
    out.mul_(up)


@njit
def _normalise(x, weight, epsilon, out):
    mean = _sum_of_squares(x) / np.float32(len(x))
    scale = np.float32(1) / np.float32(math.sqrt(mean + np.float32(epsilon)))
    for i in range(len(x)):
        out[i] = _rounded(_load(weight[i]) * (_load(x[i]) * scale), x[i])


@njit(fastmath={"reassoc"})  # else the additions wait for each other, one at a time
def _sum_of_squares(x):
    total = np.float32(0)
    for i in range(len(x)):
        total += _load(x[i]) * _load(x[i])
    return total


def _load(element):
    """An element as float32."""


@overload(_load)
def _overload_load(element):
    if element is types.uint16:
        return lambda element: np.uint32(np.uint32(element) << np.uint32(16)).view(np.float32)
    return lambda element: element


def _rounded(value, like):
    """A float32 as an element of the type of ``like``."""


@overload(_rounded)
def _overload_rounded(value, like):
    return _to_bfloat16 if like is types.uint16 else lambda value, like: value


def _to_bfloat16(value, like):
    # NaN needs no care: made from bfloat16 its lower bits are zero, and rounding carries nothing upwards.
    bits = np.float32(value).view(np.uint32)
    even = (bits >> np.uint32(16)) & np.uint32(1)
    return np.uint16(np.uint32(bits + np.uint32(0x7FFF) + even) >> np.uint32(16))
