# mypy: disable-error-code="call-arg, var-annotated"
# (numba's decorators change signatures in ways that its stubs do not tell)
"""Linear layers on the CPU for few rows, as in decoding: weights packed once into panels of columns.

Bytes: every weight once, ``out_features * in_features * item_bytes``. Operations: ``2 * num_rows`` per weight.
Limit: the larger of the two times, bytes at the speed of memory and operations at that of multiplication.
Measured (``tests/benchmarks/linear.py``): all 121 linear layers of SmolLM2-135M once, on one 2.5 GHz core with
AVX-512 and without bfloat16 instructions; medians in ms, in turns with oneDNN on weights packed once. The limit
is that of the same run, from summing the weights (9.5 GB/s) and a large product of torch's (125 GFLOP/s):

    rows                     1     2     4     8    16    32    64   256
    float32   panels        55    60    58    60    79   104   168   621
              oneDNN        67    69    66    76    89   124   190   623
              over limit  0.97  1.03  1.02  1.05  1.39  1.50  1.23  1.12
    bfloat16  panels        30    31    32    35    51    82   153   602
              oneDNN        70    70    68    86    93   130   208   712
              over limit  1.07  1.11  1.14  1.14  1.48  1.19  1.11  1.05

(oneDNN upconverts bfloat16 weights to float32 once.) The distance is in the middle, where memory and arithmetic
take about as long and overlap only in part: 33 rows take 9.3 us per panel of 576 x 32 from the second level of
cache (130 GFLOP/s), streaming a panel 7.0 us, both together 12.9 us. Without prefetches of the next panel 32 rows
take 1.2 times as long. Tried without gain: huge pages, other prefetch densities, blocks of depth that stay in the
first level of cache, groups of panels per tile. A call costs about 10 us besides.

A row's result depends neither on the other rows of the batch nor on the number of threads.
A kernel compiles in about 2 s for each pair of dtypes; numba keeps it on disk.
"""

import ctypes
import functools
import zlib
from pathlib import Path

import numpy as np
import torch
from numba import carray, cfunc, from_dtype, njit, types
from torch import Tensor

from kernels import cpu_steps, cpu_tiles, cpu_vectors
from kernels.cpu_steps import fetch_add, int16_pointer
from kernels.cpu_tiles import LANES, PANEL, TILE_ROWS, multiply_tile
from kernels.cpu_vectors import ITEM_BYTES
from kernels.openmp import parallel

_KINDS = {torch.float32: cpu_vectors.FLOAT32, torch.bfloat16: cpu_vectors.BFLOAT16}


class _Arguments(ctypes.Structure):
    """What the kernel is given: addresses of contiguous arrays, then numbers."""

    _fields_ = [
        ("weight", ctypes.c_int64),  # [num_panels, depth, PANEL], see multiply_tile
        ("bias", ctypes.c_int64),  # float32 [num_panels * PANEL]
        ("x", ctypes.c_int64),  # float32 [num_rows, depth]
        ("output", ctypes.c_int64),  # [num_rows, num_columns]
        ("counter", ctypes.c_int64),  # int64: the field next_panel
        ("num_rows", ctypes.c_int64),
        ("num_columns", ctypes.c_int64),
        ("num_panels", ctypes.c_int64),
        ("depth", ctypes.c_int64),
        ("next_panel", ctypes.c_int64),
    ]


class PackedWeight:
    """A copy of a linear layer's weight and bias, laid out for :func:`linear`.

    weight: float32 or bfloat16 ``[out_features, in_features]``, kept in its dtype. bias: ``[out_features]``.
    Raises ValueError on other weights.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        if weight.dtype not in _KINDS or weight.dim() != 2 or weight.numel() == 0:
            raise ValueError(f"weight must be a float32 or bfloat16 matrix, got {weight.dtype} {tuple(weight.shape)}")
        self.out_features, self.in_features = weight.shape
        self.kind = _KINDS[weight.dtype]
        self._panels = _panels(weight.detach())
        self._bias = torch.zeros(len(self._panels) * PANEL)
        if bias is not None:
            self._bias[: self.out_features] = bias.detach()
        self._template = _Arguments(
            weight=self._panels.data_ptr(),
            bias=self._bias.data_ptr(),
            num_columns=self.out_features,
            num_panels=len(self._panels),
            depth=self.in_features,
        )

    def arguments(self, x: Tensor, out: Tensor) -> _Arguments:
        """The kernel's arguments for one call; x: float32."""
        arguments = _Arguments.from_buffer_copy(self._template)
        arguments.x = x.data_ptr()
        arguments.output = out.data_ptr()
        arguments.num_rows = len(x)
        arguments.counter = ctypes.addressof(arguments) + _Arguments.next_panel.offset
        return arguments


def linear(x: Tensor, packed: PackedWeight, out: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias``, summed in float32 and rounded once.

    x: float32 or bfloat16 ``[num_rows, in_features]``. out: where to write the result, contiguous
    ``[num_rows, out_features]`` of x's dtype. Raises ValueError on tensors that do not fit.
    """
    if x.dtype not in _KINDS or x.dim() != 2 or x.shape[1] != packed.in_features or not x.is_cpu:
        raise ValueError(f"x must be float32 or bfloat16 [n, {packed.in_features}] on the CPU")
    shape = (len(x), packed.out_features)
    if out is None:
        out = torch.empty(shape, dtype=x.dtype)
    elif out.dtype != x.dtype or out.shape != shape or not out.is_contiguous() or not out.is_cpu:
        raise ValueError(f"out must be contiguous {x.dtype} {shape} on the CPU")
    if len(x):
        floats = x.float().contiguous()
        arguments = packed.arguments(floats, out)
        function = _kernel(packed.kind, _KINDS[out.dtype])
        parallel(function, ctypes.addressof(arguments), min(torch.get_num_threads(), arguments.num_panels))
    return out


def _panels(weight: Tensor) -> Tensor:
    """``[num_panels, in_features, PANEL]`` as ``multiply_tile`` takes them, padded with zeros."""
    out_features, in_features = weight.shape
    num_panels = -(-out_features // PANEL)
    padded = torch.zeros(num_panels * PANEL, in_features, dtype=weight.dtype)
    padded[:out_features] = weight
    halves = padded.view(num_panels, 2, LANES, in_features)
    order = (0, 3, 2, 1) if weight.dtype == torch.bfloat16 else (0, 3, 1, 2)
    return halves.permute(order).reshape(num_panels, in_features, PANEL).contiguous()


_ENTRY = types.void(types.CPointer(from_dtype(np.dtype(_Arguments))))
_MODULES = (cpu_steps, cpu_tiles, cpu_vectors)
_SOURCES = zlib.crc32(b"".join(Path(str(module.__file__)).read_bytes() for module in _MODULES))


@functools.cache
def _kernel(kind: int, out_kind: int):
    """The kernel for a kind of weight and a kind of result: a ctypes function."""
    sources = _SOURCES

    @cfunc(_ENTRY, cache=True)
    def multiply(arguments):
        _ = sources  # a cell of this closure, thus in numba's cache key, which covers this file only
        work = carray(arguments, (1,))[0]
        edge = np.empty(TILE_ROWS * PANEL, np.float32)
        panel = fetch_add(work.counter, 1)
        while panel < work.num_panels:
            upcoming = fetch_add(work.counter, 1)
            ahead = upcoming if upcoming < work.num_panels else panel
            _multiply_panel(work, panel, ahead, edge.ctypes.data, kind, out_kind)
            panel = upcoming

    return multiply.ctypes


# Inlined, so that kind and out_kind reach multiply_tile as the constants they are.


@njit(inline="always")
def _multiply_panel(work, panel, ahead, edge, kind, out_kind):
    """All rows of x times one panel, tile by tile, while the panel ``ahead`` is fetched."""
    panel_bytes = work.depth * PANEL * ITEM_BYTES[kind]
    weight, next_weight = work.weight + panel * panel_bytes, work.weight + ahead * panel_bytes
    bias = work.bias + panel * PANEL * 4
    pitch = work.num_columns * ITEM_BYTES[out_kind]
    columns = min(PANEL, work.num_columns - panel * PANEL)
    num_tiles = (work.num_rows + TILE_ROWS - 1) // TILE_ROWS
    row = 0
    for tile in range(num_tiles):
        rows = (work.num_rows + tile) // num_tiles
        x = work.x + row * work.depth * 4
        output = work.output + row * pitch + panel * PANEL * ITEM_BYTES[out_kind]
        into, into_pitch = output, pitch
        if columns < PANEL:
            into, into_pitch = edge, PANEL * ITEM_BYTES[out_kind]
        multiply_tile(x, weight, bias, into, work.depth, into_pitch, rows, next_weight, tile, num_tiles, kind, out_kind)
        if columns < PANEL:
            _copy_rows(edge, into_pitch, output, pitch, rows, columns * ITEM_BYTES[out_kind])
        row += rows


@njit
def _copy_rows(source, source_pitch, destination, destination_pitch, num_rows, num_bytes):
    for row in range(num_rows):
        items = int16_pointer(source + row * source_pitch)
        copies = int16_pointer(destination + row * destination_pitch)
        for i in range(num_bytes // 2):
            copies[i] = items[i]
