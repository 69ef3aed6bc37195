"""What is known of a row of float32: least, greatest, sums, and its rotation. Vector code as in `units`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from kvtier.codecs.cpu.intrinsics import LONG, WORD, load_vector, store_vector
from kvtier.codecs.cpu.lanes import STORED, all_of, as_bits, part
from kvtier.codecs.layout import UNIT

FLOAT = ir.FloatType()
SUMMED = 16
"""Lanes of a sum: see `reference.SUMMED`."""
Combine = Callable[[Any, Any, Any], Any]


def _lesser(b: Any, value: Any, kept: Any) -> Any:
    return b.select(b.fcmp_ordered("<", value, kept), value, kept)


def _greater(b: Any, value: Any, kept: Any) -> Any:
    return b.select(b.fcmp_ordered(">", value, kept), value, kept)


def _larger_bits(b: Any, value: Any, kept: Any) -> Any:
    size = b.and_(value, all_of(WORD, 0x7FFFFFFF, value.type.count))
    return b.select(b.icmp_unsigned(">", size, kept), size, kept)


def _added(b: Any, value: Any, kept: Any) -> Any:
    return b.fadd(kept, value)


def _fold(b: Any, value: Any, combine: Combine) -> Any:
    """One of many lanes: the upper half combined into the lower until one is left."""
    while value.type.count > 1:
        half = value.type.count // 2
        value = combine(b, part(b, value, half, half), part(b, value, 0, half))
    return b.extract_element(value, WORD(0))


def _kept(b: Any, start: Any) -> Any:
    """A vector that a loop changes: LLVM keeps it in registers."""
    room = cgutils.alloca_once(b, start.type)
    b.store(start, room)
    return room


def extremes_each(dtype: str) -> Any:
    """Make f(source, units, low, high, largest): for each of 32 * `units` elements the least and the greatest so far.

    `largest`: the largest bits without sign so far, 32 words; Inf and NaN are above all others.
    """
    item, convert, _ = STORED[dtype]

    @intrinsic
    def step(typingctx: Any, source: Any, units: Any, low: Any, high: Any, largest: Any) -> Any:
        def emit(context: Any, b: Any, signature: Any, args: Any) -> Any:
            source, units, low, high, largest = args
            bits = _kept(b, load_vector(b, largest, WORD, UNIT))
            with cgutils.for_range(b, units) as loop:
                at = b.mul(loop.index, LONG(4 * UNIT))
                value = convert(
                    b, load_vector(b, b.add(source, b.mul(loop.index, LONG(item.width // 8 * UNIT))), item, UNIT)
                )
                b.store(_larger_bits(b, as_bits(b, value), b.load(bits)), bits)
                for kept, combine in ((b.add(low, at), _lesser), (b.add(high, at), _greater)):
                    store_vector(b, combine(b, value, load_vector(b, kept, FLOAT, UNIT)), kept)
            store_vector(b, b.load(bits), largest)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 5), emit

    return step


@intrinsic
def extremes(typingctx: Any, source: Any, units: Any, low: Any, high: Any) -> Any:
    """Store the least and the greatest of 32 * `units` float32."""

    def emit(context: Any, b: Any, signature: Any, args: Any) -> Any:
        source, units, low, high = args
        first = load_vector(b, source, FLOAT, UNIT)
        least, greatest = _kept(b, first), _kept(b, first)
        with cgutils.for_range(b, units) as loop:
            value = load_vector(b, b.add(source, b.mul(loop.index, LONG(4 * UNIT))), FLOAT, UNIT)
            b.store(_lesser(b, value, b.load(least)), least)
            b.store(_greater(b, value, b.load(greatest)), greatest)
        for place, kept, combine in ((low, least, _lesser), (high, greatest, _greater)):
            b.store(_fold(b, b.load(kept), combine), b.inttoptr(place, FLOAT.as_pointer()), align=1)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), emit


@intrinsic
def keep_largest_bits(typingctx: Any, source: Any, units: Any, largest: Any) -> Any:
    """The largest bits without sign of 32 * `units` float32 and of what `largest` has, 32 words."""

    def emit(context: Any, b: Any, signature: Any, args: Any) -> Any:
        source, units, largest = args
        bits = _kept(b, load_vector(b, largest, WORD, UNIT))
        with cgutils.for_range(b, units) as loop:
            value = load_vector(b, b.add(source, b.mul(loop.index, LONG(4 * UNIT))), WORD, UNIT)
            b.store(_larger_bits(b, value, b.load(bits)), bits)
        store_vector(b, b.load(bits), largest)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3), emit


@intrinsic
def largest_bits(typingctx: Any, largest: Any) -> Any:
    """The largest of 32 words."""

    def emit(context: Any, b: Any, signature: Any, args: Any) -> Any:
        return b.zext(_fold(b, load_vector(b, args[0], WORD, UNIT), _larger_bits), LONG)

    return types.int64(types.int64), emit


@intrinsic
def sum_of_products(typingctx: Any, one: Any, other: Any, steps: Any) -> Any:
    """Of 16 * `steps` elements and as many others, in the order that `reference.SUMMED` says."""

    def emit(context: Any, b: Any, signature: Any, args: Any) -> Any:
        one, other, steps = args
        total = _kept(b, all_of(FLOAT, 0.0, SUMMED))
        with cgutils.for_range(b, steps) as loop:
            at = b.mul(loop.index, LONG(4 * SUMMED))
            left, right = (load_vector(b, b.add(row, at), FLOAT, SUMMED) for row in (one, other))
            b.store(b.fadd(b.load(total), b.fmul(left, right)), total)
        return _fold(b, b.load(total), _added)

    return types.float32(*[types.int64] * 3), emit


@intrinsic
def sum_of_lanes(typingctx: Any, sums: Any) -> Any:
    """Of 16 float32, the upper half added to the lower until one is left."""

    def emit(context: Any, b: Any, signature: Any, args: Any) -> Any:
        return _fold(b, load_vector(b, args[0], FLOAT, SUMMED), _added)

    return types.float32(types.int64), emit


def _neighbours(b: Any, value: Any, step: int) -> Any:
    """Sums of lanes that are `step` apart in the lower one's place, differences in the upper's."""
    lanes = value.type.count
    order = ir.Constant(ir.VectorType(WORD, lanes), [i ^ step for i in range(lanes)])
    signs = [-1.0 if i & step else 1.0 for i in range(lanes)]
    return b.fadd(b.shuffle_vector(value, value, order), b.fmul(value, ir.Constant(value.type, signs)))


def hadamard(size: int, factor: float) -> Any:
    """Make f(row): multiply `size` elements, a power of two from 2 on, by the Hadamard matrix and a factor.

    Below 16 it works on 16 elements, on each run of `size` of them alone.
    """
    lanes = 16

    @intrinsic
    def step(typingctx: Any, row: Any) -> Any:
        def emit(context: Any, b: Any, signature: Any, args: Any) -> Any:
            places = [b.add(args[0], LONG(4 * at)) for at in range(0, max(size, lanes), lanes)]
            values = [load_vector(b, place, FLOAT, lanes) for place in places]
            apart = 1
            while apart < min(size, lanes):
                values = [_neighbours(b, value, apart) for value in values]
                apart *= 2
            while apart < size:
                far = apart // lanes
                values = [
                    b.fsub(values[i - far], values[i]) if i & far else b.fadd(values[i], values[i + far])
                    for i in range(len(values))
                ]
                apart *= 2
            for value, place in zip(values, places, strict=True):
                store_vector(b, b.fmul(value, all_of(FLOAT, float(np.float32(factor)), lanes)), place)
            return context.get_dummy_value()

        return types.void(types.int64), emit

    return step
