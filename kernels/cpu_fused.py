# mypy: disable-error-code="call-arg, var-annotated"
# (numba's decorators change signatures in ways that its stubs do not tell)
"""What a decoder layer does between its products, as operations of :mod:`kernels.cpu_program` over rows.

Everything is float32, but for the KV that is stored: rounded once, to nearest even. A sum of squares is free in its
order. A row's result depends neither on the other rows nor on the number of threads.
"""

import functools
import math
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from numba import carray, cfunc, from_dtype, njit, types

from kernels import cpu_steps
from kernels.cpu_steps import float32_pointer, int64_pointer, pointer_to
from kernels.cpu_vectors import FLOAT32, ITEM_BYTES

# Fields without a remark are addresses of contiguous float32 arrays.
NORM = np.dtype(
    [
        ("x", np.int64),  # [n, size]
        ("weight", np.int64),  # [size]
        ("output", np.int64),  # [n, size]
        ("size", np.int64),  # a number
        ("epsilon", np.float32),  # a number
        ("unused", np.float32),
    ]
)
ROTATION = np.dtype(
    [
        ("qkv", np.int64),  # [n, num_query_heads + 2 * num_kv_heads, head_dim]
        ("cos", np.int64),  # [n, head_dim]
        ("sin", np.int64),  # [n, head_dim]
        ("query", np.int64),  # out, [n, num_query_heads, head_dim]
        ("key", np.int64),  # out, [num_slots, num_kv_heads, head_dim], of ``kind``
        ("value", np.int64),  # out, like key
        ("slots", np.int64),  # int64 [n]
        ("num_query_heads", np.int64),  # a number, as are all that follow
        ("num_kv_heads", np.int64),
        ("head_dim", np.int64),
        ("kind", np.int64),  # of key and value: FLOAT32 | BFLOAT16
    ]
)

_uint16_pointer = pointer_to(types.uint16)
_SOURCES = zlib.crc32(Path(str(cpu_steps.__file__)).read_bytes())


def _entry(arguments: np.dtype) -> Any:
    return types.void(types.CPointer(from_dtype(arguments)), types.int64, types.int64)


@functools.cache
def rms_norm() -> Any:
    """The function of ``output = weight * x / sqrt(mean(x ** 2) + epsilon)`` over NORM; items are rows."""
    sources = _SOURCES

    @cfunc(_entry(NORM), cache=True)
    def norm(arguments, row, ahead):
        _ = sources  # a cell of this closure, thus in numba's cache key, which covers this file only
        work = carray(arguments, (1,))[0]
        offset = row * work.size * 4
        x, weight = float32_pointer(work.x + offset), float32_pointer(work.weight)
        output = float32_pointer(work.output + offset)
        mean = _sum_of_squares(x, work.size) / np.float32(work.size)
        scale = np.float32(1) / np.float32(math.sqrt(mean + work.epsilon))
        for i in range(work.size):
            output[i] = weight[i] * (x[i] * scale)

    return norm


@functools.cache
def rotate_and_store() -> Any:
    """The function of the rotation of queries and keys, and of the storing of keys and values, over ROTATION.

    Element ``i`` of a head pairs with ``i + head_dim / 2``. Items are tokens.
    """
    sources = _SOURCES

    @cfunc(_entry(ROTATION), cache=True)
    def rotate(arguments, token, ahead):
        _ = sources
        work = carray(arguments, (1,))[0]
        head_bytes, stored_bytes = work.head_dim * 4, work.head_dim * ITEM_BYTES[work.kind]
        cos, sin = float32_pointer(work.cos + token * head_bytes), float32_pointer(work.sin + token * head_bytes)
        source = work.qkv + token * (work.num_query_heads + 2 * work.num_kv_heads) * head_bytes
        query = work.query + token * work.num_query_heads * head_bytes
        for head in range(work.num_query_heads):
            _rotate_head(float32_pointer(source), cos, sin, query + head * head_bytes, work.head_dim, FLOAT32)
            source += head_bytes
        row = int64_pointer(work.slots)[token] * work.num_kv_heads * stored_bytes
        for head in range(work.num_kv_heads):
            key = work.key + row + head * stored_bytes
            _rotate_head(float32_pointer(source), cos, sin, key, work.head_dim, work.kind)
            source += head_bytes
        values = float32_pointer(source)
        for i in range(work.num_kv_heads * work.head_dim):
            _store(values[i], work.value + row, i, work.kind)

    return rotate


@njit
def _rotate_head(x, cos, sin, output, head_dim, kind):
    half = head_dim // 2
    for i in range(half):
        a, b = x[i], x[half + i]
        _store(a * cos[i] - b * sin[i], output, i, kind)
        _store(b * cos[half + i] + a * sin[half + i], output, half + i, kind)


@njit
def _store(value, address, index, kind):
    """Element ``index`` of FLOAT32 or BFLOAT16 from ``address`` becomes a float32, rounded."""
    if kind == FLOAT32:
        float32_pointer(address)[index] = value
    else:
        _uint16_pointer(address)[index] = _to_bfloat16(value)


@njit(fastmath={"reassoc"})  # else the additions wait for each other, one at a time
def _sum_of_squares(x, size):
    total = np.float32(0)
    for i in range(size):
        total += x[i] * x[i]
    return total


@njit
def _to_bfloat16(value):
    bits = np.float32(value).view(np.uint32)
    even = (bits >> np.uint32(16)) & np.uint32(1)
    rounded = np.uint32(bits + np.uint32(0x7FFF) + even) >> np.uint32(16)
    return np.uint16(rounded) if value == value else np.uint16(0x7FC0)
