"""The steps of the CPU attention kernel as numba intrinsics.

A step handles the query heads that share a KV head (a *group*) and one tile of tokens. ``head_dim``,
``group``, ``kind`` and ``capped`` must be constants where a step is called: they shape its code.
"""

import math
from collections.abc import Callable, Sequence

import llvmlite.binding
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from kernels.cpu_vectors import CACHE_LINE_BYTES, I64, ITEM_BYTES, VectorBuilder

TILE = 16  # tokens per online-softmax step
STEP = 4  # tokens per call of score_step
_LANES = 16 if llvmlite.binding.get_host_cpu_features().get("avx512f") else 8
_ACCUMULATORS = _LANES  # vectors kept live: half the registers of AVX-512 and AVX2


def _vectors(head_dim: int) -> tuple[int, int]:
    """Lanes of a vector, vectors of a row."""
    lanes = _LANES if head_dim % _LANES == 0 else 8
    return lanes, head_dim // lanes


def _chunks(total: int, most: int) -> list[range]:
    return [range(start, min(start + most, total)) for start in range(0, total, most)]


def _step(arguments: Sequence[types.Type], literals: Sequence[types.Type], emit: Callable):
    """Signature and code generator of a step without result; ``emit(v, *arguments, *literal values)``."""
    values = [literal.literal_value for literal in literals if isinstance(literal, types.IntegerLiteral)]
    if len(values) < len(literals):
        return None

    def generate(context, builder, signature, llvm_arguments):
        emit(VectorBuilder(builder), *llvm_arguments[: len(arguments)], *values)
        return context.get_dummy_value()

    return types.void(*arguments, *literals), generate


@intrinsic(prefer_literal=True)
def score_step(typing, query, key, rows, next_key, next_rows, scores, head_dim, group, kind):
    """Products of a group's queries with STEP keys; asks for the next rows meanwhile.

    query: float32 ``[group, head_dim]``. rows, next_rows: int64 ``[STEP]``, byte offsets of the tokens'
    rows from ``key`` and ``next_key``. scores: float32 ``[group, TILE]``, out at the first STEP columns.
    """
    return _step([types.int64] * 6, [head_dim, group, kind], _emit_scores)


def _emit_scores(v, query, key, rows, next_key, next_rows, scores, head_dim, group, kind):
    lanes, num_vectors = _vectors(head_dim)
    tokens = range(STEP)
    keys = [v.builder.add(key, v.load_scalar(v.offset(rows, 8 * t), I64)) for t in tokens]
    for t in tokens:
        upcoming = v.builder.add(next_key, v.load_scalar(v.offset(next_rows, 8 * t), I64))
        v.prefetch(upcoming, head_dim * ITEM_BYTES[kind])
    for heads in _chunks(group, max(1, _ACCUMULATORS // STEP)):
        sums = {(g, t): v.constant(0.0, lanes) for g in heads for t in tokens}
        for column in range(num_vectors):
            offset = column * lanes * ITEM_BYTES[kind]
            k = [v.load_cached(v.offset(keys[t], offset), kind, lanes) for t in tokens]
            for g in heads:
                q = v.load(v.offset(query, (g * head_dim + column * lanes) * 4), lanes)
                for t in tokens:
                    sums[g, t] = v.fma(q, k[t], sums[g, t])
        for g in heads:
            v.store(v.four_sums(*(sums[g, t] for t in tokens)), v.offset(scores, g * TILE * 4))


@intrinsic(prefer_literal=True)
def softmax_step(typing, scores, low, high, scale, softcap, state, rescale, group, capped):
    """Turn a tile's scores into weights and fold them into the running softmax.

    scores: float32 ``[group, TILE]``, in and out; tokens outside ``low <= t < high`` do not count.
    They are multiplied by ``scale``, with ``capped`` then become ``softcap * tanh(score)``, and count as
    exponents of 2. state: float32 ``[2, group]``, running maximum and sum.
    rescale: float32 ``[group]``, out: the factor that older weights now need.
    """
    integer, real = types.int64, types.float32
    arguments = [integer, integer, integer, real, real, integer, integer]
    return _step(arguments, [group, capped], _emit_softmax)


def _emit_softmax(v, scores, low, high, scale, softcap, state, rescale, group, capped):
    builder = v.builder
    token = ir.Constant(ir.VectorType(I64, TILE), list(range(TILE)))
    inside = builder.and_(
        builder.icmp_signed(">=", token, v.splat(low, TILE)),
        builder.icmp_signed("<", token, v.splat(high, TILE)),
    )
    # One stage for all heads, then the next: the long dependency chains of the heads overlap.
    for heads in _chunks(group, 4):
        old = [v.load_scalar(v.offset(state, g * 4)) for g in heads]
        exponents = [v.load(v.offset(scores, g * TILE * 4), TILE) for g in heads]
        exponents = [builder.fmul(s, v.splat(scale, TILE)) for s in exponents]
        if capped:
            exponents = [builder.fmul(v.tanh(s), v.splat(softcap, TILE)) for s in exponents]
        exponents = [builder.select(inside, s, v.constant(-math.inf, TILE)) for s in exponents]
        new = [v.maximum(v.reduce(v.maximum, s), m) for s, m in zip(exponents, old, strict=True)]
        weights = [v.exp2(builder.fsub(s, v.splat(m, TILE))) for s, m in zip(exponents, new, strict=True)]
        factors = [v.first(v.exp2(v.splat(builder.fsub(a, b), 4))) for a, b in zip(old, new, strict=True)]
        for g, m, w, factor in zip(heads, new, weights, factors, strict=True):
            v.store(w, v.offset(scores, g * TILE * 4))
            v.store(m, v.offset(state, g * 4))
            v.store(factor, v.offset(rescale, g * 4))
            sum_address = v.offset(state, (group + g) * 4)
            v.store(v.fma(v.load_scalar(sum_address), factor, v.reduce(builder.fadd, w)), sum_address)


@intrinsic(prefer_literal=True)
def value_step(typing, weights, value, rows, next_value, next_rows, low, high, rescale, output, head_dim, group, kind):
    """``output = output * rescale + weights @ values`` over ``low <= t < high`` of a tile.

    weights: float32 ``[group, TILE]``. rows, next_rows: int64 ``[TILE]``, as in ``score_step``.
    output: float32 ``[group, head_dim]``.
    """
    return _step([types.int64] * 9, [head_dim, group, kind], _emit_values)


def _emit_values(v, weights, value, rows, next_value, next_rows, low, high, rescale, output, head_dim, group, kind):
    builder = v.builder
    lanes, num_vectors = _vectors(head_dim)

    def emit_block(heads: range, columns: range, prefetching: bool) -> None:
        # LLVM turns these stack slots into registers.
        sums = {(g, c): cgutils.alloca_once_value(builder, v.constant(0.0, lanes)) for g in heads for c in columns}
        with cgutils.for_range_slice(builder, low, high, I64(1)) as (t, _):
            row = builder.add(value, v.load_scalar(v.element(rows, t, 8), I64))
            if prefetching:
                upcoming = builder.add(next_value, v.load_scalar(v.element(next_rows, t, 8), I64))
                v.prefetch(upcoming, head_dim * ITEM_BYTES[kind])
            first_weight = v.element(weights, t, 4)
            w = {g: v.splat(v.load_scalar(v.offset(first_weight, g * TILE * 4)), lanes) for g in heads}
            for c in columns:
                x = v.load_cached(v.offset(row, c * lanes * ITEM_BYTES[kind]), kind, lanes)
                for g in heads:
                    builder.store(v.fma(w[g], x, builder.load(sums[g, c])), sums[g, c])
        for g in heads:
            factor = v.splat(v.load_scalar(v.offset(rescale, g * 4)), lanes)
            for c in columns:
                address = v.offset(output, (g * head_dim + c * lanes) * 4)
                v.store(v.fma(v.load(address, lanes), factor, builder.load(sums[g, c])), address)

    for heads in _chunks(group, 4):
        for columns in _chunks(num_vectors, max(1, _ACCUMULATORS // len(heads))):
            emit_block(heads, columns, prefetching=heads.start == columns.start == 0)


@intrinsic
def prefetch(typing, address):
    """Ask for one cache line, into the second level."""

    def generate(context, builder, signature, arguments):
        VectorBuilder(builder).prefetch(arguments[0], CACHE_LINE_BYTES, level=2)
        return context.get_dummy_value()

    return types.void(types.int64), generate


@intrinsic
def fetch_add(typing, address, amount):
    """Atomically add to the int64 at ``address``; the value before. Orders memory between threads."""

    def generate(context, builder, signature, arguments):
        pointer = builder.inttoptr(arguments[0], I64.as_pointer())
        return builder.atomic_rmw("add", pointer, arguments[1], "acq_rel")

    return types.int64(types.int64, types.int64), generate


@intrinsic
def call(typing, function, arguments, item, ahead):
    """Call the function at an address with three integers, the first of them an address too."""

    def generate(context, builder, signature, values):
        kind = ir.FunctionType(ir.VoidType(), [I64, I64, I64])
        builder.call(builder.inttoptr(values[0], kind.as_pointer()), values[1:])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), generate


@intrinsic
def yield_processor(typing):
    """Let another thread of the machine run."""

    def generate(context, builder, signature, values):
        kind = ir.FunctionType(ir.IntType(32), [])
        builder.call(cgutils.get_or_insert_function(builder.module, kind, "sched_yield"), [])
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic(prefer_literal=True)
def scratch(typing, num_bytes):
    """Address of memory on the stack of the function that this is in. ``num_bytes`` must be constant."""
    if not isinstance(num_bytes, types.IntegerLiteral):
        return None

    def generate(context, builder, signature, values):
        memory = cgutils.alloca_once(builder, ir.ArrayType(ir.IntType(8), num_bytes.literal_value))
        memory.align = CACHE_LINE_BYTES
        return builder.ptrtoint(memory, I64)

    return types.int64(num_bytes), generate


def pointer_to(element: types.Type):
    """An intrinsic that makes an address a pointer to ``element``."""

    @intrinsic
    def pointer(typing, address):
        def generate(context, builder, signature, arguments):
            return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

        return types.CPointer(element)(types.int64), generate

    return pointer


int16_pointer = pointer_to(types.int16)
int32_pointer = pointer_to(types.int32)
int64_pointer = pointer_to(types.int64)
float32_pointer = pointer_to(types.float32)
