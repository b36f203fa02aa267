"""The inner step of the CPU's matrix products, as a numba intrinsic.

A tile is up to ``TILE_ROWS`` rows by ``PANEL`` columns of the result, summed in registers.
"""

from collections.abc import Sequence

import llvmlite.binding
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from kernels.cpu_vectors import BFLOAT16, F32, I32, I64, ITEM_BYTES, VectorBuilder

_WIDE = bool(llvmlite.binding.get_host_cpu_features().get("avx512f"))
LANES = 16 if _WIDE else 8
PANEL = 2 * LANES  # columns
TILE_ROWS = 12 if _WIDE else 6  # two accumulators each, which leaves registers for weights and factors
_UNROLL = 4  # steps of depth
_ROWS_PER_POINTER = 3  # base, base + pitch and base + 2 * pitch are addressing modes


@intrinsic(prefer_literal=True)
def multiply_tile(typing, x, panel, bias, sums, depth, num_rows, ahead, turn, num_turns, kind):
    """``sums = x @ panel + bias``, each sum in order of depth whatever the number of rows.

    x: float32 ``[num_rows, depth]``. panel: ``[depth, PANEL]`` of ``kind``, for bfloat16 with columns ``c`` and
    ``c + LANES`` side by side. bias: float32 ``[PANEL]``. sums: float32 ``[num_rows, PANEL]``, out.
    ahead: the panel to prefetch meanwhile, part ``turn`` of ``num_turns`` of it. ``kind`` must be a constant.
    """
    if not isinstance(kind, types.IntegerLiteral):
        return None

    def generate(context, builder, signature, arguments):
        x, panel, bias, sums, depth, num_rows, *prefetching = arguments[:9]
        done = builder.append_basic_block("done")
        impossible = builder.append_basic_block("impossible")
        switch = builder.switch(num_rows, impossible)
        for rows in range(1, TILE_ROWS + 1):
            case = builder.append_basic_block(f"rows{rows}")
            switch.add_case(I64(rows), case)
            builder.position_at_end(case)
            v = VectorBuilder(builder)
            slots = _emit_sums(v, rows, x, panel, bias, depth, prefetching, kind.literal_value)
            for i, slot in enumerate(slot for row in slots for slot in row):
                v.store(builder.load(slot), v.offset(sums, i * LANES * 4))
            builder.branch(done)
        builder.position_at_end(impossible)
        builder.unreachable()
        builder.position_at_end(done)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 9, kind), generate


@intrinsic
def gate_row(typing, sums):
    """``silu(gate) * up`` over the gate, by halves of a row of a tile: float32 ``[PANEL]``, the gate's half first."""

    def generate(context, builder, signature, arguments):
        v = VectorBuilder(builder)
        gate, up = (v.load(v.offset(arguments[0], c * LANES * 4), LANES) for c in range(2))
        v.store(builder.fmul(v.silu(gate), up), arguments[0])
        return context.get_dummy_value()

    return types.void(types.int64), generate


@intrinsic
def round_row(typing, sums):
    """A row of a tile, float32 ``[PANEL]``, as bfloat16 ``[PANEL]`` over its first half."""

    def generate(context, builder, signature, arguments):
        v = VectorBuilder(builder)
        halves = [v.load(v.offset(arguments[0], c * LANES * 4), LANES) for c in range(2)]
        for c, half in enumerate(halves):
            v.store_rounded(half, v.offset(arguments[0], c * LANES * 2), BFLOAT16)
        return context.get_dummy_value()

    return types.void(types.int64), generate


def _emit_sums(
    v: VectorBuilder,
    num_rows: int,
    x: ir.Value,
    panel: ir.Value,
    bias: ir.Value,
    depth: ir.Value,
    prefetching: Sequence[ir.Value],
    kind: int,
) -> list[list[ir.Value]]:
    """The sums of a tile: stack slots, which LLVM turns into registers, as ``[row][half of the panel]``."""
    builder = v.builder
    ahead, turn, num_turns = prefetching
    row_bytes = PANEL * ITEM_BYTES[kind]
    pitch = builder.mul(depth, I64(4))
    start = [v.load(v.offset(bias, c * LANES * 4), LANES) for c in range(2)]
    sums = [[cgutils.alloca_once_value(builder, vector) for vector in start] for _ in range(num_rows)]
    wait = cgutils.alloca_once_value(builder, turn)
    pointers = [
        cgutils.alloca_once_value(builder, v.element(x, pitch, r)) for r in range(0, num_rows, _ROWS_PER_POINTER)
    ]

    def emit_steps(k: ir.Value, count: int) -> None:
        weight = v.element(panel, k, row_bytes)
        first = [_opaque(builder, builder.load(pointer)) for pointer in pointers]
        for step in range(count):
            weights = _load_pair(v, v.offset(weight, step * row_bytes), kind)
            for r in range(num_rows):
                row = v.element(first[r // _ROWS_PER_POINTER], pitch, r % _ROWS_PER_POINTER)
                factor = v.splat(v.load_scalar(v.offset(row, step * 4)), LANES)
                for slot, w in zip(sums[r], weights, strict=True):
                    builder.store(v.fma(factor, w, builder.load(slot)), slot)
        for pointer, address in zip(pointers, first, strict=True):
            builder.store(v.offset(address, count * 4), pointer)

    unrolled = builder.and_(depth, I64(-_UNROLL))
    with cgutils.for_range_slice(builder, I64(0), unrolled, I64(_UNROLL)) as (k, _):
        is_due = builder.icmp_signed("==", builder.load(wait), I64(0))
        builder.store(builder.sub(builder.select(is_due, num_turns, builder.load(wait)), I64(1)), wait)
        with builder.if_then(is_due):
            v.prefetch(v.element(ahead, k, row_bytes), _UNROLL * row_bytes, level=2)
        emit_steps(k, _UNROLL)
    with cgutils.for_range_slice(builder, unrolled, depth, I64(1)) as (k, _):
        emit_steps(k, 1)
    return sums


def _opaque(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    """The same integer, of unknown origin to LLVM, which would derive each row's address from the last one's."""
    return builder.asm(ir.FunctionType(value.type, [value.type]), "", "=r,0", [value], side_effect=False)


def _load_pair(v: VectorBuilder, address: ir.Value, kind: int) -> list[ir.Value]:
    """The two vectors of a row of a panel. bfloat16: the halves of 32-bit words."""
    if kind != BFLOAT16:
        return [v.load(v.offset(address, c * LANES * 4), LANES) for c in range(2)]
    integers, floats = ir.VectorType(I32, LANES), ir.VectorType(F32, LANES)
    words = v.builder.bitcast(v.load(address, LANES), integers)
    low = v.builder.shl(words, integers([16] * LANES))
    high = v.builder.and_(words, integers([0xFFFF0000] * LANES))
    return [v.builder.bitcast(low, floats), v.builder.bitcast(high, floats)]
