"""The inner step of the CPU's matrix products, as a numba intrinsic: one tile of the result.

A tile is up to ``TILE_ROWS`` rows by ``PANEL`` columns, summed in registers. ``kind`` and ``out_kind`` must
be constants where the step is called: they shape its code.
"""

import llvmlite.binding
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from kernels.cpu_vectors import BFLOAT16, F32, I32, I64, ITEM_BYTES, VectorBuilder

_WIDE = bool(llvmlite.binding.get_host_cpu_features().get("avx512f"))
LANES = 16 if _WIDE else 8
PANEL = 2 * LANES  # columns
TILE_ROWS = 14 if _WIDE else 6  # two accumulators each: with weights and input, all 32 or 16 registers
_UNROLL = 4  # steps of depth


@intrinsic(prefer_literal=True)
def multiply_tile(
    typing, x, panel, bias, output, pitch, depth, num_rows, ahead, turn, num_turns, kind, out_kind
):
    """``output = x.T @ panel + bias``, each sum in order of depth whatever the number of rows.

    x: float32 ``[depth, num_rows]``. panel: ``[depth, PANEL]`` of ``kind`` (see ``interleaved``).
    bias: float32 ``[PANEL]``. output: ``[num_rows, PANEL]`` of ``out_kind``, its rows ``pitch`` bytes apart.
    ahead: the panel to prefetch meanwhile, the part ``turn`` of ``num_turns`` of it.
    """
    literals = [kind, out_kind]
    if not all(isinstance(literal, types.IntegerLiteral) for literal in literals):
        return None
    values = [literal.literal_value for literal in literals]

    def generate(context, builder, signature, arguments):
        *addresses, num_rows, ahead, turn, num_turns = arguments[:10]
        done = builder.append_basic_block("done")
        impossible = builder.append_basic_block("impossible")
        switch = builder.switch(num_rows, impossible)
        prefetching = (ahead, turn, num_turns)
        for rows in range(1, TILE_ROWS + 1):
            case = builder.append_basic_block(f"rows{rows}")
            switch.add_case(I64(rows), case)
            builder.position_at_end(case)
            _emit_tile(VectorBuilder(builder), rows, *addresses, prefetching, *values)
            builder.branch(done)
        builder.position_at_end(impossible)
        builder.unreachable()
        builder.position_at_end(done)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 10, *literals), generate


def _emit_tile(v, rows, x, panel, bias, output, pitch, depth, prefetching, kind, out_kind):
    builder = v.builder
    ahead, turn, num_turns = prefetching
    item_bytes = ITEM_BYTES[kind]
    biases = [v.load(v.offset(bias, c * LANES * 4), LANES) for c in range(2)]
    # LLVM turns these stack slots into registers.
    sums = [[cgutils.alloca_once_value(builder, biases[c]) for c in range(2)] for _ in range(rows)]
    wait = cgutils.alloca_once_value(builder, turn)

    def emit_steps(start: ir.Value, count: int) -> None:
        first_x = v.element(x, start, rows * 4)
        first_weight = v.element(panel, start, PANEL * item_bytes)
        for step in range(count):
            weights = _load_pair(v, v.offset(first_weight, step * PANEL * item_bytes), kind)
            for r in range(rows):
                scalar = v.splat(v.load_scalar(v.offset(first_x, (step * rows + r) * 4)), LANES)
                for c in range(2):
                    builder.store(v.fma(scalar, weights[c], builder.load(sums[r][c])), sums[r][c])

    unrolled = builder.and_(depth, I64(-_UNROLL))
    with cgutils.for_range_slice(builder, I64(0), unrolled, I64(_UNROLL)) as (k, _):
        countdown = builder.load(wait)
        is_due = builder.icmp_signed("==", countdown, I64(0))
        builder.store(builder.select(is_due, builder.sub(num_turns, I64(1)), builder.sub(countdown, I64(1))), wait)
        with builder.if_then(is_due):
            v.prefetch(v.element(ahead, k, PANEL * item_bytes), _UNROLL * PANEL * item_bytes, level=2)
        emit_steps(k, _UNROLL)
    with cgutils.for_range_slice(builder, unrolled, depth, I64(1)) as (k, _):
        emit_steps(k, 1)
    for r in range(rows):
        row = builder.add(output, builder.mul(pitch, I64(r)))
        for c in range(2):
            v.store_rounded(builder.load(sums[r][c]), v.offset(row, c * LANES * ITEM_BYTES[out_kind]), out_kind)


def _load_pair(v, address, kind):
    """The two vectors of a panel's row. bfloat16 columns ``c`` and ``c + LANES`` share a 32-bit word."""
    if kind != BFLOAT16:
        return [v.load(v.offset(address, c * LANES * 4), LANES) for c in range(2)]
    integers, floats = ir.VectorType(I32, LANES), ir.VectorType(F32, LANES)
    words = v.builder.bitcast(v.load(address, LANES), integers)
    low = v.builder.shl(words, integers([16] * LANES))
    high = v.builder.and_(words, integers([0xFFFF0000] * LANES))
    return [v.builder.bitcast(low, floats), v.builder.bitcast(high, floats)]


@intrinsic(prefer_literal=True)
def load_float(typing, address, kind):
    """The element of ``kind`` at an address, as float32."""
    if not isinstance(kind, types.IntegerLiteral):
        return None
    value = kind.literal_value

    def generate(context, builder, signature, arguments):
        v = VectorBuilder(builder)
        return v.first(v.load_cached(arguments[0], value, 1))

    return types.float32(types.int64, kind), generate
