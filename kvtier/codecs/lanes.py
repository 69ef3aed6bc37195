"""Conversions of several elements at once, as vector code that LLVM fits to any CPU.

numba has no bfloat16 and refuses float16 arrays; here both are 16-bit integers, widened exactly and rounded to nearest
even by integer arithmetic. Every conversion exists 64, 16 and 1 wide (for the rest of a row, and for strided rows): the
same code, so the same bits.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from typing import Any

import numba
from llvmlite import binding, ir
from numba import types
from numba.extending import intrinsic

from kvtier.codecs.intrinsics import BYTE, HALF, LONG, WORD, load_vector, store_vector

WIDE, NARROW = 64, 16
MAGIC = 12582912.0
"""1.5 * 2**23: adding it to a small float32 rounds to nearest even and leaves the integer in the low bits."""


def _has_half_instructions() -> bool:
    """Whether the CPU that numba compiles for rounds to float16 itself; otherwise LLVM would call a library."""
    if platform.machine() in ("aarch64", "arm64"):
        return True
    features = numba.config.CPU_FEATURES
    if features is None and numba.config.CPU_NAME is None:
        features = binding.get_host_cpu_features().flatten()
    return "+f16c" in (features or "").split(",")


HALF_INSTRUCTIONS = _has_half_instructions()


def _all(item: Any, value: Any, lanes: int) -> Any:
    return ir.Constant(ir.VectorType(item, lanes), [value] * lanes)


def _float(b: Any, bits: Any) -> Any:
    return b.bitcast(bits, ir.VectorType(ir.FloatType(), bits.type.count))


def _bits(b: Any, value: Any) -> Any:
    return b.bitcast(value, ir.VectorType(WORD, value.type.count))


def _widen_bf16(b: Any, stored: Any) -> Any:
    n = stored.type.count
    return _float(b, b.shl(b.zext(stored, ir.VectorType(WORD, n)), _all(WORD, 16, n)))


def _narrow_bf16(b: Any, value: Any) -> Any:
    bits, n = _bits(b, value), value.type.count
    odd = b.and_(b.lshr(bits, _all(WORD, 16, n)), _all(WORD, 1, n))
    rounded = b.add(bits, b.add(odd, _all(WORD, 0x7FFF, n)))
    halves = b.bitcast(rounded, ir.VectorType(HALF, 2 * n))
    upper = ir.Constant(ir.VectorType(WORD, n), list(range(1, 2 * n, 2)))
    return b.shuffle_vector(halves, ir.Constant(halves.type, ir.Undefined), upper)


def _widen_fp16(b: Any, stored: Any) -> Any:
    n = stored.type.count
    if HALF_INSTRUCTIONS:
        return b.fpext(b.bitcast(stored, ir.VectorType(ir.HalfType(), n)), ir.VectorType(ir.FloatType(), n))
    word = b.zext(stored, ir.VectorType(WORD, n))
    sign = b.shl(b.and_(word, _all(WORD, 0x8000, n)), _all(WORD, 16, n))
    magnitude = b.shl(b.and_(word, _all(WORD, 0x7FFF, n)), _all(WORD, 13, n))
    normal = b.add(magnitude, _all(WORD, 112 << 23, n))
    special = b.icmp_unsigned(">=", magnitude, _all(WORD, 0x7C00 << 13, n))
    normal = b.select(special, b.add(normal, _all(WORD, 112 << 23, n)), normal)
    small = b.fsub(_float(b, b.add(magnitude, _all(WORD, 113 << 23, n))), _all(ir.FloatType(), 2.0**-14, n))
    is_small = b.icmp_unsigned("<", magnitude, _all(WORD, 0x0400 << 13, n))
    return _float(b, b.or_(b.select(is_small, _bits(b, small), normal), sign))


def _narrow_fp16(b: Any, value: Any) -> Any:
    bits, n = _bits(b, value), value.type.count
    if HALF_INSTRUCTIONS:
        return b.bitcast(b.fptrunc(value, ir.VectorType(ir.HalfType(), n)), ir.VectorType(HALF, n))
    sign = b.and_(b.lshr(bits, _all(WORD, 16, n)), _all(WORD, 0x8000, n))
    magnitude = b.and_(bits, _all(WORD, 0x7FFFFFFF, n))
    odd = b.and_(b.lshr(magnitude, _all(WORD, 13, n)), _all(WORD, 1, n))
    rounded = b.add(b.sub(magnitude, _all(WORD, 112 << 23, n)), b.add(odd, _all(WORD, 0xFFF, n)))
    half = b.lshr(rounded, _all(WORD, 13, n))
    shifted = _bits(b, b.fadd(_float(b, magnitude), _all(ir.FloatType(), 0.5, n)))
    small = b.sub(shifted, _all(WORD, 126 << 23, n))
    half = b.select(b.icmp_unsigned("<", magnitude, _all(WORD, 113 << 23, n)), small, half)
    half = b.select(b.icmp_unsigned(">=", magnitude, _all(WORD, 143 << 23, n)), _all(WORD, 0x7C00, n), half)
    half = b.select(b.icmp_unsigned(">", magnitude, _all(WORD, 255 << 23, n)), _all(WORD, 0x7E00, n), half)
    return b.trunc(b.or_(half, sign), ir.VectorType(HALF, n))


STORED: dict[str, tuple[Any, Callable[..., Any], Callable[..., Any]]] = {
    "bfloat16": (HALF, _widen_bf16, _narrow_bf16),
    "float16": (HALF, _widen_fp16, _narrow_fp16),
    "float32": (WORD, _float, _bits),
}
"""Of each dtype: the integer that holds it, to float32 and from float32."""


def _splat(b: Any, value: Any, lanes: int) -> Any:
    vector = ir.VectorType(value.type, lanes)
    first = b.insert_element(ir.Constant(vector, ir.Undefined), value, WORD(0))
    return b.shuffle_vector(first, ir.Constant(vector, ir.Undefined), _all(WORD, 0, lanes))


def dequantise(dtype: str, lanes: int, *, streaming: bool = False) -> Any:
    """Make f(target, codes, scale): int8 codes times a float32 scale, rounded once to the dtype.

    The product is exact in float32: 8 bits times the 11 of a float16 scale. Streaming: past the cache, to a multiple of
    a cache line, at least one line at a time.
    """
    _, _, narrow = STORED[dtype]

    @intrinsic
    def step(typingctx: Any, target: Any, codes: Any, scale: Any) -> Any:
        def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            target, codes, scale = args
            code = builder.sext(load_vector(builder, codes, BYTE, lanes), ir.VectorType(WORD, lanes))
            value = builder.sitofp(code, ir.VectorType(ir.FloatType(), lanes))
            value = narrow(builder, builder.fmul(value, _splat(builder, scale, lanes)))
            store_vector(builder, value, target, streaming=streaming)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, types.float32), emit

    return step


def quantise(dtype: str, lanes: int) -> Any:
    """Make f(codes, source, inverse): elements times the inverse of the scale, rounded to int8 codes.

    The products are between -128 and 128; the caller chose the scale so.
    """
    item, widen, _ = STORED[dtype]

    @intrinsic
    def step(typingctx: Any, codes: Any, source: Any, inverse: Any) -> Any:
        def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            codes, source, inverse = args
            value = widen(builder, load_vector(builder, source, item, lanes))
            value = builder.fmul(value, _splat(builder, inverse, lanes))
            value = builder.fadd(value, _all(ir.FloatType(), MAGIC, lanes))
            code = builder.trunc(_bits(builder, value), ir.VectorType(BYTE, lanes))
            store_vector(builder, code, codes)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, types.float32), emit

    return step


def magnitude(dtype: str, lanes: int) -> Any:
    """Make f(source): the largest bit pattern without sign.

    Without the sign, floats of one dtype order as their bits do, Inf and NaN above all.
    """
    item = STORED[dtype][0]
    vector = ir.VectorType(item, lanes)
    mask = (1 << (item.width - 1)) - 1

    @intrinsic
    def largest(typingctx: Any, source: Any) -> Any:
        def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            value = builder.and_(load_vector(builder, args[0], item, lanes), _all(item, mask, lanes))
            name = f"llvm.vector.reduce.umax.v{lanes}i{item.width}"
            reduce = builder.module.declare_intrinsic(name, (), ir.FunctionType(item, [vector]))
            return builder.zext(builder.call(reduce, [value]), LONG)

        return types.int64(types.int64), emit

    return largest


INFINITY = {"bfloat16": 0x7F80, "float16": 0x7C00, "float32": 0x7F800000}
"""Bits of each dtype's infinity; above are NaNs."""


def widen(dtype: str) -> Any:
    """Make f(bits): the float32 of one element."""
    item, widened, _ = STORED[dtype]

    @intrinsic
    def convert(typingctx: Any, bits: Any) -> Any:
        def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            one = builder.bitcast(builder.trunc(args[0], item), ir.VectorType(item, 1))
            return builder.extract_element(widened(builder, one), WORD(0))

        return types.float32(types.int64), emit

    return convert
