"""Vector arithmetic as LLVM IR, for the numba intrinsics in ``cpu_steps`` and ``cpu_tiles``.

numba alone keeps accumulators in arrays, that is in memory. Here every vector is an SSA value, so LLVM
keeps accumulators in registers and uses fused multiply-adds. LLVM splits vectors that are wider than the
machine's, so the same code runs on AVX-512, AVX2 and NEON. Addresses are integers, in bytes.
"""

import math
from collections.abc import Callable, Sequence

import llvmlite.binding
from llvmlite import ir
from numba.core import cgutils

FLOAT32, BFLOAT16, FLOAT16 = range(3)  # kinds of cache element
ITEM_BYTES = (4, 2, 2)
CACHE_LINE_BYTES = 64

I16, I32, I64, F32 = ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
_TANH_SERIES = (1, -1 / 3, 2 / 15, -17 / 315, 62 / 2835, -1382 / 155925, 21844 / 6081075)
_TANH_SERIES_LIMIT = 0.5  # where the next term is below float32's resolution


class VectorBuilder:
    """Emits the few vector operations that attention and linear layers are made of."""

    def __init__(self, builder: ir.IRBuilder) -> None:
        self.builder = builder

    # Memory

    def offset(self, address: ir.Value, num_bytes: int) -> ir.Value:
        return self.builder.add(address, I64(num_bytes))

    def element(self, address: ir.Value, index: ir.Value, item_bytes: int) -> ir.Value:
        return self.builder.add(address, self.builder.mul(index, I64(item_bytes)))

    def load(self, address: ir.Value, lanes: int) -> ir.Value:
        return self.builder.load(self._pointer(address, ir.VectorType(F32, lanes)), align=4)

    def store(self, vector: ir.Value, address: ir.Value) -> None:
        self.builder.store(vector, self._pointer(address, vector.type), align=4)

    def load_scalar(self, address: ir.Value, kind: ir.Type = F32) -> ir.Value:
        return self.builder.load(self._pointer(address, kind))

    def load_cached(self, address: ir.Value, kind: int, lanes: int) -> ir.Value:
        """``lanes`` cache elements of a kind, as float32."""
        if kind == FLOAT32:
            return self.load(address, lanes)
        floats, integers = ir.VectorType(F32, lanes), ir.VectorType(I32, lanes)
        if kind == FLOAT16:
            halves = self.builder.load(self._pointer(address, ir.VectorType(ir.HalfType(), lanes)), align=2)
            return self.builder.fpext(halves, floats)
        bits = self.builder.load(self._pointer(address, ir.VectorType(I16, lanes)), align=2)
        bits = self.builder.shl(self.builder.zext(bits, integers), integers([16] * lanes))
        return self.builder.bitcast(bits, floats)

    def store_rounded(self, vector: ir.Value, address: ir.Value, kind: int) -> None:
        """Store float32 values as FLOAT32 or BFLOAT16: rounded to the nearest, ties to even."""
        if kind == FLOAT32:
            return self.store(vector, address)
        builder, lanes = self.builder, vector.type.count
        integers = ir.VectorType(I32, lanes)
        bits = builder.bitcast(vector, integers)
        odd = builder.and_(builder.lshr(bits, integers([16] * lanes)), integers([1] * lanes))
        rounded = builder.add(builder.add(bits, odd), integers([0x7FFF] * lanes))
        is_nan = builder.fcmp_unordered("uno", vector, vector)
        rounded = builder.select(is_nan, integers([0x7FC00000] * lanes), rounded)
        halves = builder.trunc(builder.lshr(rounded, integers([16] * lanes)), ir.VectorType(I16, lanes))
        builder.store(halves, self._pointer(address, halves.type), align=2)

    def prefetch(self, address: ir.Value, num_bytes: int, level: int = 1) -> None:
        """Ask for the cache lines of ``[address, address + num_bytes)`` into a level of cache."""
        byte_pointer = ir.IntType(8).as_pointer()
        function_type = ir.FunctionType(ir.VoidType(), [byte_pointer, I32, I32, I32])
        suffix = "p0" if llvmlite.binding.llvm_version_info[0] >= 15 else "p0i8"
        function = cgutils.get_or_insert_function(self.builder.module, function_type, f"llvm.prefetch.{suffix}")
        read, locality, data = I32(0), I32(4 - level), I32(1)
        for start in range(0, num_bytes, CACHE_LINE_BYTES):
            line = self.builder.inttoptr(self.offset(address, start), byte_pointer)
            self.builder.call(function, [line, read, locality, data])

    # Arithmetic

    def constant(self, value: float, lanes: int) -> ir.Value:
        return ir.Constant(ir.VectorType(F32, lanes), [value] * lanes)

    def splat(self, scalar: ir.Value, lanes: int) -> ir.Value:
        undefined = ir.Constant(ir.VectorType(scalar.type, lanes), ir.Undefined)
        return self._shuffle(self.builder.insert_element(undefined, scalar, I32(0)), indices=[0] * lanes)

    def first(self, vector: ir.Value) -> ir.Value:
        return self.builder.extract_element(vector, I32(0))

    def fma(self, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
        return self._intrinsic("fma", a, b, c)

    def maximum(self, a: ir.Value, b: ir.Value) -> ir.Value:
        return self.builder.select(self.builder.fcmp_ordered(">", a, b), a, b)

    def reduce(self, combine: Callable[[ir.Value, ir.Value], ir.Value], vector: ir.Value) -> ir.Value:
        """Fold a vector to one scalar."""
        while vector.type.count > 1:
            vector = combine(*self._halves(vector))
        return self.first(vector)

    def four_sums(self, a: ir.Value, b: ir.Value, c: ir.Value, d: ir.Value) -> ir.Value:
        """``<4 x float>`` of the sums of four vectors."""
        n = a.type.count
        ab = self._lane_sums(a, b, (0, n, 1, n + 1), (2, n + 2, 3, n + 3))
        cd = self._lane_sums(c, d, (0, n, 1, n + 1), (2, n + 2, 3, n + 3))
        total = self._lane_sums(ab, cd, (0, 1, n, n + 1), (2, 3, n + 2, n + 3))
        while total.type.count > 4:
            total = self.builder.fadd(*self._halves(total))
        return total

    def exp2(self, x: ir.Value) -> ir.Value:
        """``2 ** x`` for ``x <= 0``, relative error about 1e-7; 2**-126 below -126."""
        lanes = x.type.count
        integers = ir.VectorType(I32, lanes)
        x = self.maximum(x, self.constant(-126.0, lanes))
        whole = self._intrinsic("rint", x)
        fraction = self.builder.fsub(x, whole)
        power = self._polynomial(fraction, [math.log(2) ** k / math.factorial(k) for k in range(8)])
        exponent = self.builder.shl(self.builder.fptosi(whole, integers), integers([23] * lanes))
        return self.builder.bitcast(self.builder.add(self.builder.bitcast(power, integers), exponent), power.type)

    def tanh(self, x: ir.Value) -> ir.Value:
        """Relative error about 3e-7: a series near zero, exponentials elsewhere."""
        lanes = x.type.count
        one = self.constant(1.0, lanes)
        magnitude = self._intrinsic("fabs", x)
        z = self.exp2(self.builder.fmul(magnitude, self.constant(-2 / math.log(2), lanes)))
        ratio = self.builder.fdiv(self.builder.fsub(one, z), self.builder.fadd(one, z))
        series = self.builder.fmul(self._polynomial(self.builder.fmul(x, x), _TANH_SERIES), x)
        near_zero = self.builder.fcmp_ordered("<", magnitude, self.constant(_TANH_SERIES_LIMIT, lanes))
        return self.builder.select(near_zero, series, self._intrinsic("copysign", ratio, x))

    def silu(self, x: ir.Value) -> ir.Value:
        """``x / (1 + exp(-x))``, relative error about 3e-7."""
        lanes = x.type.count
        one = self.constant(1.0, lanes)
        z = self.exp2(self.builder.fmul(self._intrinsic("fabs", x), self.constant(-1 / math.log(2), lanes)))
        is_negative = self.builder.fcmp_ordered("<", x, self.constant(0.0, lanes))
        numerator = self.builder.fmul(x, self.builder.select(is_negative, z, one))
        return self.builder.fdiv(numerator, self.builder.fadd(one, z))

    # Pieces of the above

    def _pointer(self, address: ir.Value, kind: ir.Type) -> ir.Value:
        return self.builder.inttoptr(address, kind.as_pointer())

    def _polynomial(self, x: ir.Value, coefficients: Sequence[float]) -> ir.Value:
        total = self.constant(coefficients[-1], x.type.count)
        for coefficient in reversed(coefficients[:-1]):
            total = self.fma(total, x, self.constant(coefficient, x.type.count))
        return total

    def _intrinsic(self, name: str, *arguments: ir.Value) -> ir.Value:
        """An LLVM intrinsic over float32 vectors or scalars of one type."""
        kind = arguments[0].type
        suffix = f"v{kind.count}f32" if isinstance(kind, ir.VectorType) else "f32"
        function_type = ir.FunctionType(kind, [a.type for a in arguments])
        function = cgutils.get_or_insert_function(self.builder.module, function_type, f"llvm.{name}.{suffix}")
        return self.builder.call(function, arguments)

    def _shuffle(self, a: ir.Value, b: ir.Value | None = None, *, indices: Sequence[int]) -> ir.Value:
        mask = ir.Constant(ir.VectorType(I32, len(indices)), list(indices))
        return self.builder.shuffle_vector(a, a if b is None else b, mask)

    def _halves(self, vector: ir.Value) -> tuple[ir.Value, ir.Value]:
        n = vector.type.count
        return self._shuffle(vector, indices=range(n // 2)), self._shuffle(vector, indices=range(n // 2, n))

    def _lane_sums(self, a: ir.Value, b: ir.Value, left: Sequence[int], right: Sequence[int]) -> ir.Value:
        """Sum of two shuffles that repeat every four lanes, which is how machines shuffle fastest."""
        repeats = range(0, a.type.count, 4)
        return self.builder.fadd(
            self._shuffle(a, b, indices=[start + i for start in repeats for i in left]),
            self._shuffle(a, b, indices=[start + i for start in repeats for i in right]),
        )
