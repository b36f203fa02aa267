"""Vector instructions for the CPU kernels: numba intrinsics that emit LLVM IR.

numba alone keeps accumulators in arrays, that is in memory. Here every vector is an SSA value, so LLVM
keeps a tile's accumulators in registers and uses fused multiply-adds. LLVM splits vectors wider than the
machine's, so the same code runs on AVX-512, AVX2 and NEON; ``LANES`` only tunes how many accumulators
are live. Addresses are plain integers in bytes. ``head_dim``, ``group`` and ``kind`` are literals.
"""

import math
import os

import llvmlite.binding
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

TILE = int(os.environ.get("TILE", "16"))  # tokens per online-softmax step

PFLEVEL = int(os.environ.get("PF", "3"))
STEP = 4  # tokens whose scores are reduced together
LANES = 16 if llvmlite.binding.get_host_cpu_features().get("avx512f") else 8
FLOAT32, BFLOAT16, FLOAT16 = range(3)  # kinds of cache element
ITEM_BYTES = (4, 2, 2)

_I16, _I32, _I64, _F32 = ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
_TANH_SERIES = (1, -1 / 3, 2 / 15, -17 / 315, 62 / 2835, -1382 / 155925, 21844 / 6081075)


class _Emitter:
    """The few vector operations the kernels are made of."""

    def __init__(self, builder: ir.IRBuilder) -> None:
        self.builder = builder

    def offset(self, address, num_bytes: int):
        return self.builder.add(address, _I64(num_bytes))

    def pointer(self, address, element):
        return self.builder.inttoptr(address, element.as_pointer())

    def load(self, address, lanes: int):
        return self.builder.load(self.pointer(address, ir.VectorType(_F32, lanes)), align=4)

    def store(self, vector, address) -> None:
        self.builder.store(vector, self.pointer(address, vector.type), align=4)

    def load_scalar(self, address, element=_F32):
        return self.builder.load(self.pointer(address, element))

    def load_element(self, address, kind: int, lanes: int):
        """``lanes`` cache elements as float32."""
        if kind == FLOAT32:
            return self.load(address, lanes)
        floats = ir.VectorType(_F32, lanes)
        if kind == FLOAT16:
            halves = self.builder.load(self.pointer(address, ir.VectorType(ir.HalfType(), lanes)), align=2)
            return self.builder.fpext(halves, floats)
        bits = self.builder.load(self.pointer(address, ir.VectorType(_I16, lanes)), align=2)
        integers = ir.VectorType(_I32, lanes)
        bits = self.builder.shl(self.builder.zext(bits, integers), integers([16] * lanes))
        return self.builder.bitcast(bits, floats)

    def splat(self, scalar, lanes: int):
        vector = ir.VectorType(scalar.type, lanes)
        first = self.builder.insert_element(ir.Constant(vector, ir.Undefined), scalar, _I32(0))
        return self.shuffle(first, first, [0] * lanes)

    def shuffle(self, a, b, indices: list[int]):
        mask = ir.Constant(ir.VectorType(_I32, len(indices)), indices)
        return self.builder.shuffle_vector(a, b, mask)

    def constant(self, value: float, lanes: int):
        return ir.Constant(ir.VectorType(_F32, lanes), [value] * lanes)

    def call(self, name: str, *arguments):
        """LLVM intrinsic over vectors or scalars of one type."""
        kind = arguments[0].type
        suffix = f"v{kind.count}f32" if isinstance(kind, ir.VectorType) else "f32"
        function_type = ir.FunctionType(kind, [a.type for a in arguments])
        function = cgutils.get_or_insert_function(self.builder.module, function_type, f"llvm.{name}.{suffix}")
        return self.builder.call(function, arguments)

    def fma(self, a, b, c):
        return self.call("fma", a, b, c)

    def prefetch(self, address, num_bytes: int, level=PFLEVEL) -> None:
        """Ask for the cache lines of ``[address, address + num_bytes)``."""
        pointer_type = ir.IntType(8).as_pointer()
        function_type = ir.FunctionType(ir.VoidType(), [pointer_type, _I32, _I32, _I32])
        name = "llvm.prefetch.p0" if llvmlite.binding.llvm_version_info[0] >= 15 else "llvm.prefetch.p0i8"
        function = cgutils.get_or_insert_function(self.builder.module, function_type, name)
        for start in range(0, num_bytes, 64):
            line = self.builder.inttoptr(self.offset(address, start), pointer_type)
            self.builder.call(function, [line, _I32(0), _I32(level), _I32(1)])

    def reduce(self, combine, vector):
        """Fold a vector to one scalar."""
        while vector.type.count > 1:
            half = vector.type.count // 2
            low = self.shuffle(vector, vector, list(range(half)))
            high = self.shuffle(vector, vector, list(range(half, 2 * half)))
            vector = combine(low, high)
        return self.builder.extract_element(vector, _I32(0))

    def sums(self, a, b, c, d):
        """``<4 x float>`` of the sums of four vectors."""
        lanes = a.type.count

        def pair_sum(x, y, low, high):
            def interleave(indices):
                return self.shuffle(x, y, [base + i for base in range(0, lanes, 4) for i in indices])

            return self.builder.fadd(interleave(low), interleave(high))

        n = lanes
        ab = pair_sum(a, b, (0, n, 1, n + 1), (2, n + 2, 3, n + 3))
        cd = pair_sum(c, d, (0, n, 1, n + 1), (2, n + 2, 3, n + 3))
        total = pair_sum(ab, cd, (0, 1, n, n + 1), (2, 3, n + 2, n + 3))
        while total.type.count > 4:
            half = total.type.count // 2
            low = self.shuffle(total, total, list(range(half)))
            high = self.shuffle(total, total, list(range(half, 2 * half)))
            total = self.builder.fadd(low, high)
        return total

    def exp2(self, x):
        """2**x for x <= 0, below 2**-126 clamped: relative error about 1e-7."""
        lanes = x.type.count
        x = self.call("maxnum", x, self.constant(-126.0, lanes))
        whole = self.call("rint", x)
        fraction = self.builder.fsub(x, whole)
        power = self.constant(math.log(2) ** 7 / math.factorial(7), lanes)
        for k in reversed(range(7)):
            power = self.fma(power, fraction, self.constant(math.log(2) ** k / math.factorial(k), lanes))
        integers = ir.VectorType(_I32, lanes)
        exponent = self.builder.shl(self.builder.fptosi(whole, integers), integers([23] * lanes))
        bits = self.builder.add(self.builder.bitcast(power, integers), exponent)
        return self.builder.bitcast(bits, power.type)

    def tanh(self, x):
        """Relative error about 3e-7: a series near zero, exponentials elsewhere."""
        lanes = x.type.count
        builder = self.builder
        one = self.constant(1.0, lanes)
        magnitude = self.call("fabs", x)
        z = self.exp2(builder.fmul(magnitude, self.constant(-2 / math.log(2), lanes)))
        large = self.call("copysign", builder.fdiv(builder.fsub(one, z), builder.fadd(one, z)), x)
        square = builder.fmul(x, x)
        series = self.constant(_TANH_SERIES[-1], lanes)
        for coefficient in reversed(_TANH_SERIES[:-1]):
            series = self.fma(series, square, self.constant(coefficient, lanes))
        near_zero = builder.fcmp_ordered("<", magnitude, self.constant(0.5, lanes))
        return builder.select(near_zero, builder.fmul(series, x), large)


def _literals(*arguments) -> bool:
    return all(isinstance(a, types.IntegerLiteral) for a in arguments)


def _vectors(head_dim: int) -> tuple[int, int]:
    """Lanes of a vector and vectors of a row."""
    lanes = LANES if head_dim % LANES == 0 else 8
    return lanes, head_dim // lanes


def _chunks(total: int, most: int):
    return [range(start, min(start + most, total)) for start in range(0, total, most)]


@intrinsic(prefer_literal=True)
def score_step(typing, query, key, rows, next_key, next_rows, scores, head_dim, group, kind):
    """Products of a head group's queries with STEP keys, to ``scores`` float32 ``[group, TILE]``.

    query: float32 ``[group, head_dim]``. rows: int64 ``[STEP]``, byte offsets from ``key``.
    """
    if not _literals(head_dim, group, kind):
        return None
    dim, heads, kind_value = head_dim.literal_value, group.literal_value, kind.literal_value
    lanes, num_vectors = _vectors(dim)

    def emit(context, builder, signature, arguments):
        e = _Emitter(builder)
        query, key, rows, next_key, next_rows, scores = arguments[:6]
        keys = [builder.add(key, e.load_scalar(e.offset(rows, 8 * t), _I64)) for t in range(STEP)]
        for t in range(STEP):
            upcoming = builder.add(next_key, e.load_scalar(e.offset(next_rows, 8 * t), _I64))
            e.prefetch(upcoming, dim * ITEM_BYTES[kind_value])
        for chunk in _chunks(heads, max(1, LANES // STEP)):
            sums = {(g, t): e.constant(0.0, lanes) for g in chunk for t in range(STEP)}
            for v in range(num_vectors):
                offset = v * lanes * ITEM_BYTES[kind_value]
                k = [e.load_element(e.offset(keys[t], offset), kind_value, lanes) for t in range(STEP)]
                for g in chunk:
                    q = e.load(e.offset(query, (g * dim + v * lanes) * 4), lanes)
                    for t in range(STEP):
                        sums[g, t] = e.fma(q, k[t], sums[g, t])
            for g in chunk:
                e.store(e.sums(*(sums[g, t] for t in range(STEP))), e.offset(scores, g * TILE * 4))
        return context.get_dummy_value()

    return types.void(
        types.int64, types.int64, types.int64, types.int64, types.int64, types.int64, head_dim, group, kind
    ), emit


@intrinsic(prefer_literal=True)
def softmax_step(typing, scores, low, high, scale, softcap, state, rescale, group, capped):
    """Turn a tile's base-2 scores into weights and fold them into the running softmax.

    Scores are first multiplied by ``scale``; with ``capped`` they then become ``softcap * tanh(score)``.

    scores: float32 ``[group, TILE]``, only tokens ``low <= t < high`` count. state: float32
    ``[2, group]``, running maximum and sum. rescale: float32 ``[group]``, out: factor on older values.
    """
    if not _literals(group, capped):
        return None
    heads = group.literal_value

    def emit(context, builder, signature, arguments):
        e = _Emitter(builder)
        scores, low, high, scale, softcap, state, rescale = arguments[:7]
        token = ir.Constant(ir.VectorType(_I64, TILE), list(range(TILE)))
        inside = builder.and_(
            builder.icmp_signed(">=", token, e.splat(low, TILE)),
            builder.icmp_signed("<", token, e.splat(high, TILE)),
        )
        for chunk in _chunks(heads, 4):
            s, old, new, p = {}, {}, {}, {}
            for g in chunk:
                s[g] = e.load(e.offset(scores, g * TILE * 4), TILE)
                s[g] = builder.fmul(s[g], e.splat(scale, TILE))
                if capped.literal_value:
                    s[g] = builder.fmul(e.tanh(s[g]), e.splat(softcap, TILE))
                s[g] = builder.select(inside, s[g], e.constant(-math.inf, TILE))
                old[g] = e.load_scalar(e.offset(state, g * 4))
            for g in chunk:
                largest = e.reduce(lambda a, b: e.call("maxnum", a, b), s[g])
                new[g] = e.call("maxnum", largest, old[g])
                e.builder.store(new[g], e.pointer(e.offset(state, g * 4), _F32))
            for g in chunk:
                p[g] = e.exp2(builder.fsub(s[g], e.splat(new[g], TILE)))
                p[g] = builder.select(inside, p[g], e.constant(0.0, TILE))
                e.store(p[g], e.offset(scores, g * TILE * 4))
            for g in chunk:
                factor = e.exp2(e.splat(builder.fsub(old[g], new[g]), 4))
                factor = builder.extract_element(factor, _I32(0))
                e.builder.store(factor, e.pointer(e.offset(rescale, g * 4), _F32))
                address = e.pointer(e.offset(state, (heads + g) * 4), _F32)
                total = e.reduce(builder.fadd, p[g])
                builder.store(e.fma(builder.load(address), factor, total), address)
        return context.get_dummy_value()

    i64, f32 = types.int64, types.float32
    return types.void(i64, i64, i64, f32, f32, i64, i64, group, capped), emit


@intrinsic(prefer_literal=True)
def value_step(typing, weights, value, rows, next_value, next_rows, low, high, rescale, output, head_dim, group, kind):
    """``output = output * rescale + weights @ values`` over the tokens ``low <= t < high`` of a tile.

    weights: float32 ``[group, TILE]``. rows: int64 ``[TILE]``, byte offsets from ``value``.
    output: float32 ``[group, head_dim]``.
    """
    if not _literals(head_dim, group, kind):
        return None
    dim, heads, kind_value = head_dim.literal_value, group.literal_value, kind.literal_value
    lanes, num_vectors = _vectors(dim)

    def emit_block(e, weights, value, rows, next_value, next_rows, low, high, rescale, output, block, columns):
        builder = e.builder
        registers = {}
        for g in block:
            for v in columns:
                registers[g, v] = cgutils.alloca_once_value(builder, e.constant(0.0, lanes))
        with cgutils.for_range_slice(builder, low, high, _I64(1)) as (t, _):
            row = builder.add(value, e.load_scalar(builder.add(rows, builder.mul(t, _I64(8))), _I64))
            upcoming = builder.add(next_value, e.load_scalar(builder.add(next_rows, builder.mul(t, _I64(8))), _I64))
            e.prefetch(upcoming, dim * ITEM_BYTES[kind_value])
            token = builder.add(weights, builder.mul(t, _I64(4)))
            w = {g: e.splat(e.load_scalar(e.offset(token, g * TILE * 4)), lanes) for g in block}
            for v in columns:
                x = e.load_element(e.offset(row, v * lanes * ITEM_BYTES[kind_value]), kind_value, lanes)
                for g in block:
                    builder.store(e.fma(w[g], x, builder.load(registers[g, v])), registers[g, v])
        for g in block:
            factor = e.splat(e.load_scalar(e.offset(rescale, g * 4)), lanes)
            for v in columns:
                address = e.offset(output, (g * dim + v * lanes) * 4)
                e.store(e.fma(e.load(address, lanes), factor, builder.load(registers[g, v])), address)

    def emit(context, builder, signature, arguments):
        e = _Emitter(builder)
        for block in _chunks(heads, 4):
            for columns in _chunks(num_vectors, max(1, LANES // len(block))):
                emit_block(e, *arguments[:9], block, columns)
        return context.get_dummy_value()

    integers = [types.int64] * 9
    return types.void(*integers, head_dim, group, kind), emit


@intrinsic
def prefetch(typing, address):
    """Ask for one cache line."""

    def emit(context, builder, signature, arguments):
        _Emitter(builder).prefetch(arguments[0], 1, 2)
        return context.get_dummy_value()

    return types.void(types.int64), emit


@intrinsic
def fetch_add(typing, address, amount):
    """Atomically add to the int64 at ``address``; the value before."""

    def emit(context, builder, signature, arguments):
        pointer = builder.inttoptr(arguments[0], _I64.as_pointer())
        return builder.atomic_rmw("add", pointer, arguments[1], "acq_rel")

    return types.int64(types.int64, types.int64), emit


def _pointer_cast(element):
    @intrinsic
    def cast(typing, address):
        def emit(context, builder, signature, arguments):
            return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

        return types.CPointer(element)(types.int64), emit

    return cast


int32_pointer = _pointer_cast(types.int32)
int64_pointer = _pointer_cast(types.int64)
float32_pointer = _pointer_cast(types.float32)
