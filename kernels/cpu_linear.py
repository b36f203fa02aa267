# mypy: disable-error-code="call-arg, var-annotated"
# (numba's decorators change signatures in ways that its stubs do not tell)
"""Linear layers on the CPU."""

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
from kernels.cpu_tiles import LANES, PANEL, TILE_ROWS, load_float, multiply_tile
from kernels.cpu_vectors import ITEM_BYTES
from kernels.openmp import parallel

_KINDS = {torch.float32: cpu_vectors.FLOAT32, torch.bfloat16: cpu_vectors.BFLOAT16}
_INPUT_BYTES = 384 * 1024  # of packed input, which stays in the second level of cache
_CHUNKS_PER_THREAD = 4


class _Arguments(ctypes.Structure):
    """What the kernel is given. Addresses first, then numbers."""

    _fields_ = [
        ("weight", ctypes.c_int64),  # [num_panels, depth, PANEL]
        ("bias", ctypes.c_int64),  # float32 [num_panels * PANEL]
        ("x", ctypes.c_int64),  # [num_rows, depth]
        ("output", ctypes.c_int64),  # [num_rows, num_columns]
        ("counter", ctypes.c_int64),  # int64: the field next_claim
        ("num_rows", ctypes.c_int64),
        ("num_columns", ctypes.c_int64),
        ("num_panels", ctypes.c_int64),
        ("depth", ctypes.c_int64),
        ("block_rows", ctypes.c_int64),  # rows of input packed at a time
        ("chunk_panels", ctypes.c_int64),  # panels per claim
        ("next_claim", ctypes.c_int64),
    ]


class PackedWeight:
    """A weight ``[out_features, in_features]`` and bias, laid out for :func:`linear`."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        if weight.dtype not in _KINDS or weight.dim() != 2 or 0 in weight.shape:
            raise ValueError(f"weight must be a float32 or bfloat16 matrix, got {weight.dtype} {tuple(weight.shape)}")
        self.out_features, self.in_features = weight.shape
        self.dtype = weight.dtype
        self._panels = _panels(weight.detach())
        self._bias = torch.zeros(len(self._panels) * PANEL)
        if bias is not None:
            self._bias[: self.out_features] = bias.detach()
        block_rows = _INPUT_BYTES // (self.in_features * 4)
        self._template = _Arguments(
            weight=self._panels.data_ptr(),
            bias=self._bias.data_ptr(),
            num_columns=self.out_features,
            num_panels=len(self._panels),
            depth=self.in_features,
            block_rows=max(1, block_rows // TILE_ROWS) * TILE_ROWS,
        )

    def arguments(self, x: Tensor, out: Tensor, num_threads: int) -> _Arguments:
        arguments = _Arguments.from_buffer_copy(self._template)
        arguments.x = x.data_ptr()
        arguments.output = out.data_ptr()
        arguments.num_rows = len(x)
        num_chunks = 1 if num_threads == 1 else num_threads * _CHUNKS_PER_THREAD
        arguments.chunk_panels = -(-arguments.num_panels // num_chunks)
        arguments.counter = ctypes.addressof(arguments) + _Arguments.next_claim.offset
        return arguments


def pack(weight: Tensor, bias: Tensor | None = None) -> PackedWeight:
    """Lay out ``weight`` (float32 or bfloat16 ``[out_features, in_features]``) and ``bias`` once."""
    return PackedWeight(weight, bias)


def _panels(weight: Tensor) -> Tensor:
    """``[num_panels, in_features, PANEL]``, padded with zeros."""
    out_features, in_features = weight.shape
    num_panels = -(-out_features // PANEL)
    padded = torch.zeros(num_panels * PANEL, in_features, dtype=weight.dtype)
    padded[:out_features] = weight
    panels = padded.view(num_panels, 2, LANES, in_features)
    if weight.dtype == torch.bfloat16:  # neighbours in memory: see multiply_tile
        return panels.permute(0, 3, 2, 1).contiguous()
    return panels.permute(0, 3, 1, 2).contiguous()


def linear(x: Tensor, packed: PackedWeight, out: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias`` for x ``[M, in_features]``, float32 or bfloat16: ``[M, out_features]``."""
    if x.dtype not in _KINDS or x.dim() != 2 or x.shape[1] != packed.in_features or not x.is_cpu:
        raise ValueError("x")
    x = x.contiguous()
    if out is None:
        out = torch.empty(len(x), packed.out_features, dtype=x.dtype)
    if len(x) == 0:
        return out
    num_threads = torch.get_num_threads()
    arguments = packed.arguments(x, out, num_threads)
    parallel(_entry(_KINDS[packed.dtype], _KINDS[x.dtype]), ctypes.addressof(arguments), num_threads)
    return out


_ENTRY = types.void(types.CPointer(from_dtype(np.dtype(_Arguments))))
_MODULES = (cpu_steps, cpu_tiles, cpu_vectors)
_SOURCES = zlib.crc32(b"".join(Path(str(module.__file__)).read_bytes() for module in _MODULES))


@functools.cache
def _entry(kind: int, x_kind: int):
    """The kernel for one kind of weight and one of activations."""
    sources = _SOURCES

    @cfunc(_ENTRY, cache=True)
    def multiply(arguments):
        _ = sources  # a cell of this closure, thus in numba's cache key, which covers this file only
        work = carray(arguments, (1,))[0]
        num_chunks = (work.num_panels + work.chunk_panels - 1) // work.chunk_panels
        num_blocks = (work.num_rows + work.block_rows - 1) // work.block_rows
        packed = np.empty(min(work.num_rows, work.block_rows) * work.depth, np.float32)
        edge = np.empty(TILE_ROWS * PANEL, np.float32)
        packed_block = -1
        while True:
            taken = fetch_add(work.counter, 1)
            if taken >= num_blocks * num_chunks:
                return
            block = taken // num_chunks
            first = block * work.block_rows
            rows = min(work.block_rows, work.num_rows - first)
            if block != packed_block:
                _pack_input(work, first, rows, packed, x_kind)
                packed_block = block
            start = (taken - block * num_chunks) * work.chunk_panels
            for panel in range(start, min(start + work.chunk_panels, work.num_panels)):
                _multiply_panel(work, panel, first, rows, packed, edge, kind, x_kind)

    return multiply.ctypes


@njit(inline="always")
def _pack_input(work, first, num_rows, packed, x_kind):
    """Rows of x as the tiles that ``multiply_tile`` takes: ``[depth, rows of the tile]`` each."""
    num_tiles = (num_rows + TILE_ROWS - 1) // TILE_ROWS
    row = 0
    for tile in range(num_tiles):
        rows = (num_rows + tile) // num_tiles
        source = work.x + (first + row) * work.depth * ITEM_BYTES[x_kind]
        at = row * work.depth
        for k in range(work.depth):
            for r in range(rows):
                packed[at] = load_float(source + (r * work.depth + k) * ITEM_BYTES[x_kind], x_kind)
                at += 1
        row += rows


@njit(inline="always")
def _multiply_panel(work, panel, first, num_rows, packed, edge, kind, x_kind):
    num_tiles = (num_rows + TILE_ROWS - 1) // TILE_ROWS
    panel_bytes = work.depth * PANEL * ITEM_BYTES[kind]
    weight = work.weight + panel * panel_bytes
    bias = work.bias + panel * PANEL * 4
    columns = min(PANEL, work.num_columns - panel * PANEL)
    pitch = work.num_columns * ITEM_BYTES[x_kind]
    row = 0
    for tile in range(num_tiles):
        rows = (num_rows + tile) // num_tiles
        output = work.output + (first + row) * pitch + panel * PANEL * ITEM_BYTES[x_kind]
        x = packed.ctypes.data + row * work.depth * 4
        into, into_pitch = output, pitch
        if columns < PANEL:
            into, into_pitch = edge.ctypes.data, PANEL * ITEM_BYTES[x_kind]
        multiply_tile(
            x, weight, bias, into, into_pitch, work.depth, rows, weight + panel_bytes, tile, num_tiles, kind, x_kind
        )
        if columns < PANEL:
            for r in range(rows):
                source, destination = int16_pointer(into + r * into_pitch), int16_pointer(output + r * pitch)
                for i in range(columns * ITEM_BYTES[x_kind] // 2):
                    destination[i] = source[i]
        row += rows
