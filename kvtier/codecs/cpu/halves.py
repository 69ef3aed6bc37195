"""Scale and zero point of 32 groups at once, from the least and the greatest element of each: see `reference`."""

# ruff: noqa: PLR0917 (numba passes an intrinsic's arguments by position)

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from kvtier.codecs.cpu.intrinsics import HALF, WORD, load_vector, store_vector
from kvtier.codecs.cpu.lanes import STORED, all_of, as_bits, as_float, splat
from kvtier.codecs.layout import UNIT

FLOAT = ir.FloatType()
FLOATS, WORDS, HALVES = (ir.VectorType(item, UNIT) for item in (FLOAT, WORD, HALF))
INFINITY = 0x7C00
"""Bits of the float16 infinity: what has no float16."""
_, _widen_half, _narrow_half = STORED["float16"]


def _lesser(b: Any, one: Any, other: Any) -> Any:
    return b.select(b.icmp_unsigned("<", one, other), one, other)


def _size(b: Any, value: Any) -> Any:
    return as_float(b, b.and_(as_bits(b, value), all_of(WORD, 0x7FFFFFFF, UNIT)))


def _rounded(b: Any, value: Any, *, up: bool) -> Any:
    """Bits of the float16 next above, or below, floats without sign."""
    steps = b.fmul(value, all_of(FLOAT, 2.0**24, UNIT))
    small = b.fptoui(steps, WORDS)
    bits = as_bits(b, value)
    if up:
        inexact = b.fcmp_ordered("<", b.uitofp(small, FLOATS), steps)
        small = b.add(small, b.zext(inexact, WORDS))
        bits = b.add(bits, all_of(WORD, 0x1FFF, UNIT))
    normal = b.sub(b.lshr(bits, all_of(WORD, 13, UNIT)), all_of(WORD, 112 << 10, UNIT))
    normal = _lesser(b, normal, all_of(WORD, INFINITY if up else INFINITY - 1, UNIT))
    # A NaN is not small: it becomes the largest there is, and is refused.
    return b.select(b.fcmp_ordered("<", value, all_of(FLOAT, 2.0**-14, UNIT)), small, normal)


def _rounded_down(b: Any, value: Any) -> Any:
    size = _size(b, value)
    below = b.or_(_rounded(b, size, up=True), all_of(WORD, 0x8000, UNIT))
    negative = b.fcmp_ordered("<", value, all_of(FLOAT, 0.0, UNIT))
    return b.select(negative, below, _rounded(b, size, up=False))


def _nearest(b: Any, value: Any) -> Any:
    """Bits of the nearest float16, infinite beyond the largest."""
    half = b.zext(_narrow_half(b, value), WORDS)
    beyond = b.fcmp_unordered(">=", _size(b, value), all_of(FLOAT, 65520.0, UNIT))
    return b.select(beyond, all_of(WORD, INFINITY, UNIT), half)


def _float(b: Any, half: Any) -> Any:
    return _widen_half(b, b.trunc(half, HALVES))


def _scale_and_zero(b: Any, low: Any, high: Any, most: Any, share: Any, how: str) -> tuple[Any, Any]:
    """Bits of both."""
    zero = all_of(WORD, 0, UNIT)
    if how == "symmetric":
        one, other = _size(b, low), _size(b, high)
        reach = b.fmul(b.select(b.fcmp_ordered(">", one, other), one, other), share)
    elif how == "float":
        half = all_of(FLOAT, 0.5, UNIT)
        zero = _nearest(b, b.fadd(b.fmul(low, half), b.fmul(high, half)))
        # Which of 0 and -0 is the least is nobody's business: codes must not depend on it.
        minus = b.icmp_unsigned("==", zero, all_of(WORD, 0x8000, UNIT))
        zero = b.select(minus, all_of(WORD, 0, UNIT), zero)
        middle = _float(b, zero)
        one, other = (_size(b, b.fsub(edge, middle)) for edge in (low, high))
        reach = b.select(b.fcmp_ordered(">", one, other), one, other)
    else:
        without = b.fmul(all_of(FLOAT, 0.5, UNIT), b.fsub(all_of(FLOAT, 1.0, UNIT), share))
        cut = b.fmul(b.fsub(high, low), without)
        low, high = b.fadd(low, cut), b.fsub(high, cut)
        zero = _rounded_down(b, low)
        reach = b.fsub(high, _float(b, zero))
    return _rounded(b, b.fdiv(reach, most), up=True), zero


def choose(how: str) -> Any:
    """Make f(low, high, (most, share), halves, floats, worst) for 32 groups.

    Args:
        how: "symmetric", or with a zero point, "integer" or "float".

    `most` is the largest code, `share` how much of the range is kept. Scales and, 64 bytes behind, zero points are
    stored as float16 at `halves`; the rows `floats` get scales, their inverses and zero points as float32. `worst` are
    32 words, the largest bits so far: at least `INFINITY` if some group has none.
    """

    @intrinsic
    def step(typingctx: Any, low: Any, high: Any, how_far: Any, halves: Any, floats: Any, worst: Any) -> Any:
        def emit(context: Any, b: Any, signature: Any, args: Any) -> Any:
            low, high, how_far, halves, floats, worst = args
            most, share = (splat(b, b.extract_value(how_far, i), UNIT) for i in range(2))
            low, high = (load_vector(b, row, FLOAT, UNIT) for row in (low, high))
            scale, zero = _scale_and_zero(b, low, high, most, share, how)
            bits = load_vector(b, worst, WORD, UNIT)
            for half in (scale, b.and_(zero, all_of(WORD, 0x7FFF, UNIT))):
                bits = b.select(b.icmp_unsigned(">", half, bits), half, bits)
            store_vector(b, bits, worst)
            for i, half in enumerate((scale, zero)):
                store_vector(b, b.trunc(half, HALVES), b.add(halves, ir.Constant(halves.type, 2 * UNIT * i)))
            value = _float(b, scale)
            inverse = b.fdiv(all_of(FLOAT, 1.0, UNIT), value)
            some = b.fcmp_ordered(">", value, all_of(FLOAT, 0.0, UNIT))
            inverse = b.select(some, inverse, all_of(FLOAT, 0.0, UNIT))
            for i, row in enumerate((value, inverse, _float(b, zero))):
                store_vector(b, row, b.extract_value(floats, i))
            return context.get_dummy_value()

        address, how_far = types.int64, types.UniTuple(types.float32, 2)
        return types.void(address, address, how_far, address, types.UniTuple(address, 3), address), emit

    return step


@intrinsic
def nearest_half(typingctx: Any, value: Any) -> Any:
    """Bits of the float16 nearest to a float32, infinite beyond the largest."""

    def emit(context: Any, b: Any, signature: Any, args: Any) -> Any:
        half = b.extract_element(_nearest(b, splat(b, args[0], UNIT)), WORD(0))
        return b.zext(half, ir.IntType(64))

    return types.int64(types.float32), emit
