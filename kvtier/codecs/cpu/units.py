"""Units of 32 elements between float32 and what is stored: vector code, emitted once for each kind of code.

Kernels work on rows of float32 that stay in the processor's cache: `widen` and `narrow` are all that knows the KV's
dtype, `pack` and `unpack` all that knows the codes. Every one rounds as `reference` does.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from kvtier.codecs.codebook import LEVELS, MIDPOINTS
from kvtier.codecs.cpu.intrinsics import BYTE, HALF, LONG, WORD, load_vector, store_vector
from kvtier.codecs.cpu.lanes import (
    HALF_INSTRUCTIONS,
    MAGIC,
    STORED,
    all_of,
    as_bits,
    as_float,
    join,
    look_up,
    narrow_normal,
    part,
    splat,
    times_plus,
)
from kvtier.codecs.layout import UNIT, Kind

FLOAT = ir.FloatType()
FLOATS = ir.VectorType(FLOAT, UNIT)
WORDS = ir.VectorType(WORD, UNIT)
ADDRESS, NOTHING, SINGLE = types.int64, types.void, types.float32
BITS = {Kind.INT8: 8, Kind.INT4: 4, Kind.INT3: 3, Kind.INT2: 2, Kind.LLOYD4: 4, Kind.LLOYD3: 3, Kind.LLOYD2: 2}
FLOAT8 = {Kind.E4M3: (20, 120, 16384.0, 2.0**-6), Kind.E5M2: (21, 112, 128.0, 2.0**-14)}
"""Bits of a float32's mantissa that are dropped, what its exponent is biased more, what a subnormal is added to so
that the sum rounds it, and the least normal number."""


def widen(dtype: str) -> Any:
    """Make f(target, source): 32 elements of the dtype to float32."""
    item, convert, _ = STORED[dtype]

    @intrinsic
    def step(typingctx: Any, target: Any, source: Any) -> Any:
        def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            store_vector(builder, convert(builder, load_vector(builder, args[1], item, UNIT)), args[0])
            return context.get_dummy_value()

        return NOTHING(ADDRESS, ADDRESS), emit

    return step


def narrow(dtype: str, *, streaming: bool = False) -> Any:
    """Make f(target, source): 32 float32 to the dtype; streaming: past the cache, to whole cache lines."""
    _, _, convert = STORED[dtype]

    @intrinsic
    def step(typingctx: Any, target: Any, source: Any) -> Any:
        def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            value = convert(builder, load_vector(builder, args[1], FLOAT, UNIT))
            store_vector(builder, value, args[0], streaming=streaming)
            return context.get_dummy_value()

        return NOTHING(ADDRESS, ADDRESS), emit

    return step


def _affine(builder: Any, scale: Any, zero: Any) -> tuple[Any, Any]:
    """Scale and zero point as vectors: what is given as an address is one for each element."""
    return tuple(
        load_vector(builder, v, FLOAT, UNIT) if v.type == LONG else splat(builder, v, UNIT) for v in (scale, zero)
    )


def _load_codes(b: Any, kind: Kind, address: Any) -> Any:
    """32 codes as words."""
    bits = BITS.get(kind, 8)
    if bits == 8:
        return b.zext(load_vector(b, address, BYTE, UNIT), WORDS)
    fields = 2 if bits == 4 else 4
    packed = b.zext(load_vector(b, address, BYTE, UNIT // fields), ir.VectorType(WORD, UNIT // fields))
    width, mask = 8 // fields, 2 ** (8 // fields) - 1
    parts = [
        b.and_(b.lshr(packed, all_of(WORD, i * width, UNIT // fields)), all_of(WORD, mask, UNIT // fields))
        for i in range(fields)
    ]
    codes = join(b, parts)
    if bits == 3:
        upper = b.load(b.inttoptr(b.add(address, LONG(8)), WORD.as_pointer()), align=1)
        upper = b.lshr(splat(b, upper, UNIT), ir.Constant(WORDS, list(range(UNIT))))
        upper = b.and_(b.shl(upper, all_of(WORD, 2, UNIT)), all_of(WORD, 4, UNIT))
        codes = b.or_(codes, upper)
    return codes


def _store_codes(b: Any, kind: Kind, codes: Any, address: Any) -> None:
    bits = BITS.get(kind, 8)
    if bits == 8:
        store_vector(b, b.trunc(codes, ir.VectorType(BYTE, UNIT)), address)
        return
    fields = 2 if bits == 4 else 4
    count, width = UNIT // fields, 8 // fields
    lower = b.and_(codes, all_of(WORD, 2**width - 1, UNIT))
    packed = part(b, lower, 0, count)
    for i in range(1, fields):
        packed = b.or_(packed, b.shl(part(b, lower, i * count, count), all_of(WORD, i * width, count)))
    store_vector(b, b.trunc(packed, ir.VectorType(BYTE, count)), address)
    if bits == 3:
        upper = b.icmp_unsigned(">=", codes, all_of(WORD, 4, UNIT))
        b.store(b.bitcast(upper, WORD), b.inttoptr(b.add(address, LONG(8)), WORD.as_pointer()), align=1)


def _value(b: Any, kind: Kind, codes: Any) -> Any:
    """What codes stand for, before scale and zero point."""
    if kind in FLOAT8:
        return _value_of_float8(b, kind, codes)
    if kind in (Kind.LLOYD4, Kind.LLOYD3, Kind.LLOYD2):
        positive = LEVELS[BITS[kind]]
        return look_up(b, np.concatenate([-positive[::-1], positive]), codes)
    return b.sitofp(codes, FLOATS)


def _value_of_float8(b: Any, kind: Kind, codes: Any) -> Any:
    sign = b.and_(codes, all_of(WORD, 0x80, UNIT))
    size = b.and_(codes, all_of(WORD, 0x7F, UNIT))
    shift, bias, _, least = FLOAT8[kind]
    if HALF_INSTRUCTIONS:
        # Moved to the places of a float16's exponent and mantissa it is one, subnormals too; e4m3 is 2**8 times more.
        half = b.or_(b.shl(sign, all_of(WORD, 8, UNIT)), b.shl(size, all_of(WORD, shift - 13, UNIT)))
        value = STORED["float16"][1](b, b.trunc(half, ir.VectorType(HALF, UNIT)))
        return b.fmul(value, all_of(FLOAT, 256.0, UNIT)) if kind == Kind.E4M3 else value
    size = b.shl(size, all_of(WORD, shift, UNIT))
    normal = b.add(size, all_of(WORD, bias << 23, UNIT))
    raised = as_float(b, b.add(size, all_of(WORD, (bias + 1) << 23, UNIT)))
    small = as_bits(b, b.fsub(raised, all_of(FLOAT, least, UNIT)))
    value = b.select(b.icmp_unsigned("<", size, all_of(WORD, 1 << 23, UNIT)), small, normal)
    return as_float(b, b.or_(value, b.shl(sign, all_of(WORD, 24, UNIT))))


def _dequantised(b: Any, kind: Kind, codes: Any, scale: Any, zero: Any) -> Any:
    value = _value(b, kind, _load_codes(b, kind, codes))
    scale, zero = _affine(b, scale, zero)
    return b.fmul(value, scale) if kind.name.startswith("LLOYD") else times_plus(b, value, scale, zero)


def stream(kind: Kind, dtype: str, *, each: bool) -> Any:
    """Make f(target, codes, scale, zero): 32 codes of integers or floats to 16 bits each, past the cache."""
    parameter = ADDRESS if each else SINGLE

    @intrinsic
    def step(typingctx: Any, target: Any, codes: Any, scale: Any, zero: Any) -> Any:
        def emit(context: Any, b: Any, signature: Any, args: Any) -> Any:
            target, *what = args
            value = narrow_normal(b, dtype, _dequantised(b, kind, *what))
            store_vector(b, value, target, streaming=True)
            return context.get_dummy_value()

        return NOTHING(ADDRESS, ADDRESS, parameter, parameter), emit

    return step


def unpack(kind: Kind, *, each: bool) -> Any:
    """Make f(target, codes, scale, zero): 32 codes to float32, times scale plus zero point.

    `each`: scale and zero are addresses of float32 for each element; else they are two float32. Levels have no zero
    point; 16-bit codes have neither.
    """
    parameter = ADDRESS if each else SINGLE

    @intrinsic
    def step(typingctx: Any, target: Any, codes: Any, scale: Any, zero: Any) -> Any:
        def emit(context: Any, b: Any, signature: Any, args: Any) -> Any:
            target, codes, scale, zero = args
            value = _dequantised(b, kind, codes, scale, zero)
            store_vector(b, value, target)
            return context.get_dummy_value()

        return NOTHING(ADDRESS, ADDRESS, parameter, parameter), emit

    return step


def pack(kind: Kind, *, each: bool) -> Any:
    """Make f(codes, source, inverse, zero, within): 32 float32, less the zero point, times the inverse, to codes.

    `within`: of integers, the least and the greatest code and what is added to them, as float32.
    """
    parameter = ADDRESS if each else SINGLE

    @intrinsic
    def step(typingctx: Any, codes: Any, source: Any, inverse: Any, zero: Any, within: Any) -> Any:
        def emit(context: Any, b: Any, signature: Any, args: Any) -> Any:
            codes, source, inverse, zero, within = args
            inverse, zero = _affine(b, inverse, zero)
            value = b.fmul(b.fsub(load_vector(b, source, FLOAT, UNIT), zero), inverse)
            _store_codes(b, kind, _codes(b, kind, value, within), codes)
            return context.get_dummy_value()

        return NOTHING(ADDRESS, ADDRESS, parameter, parameter, types.UniTuple(SINGLE, 3)), emit

    return step


def _codes(b: Any, kind: Kind, value: Any, within: Any) -> Any:
    if kind in FLOAT8:
        return _float8(b, kind, value)
    bits = BITS[kind]
    if kind.name.startswith("LLOYD"):
        return _levels(b, value, bits)
    least, most, added = (splat(b, b.extract_value(within, i), UNIT) for i in range(3))
    for order, limit in ((">", most), ("<", least)):
        value = b.select(b.fcmp_ordered(order, value, limit), limit, value)
    rounded = b.fadd(value, b.fadd(all_of(FLOAT, MAGIC, UNIT), added))
    return b.and_(as_bits(b, rounded), all_of(WORD, 2**bits - 1, UNIT))


def _levels(b: Any, value: Any, bits: int) -> Any:
    size = as_float(b, b.and_(as_bits(b, value), all_of(WORD, 0x7FFFFFFF, UNIT)))
    above = all_of(WORD, 0, UNIT)
    for middle in MIDPOINTS[bits]:
        above = b.sub(above, b.sext(b.fcmp_ordered(">", size, all_of(FLOAT, float(middle), UNIT)), WORDS))
    half = 1 << (bits - 1)
    negative = b.fcmp_ordered("<", value, all_of(FLOAT, 0.0, UNIT))
    below = b.sub(all_of(WORD, half - 1, UNIT), above)
    return b.select(negative, below, b.add(above, all_of(WORD, half, UNIT)))


def _float8(b: Any, kind: Kind, value: Any) -> Any:
    shift, bias, raised, least = FLOAT8[kind]
    bits = as_bits(b, value)
    size = b.and_(bits, all_of(WORD, 0x7FFFFFFF, UNIT))
    odd = b.and_(b.lshr(size, all_of(WORD, shift, UNIT)), all_of(WORD, 1, UNIT))
    normal = b.lshr(b.add(size, b.add(odd, all_of(WORD, (1 << (shift - 1)) - 1, UNIT))), all_of(WORD, shift, UNIT))
    normal = b.sub(normal, all_of(WORD, bias << (23 - shift), UNIT))
    small = as_bits(b, b.fadd(as_float(b, size), all_of(FLOAT, raised, UNIT)))
    small = b.sub(small, all_of(WORD, int(np.float32(raised).view(np.uint32)), UNIT))
    is_small = b.fcmp_ordered("<", as_float(b, size), all_of(FLOAT, least, UNIT))
    sign = b.and_(b.lshr(bits, all_of(WORD, 24, UNIT)), all_of(WORD, 0x80, UNIT))
    return b.or_(b.select(is_small, small, normal), sign)


@intrinsic
def zeros_of(typingctx: Any, zeros: Any, scales: Any, code: Any) -> Any:
    """Of 32 scales, what stands for the zero point: that which makes `code` 0."""

    def emit(context: Any, b: Any, signature: Any, args: Any) -> Any:
        zeros, scales, code = args
        shift = b.fmul(load_vector(b, scales, FLOAT, UNIT), splat(b, code, UNIT))
        store_vector(b, b.fsub(all_of(FLOAT, 0.0, UNIT), shift), zeros)
        return context.get_dummy_value()

    return NOTHING(ADDRESS, ADDRESS, SINGLE), emit
