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

As operations of one program, each fetching the first panels of the next (:mod:`kernels.cpu_decoder`), the 120 products
of the layers take, in bfloat16, least CPU time in ms on a machine with other work, with the weights in memory and with
those of one layer in cache; by the same limits they would take 22.4 and 1.85 per row:

    rows          4     8    12    16    24    32
    memory     20.0  22.0  25.5  34.9  46.7  60.8
    cache      11.8  16.3  21.8  30.5  45.5  60.4

Asking for every second line is 0.95 to 0.99 of this up to 12 rows and 1.01 to 1.03 from 16; for none, 1.14 to 1.26.
x in blocks of rows that stay in cache: 0.80 to 0.85 of the time for a step of ten prompts of 160 tokens.

A row's result depends neither on the other rows of the batch nor on the number of threads.
A kernel compiles in about 2 s for each dtype of weights; numba keeps it on disk.
"""

import ctypes
import functools
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numba import carray, cfunc, from_dtype, njit, types
from torch import Tensor

from kernels import cpu_program, cpu_steps, cpu_tiles, cpu_vectors
from kernels.cpu_steps import float32_pointer, int16_pointer, scratch
from kernels.cpu_tiles import LANES, PANEL, TILE_ROWS, gate_row, multiply_tile, round_row
from kernels.cpu_vectors import BFLOAT16, FLOAT32, ITEM_BYTES

_KINDS = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16}

_TILE_BYTES = TILE_ROWS * PANEL * 4
_BLOCK_BYTES = 512 * 1024  # of x that stay in the second level of cache while panel after panel passes

# What becomes of the sums.
STORE, ADD = range(2)  # to be the output | to be added to it, which is float32


class _Arguments(ctypes.Structure):
    _fields_ = [
        ("weight", ctypes.c_int64),  # address of [num_panels, depth, PANEL], see multiply_tile
        ("bias", ctypes.c_int64),  # address of float32 [num_panels * PANEL]
        ("x", ctypes.c_int64),  # address of float32 [num_rows, depth]
        ("output", ctypes.c_int64),  # address of [num_rows, num_columns]
        ("num_rows", ctypes.c_int64),
        ("num_columns", ctypes.c_int64),
        ("num_panels", ctypes.c_int64),
        ("depth", ctypes.c_int64),
        ("num_blocks", ctypes.c_int64),  # of rows: an item is a panel times a block
        ("is_gated", ctypes.c_int64),  # panels hold LANES columns of a gate and of what it gates
        ("out_kind", ctypes.c_int64),  # FLOAT32 | BFLOAT16
        ("finish", ctypes.c_int64),  # STORE | ADD
        ("following", ctypes.c_int64),  # address of the panels to prefetch after the last one
        ("following_bytes", ctypes.c_int64),  # of one of them
    ]


ARGUMENTS = np.dtype(_Arguments)


class PackedWeight:
    """A copy of a linear layer's weight and bias, laid out for :func:`linear`.

    weight: float32 or bfloat16 ``[out_features, in_features]``, kept in its dtype. bias: ``[out_features]``.
    is_gated: the first half of the rows makes a gate for the second, and the result is ``silu(first) * second``,
    of half as many features. Raises ValueError on other weights.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None, *, is_gated: bool = False) -> None:
        if weight.dtype not in _KINDS or weight.dim() != 2 or weight.numel() == 0:
            raise ValueError(f"weight must be a float32 or bfloat16 matrix, got {weight.dtype} {tuple(weight.shape)}")
        if is_gated and len(weight) % 2:
            raise ValueError(f"a gated weight must have an even number of rows, got {len(weight)}")
        self.in_features = weight.shape[1]
        self.out_features = len(weight) // (1 + is_gated)
        self.kind = _KINDS[weight.dtype]
        bias = torch.zeros(len(weight)) if bias is None else bias.float()
        order = (0, 3, 2, 1) if self.kind == BFLOAT16 else (0, 3, 1, 2)
        halves = _halves(weight.detach(), is_gated).permute(order)
        self._panels = halves.reshape(len(halves), self.in_features, PANEL).contiguous()
        self._bias = _halves(bias.detach()[:, None], is_gated).contiguous()
        self.num_panels = len(self._panels)
        self.panel_bytes = self._panels[0].nbytes
        self._template = _Arguments(
            weight=self._panels.data_ptr(),
            bias=self._bias.data_ptr(),
            num_columns=self.out_features,
            num_panels=self.num_panels,
            depth=self.in_features,
            is_gated=is_gated,
            following=self._panels.data_ptr(),
            following_bytes=self.panel_bytes,
        )
        self.function: int = _kernel(self.kind).address

    def arguments(self, finish: int = STORE) -> _Arguments:
        """The kernel's arguments without ``x``, ``output`` and the numbers of rows and blocks; float32 out."""
        arguments = _Arguments.from_buffer_copy(self._template)
        arguments.finish = finish
        return arguments


def linear(x: Tensor, packed: PackedWeight, out: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias``, or what a gated weight makes of it, summed in float32 and rounded once.

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
        arguments = packed.arguments()
        arguments.x, arguments.output = floats.data_ptr(), out.data_ptr()
        arguments.out_kind = _KINDS[out.dtype]
        arguments.num_rows, arguments.num_blocks = len(x), num_blocks(len(x), packed.in_features)
        num_items = arguments.num_panels * arguments.num_blocks
        cpu_program.run_one(packed.function, ctypes.addressof(arguments), num_items, torch.get_num_threads())
    return out


def num_blocks(num_rows: int, depth: Any) -> Any:
    """Into how many blocks the rows of x are cut: depends on nothing else. depth: a number or an array of them."""
    return -(-num_rows * 4 * depth // _BLOCK_BYTES)


def _halves(rows: Tensor, is_gated: bool) -> Tensor:
    """What panels hold of ``[out_features, n]``, padded with zeros: ``[num_panels, 2, LANES, n]``."""
    parts = rows.chunk(2) if is_gated else (rows,)
    width = LANES if is_gated else PANEL
    num_panels = -(-len(parts[0]) // width)
    padded = rows.new_zeros(len(parts), num_panels * width, rows.shape[1])
    for part, into in zip(parts, padded, strict=True):
        into[: len(part)] = part
    halves = padded.view(len(parts), num_panels, -1, LANES, rows.shape[1])
    return halves.transpose(0, 1).reshape(num_panels, 2, LANES, rows.shape[1])


_ENTRY = types.void(types.CPointer(from_dtype(ARGUMENTS)), types.int64, types.int64)
_MODULES = (cpu_steps, cpu_tiles, cpu_vectors)
_SOURCES = zlib.crc32(b"".join(Path(str(module.__file__)).read_bytes() for module in _MODULES))


@functools.cache
def _kernel(kind: int):
    """The kernel for a kind of weight: a function of operations, of pairs of a panel and a block of rows."""
    sources = _SOURCES

    @cfunc(_ENTRY, cache=True)
    def multiply(arguments, item, ahead):
        _ = sources  # a cell of this closure, thus in numba's cache key, which covers this file only
        _multiply_panel(carray(arguments, (1,))[0], item, ahead, kind)

    return multiply


# Inlined, so that kind reaches multiply_tile as the constant it is.


@njit(inline="always")
def _multiply_panel(work, item, ahead, kind):
    """A block of rows of x times one panel, tile by tile, while the panel of the item ``ahead`` is fetched."""
    panel_bytes = work.depth * PANEL * ITEM_BYTES[kind]
    block = item // work.num_panels
    panel = item - block * work.num_panels
    beyond = ahead - work.num_blocks * work.num_panels
    next_weight = work.weight + ahead % work.num_panels * panel_bytes
    if beyond >= 0:
        next_weight = work.following + beyond * work.following_bytes
    weight, bias = work.weight + panel * panel_bytes, work.bias + panel * PANEL * 4
    sums = scratch(_TILE_BYTES)
    row, stop = work.num_rows * block // work.num_blocks, work.num_rows * (block + 1) // work.num_blocks
    num_tiles = (stop - row + TILE_ROWS - 1) // TILE_ROWS
    for tile in range(num_tiles):
        rows = (stop - row) // (num_tiles - tile)
        x = work.x + row * work.depth * 4
        multiply_tile(x, weight, bias, sums, work.depth, rows, next_weight, tile, num_tiles, kind)
        _finish_tile(work, sums, panel, row, rows)
        row += rows


@njit
def _finish_tile(work, sums, panel, first_row, num_rows):
    width = LANES if work.is_gated else PANEL
    columns = min(width, work.num_columns - panel * width)
    for row in range(num_rows):
        source = sums + row * PANEL * 4
        if work.is_gated:
            gate_row(source)
        index = (first_row + row) * work.num_columns + panel * width
        if work.out_kind == BFLOAT16:
            round_row(source)
            _copy(int16_pointer(source), int16_pointer(work.output + index * 2), columns)
        elif work.finish == ADD:
            _add(float32_pointer(source), float32_pointer(work.output + index * 4), columns)
        else:
            _copy(float32_pointer(source), float32_pointer(work.output + index * 4), columns)


@njit
def _copy(source, destination, count):
    for i in range(count):
        destination[i] = source[i]


@njit
def _add(source, destination, count):
    for i in range(count):
        destination[i] += source[i]
