"""Rounding of float32 to float16 by arithmetic on bits, in the directions that scales and zero points need."""

from __future__ import annotations

import triton
import triton.language as tl

INFINITY = tl.constexpr(0x7C00)
"""Bits of the float16 infinity: what has no float16."""
LEAST_NORMAL = tl.constexpr(2.0**-14)
STEPS = tl.constexpr(2.0**24)
"""Steps of the subnormal float16 in 1."""


@triton.jit
def bits_of(value: tl.tensor) -> tl.tensor:
    """The bits of float32 as int32."""
    return value.to(tl.int32, bitcast=True)


@triton.jit
def up(value: tl.tensor) -> tl.tensor:
    """Bits of the least float16 that is not below a float32 without sign; `INFINITY` if there is none, or for NaN."""
    steps = tl.where(value < LEAST_NORMAL, value, 0.0) * STEPS
    small = steps.to(tl.int32)
    small += (small.to(tl.float32) < steps).to(tl.int32)
    known = tl.where(value <= 65504.0, value, 65504.0)
    normal = ((bits_of(known) + 0x1FFF) >> 13) - (112 << 10)
    return tl.where(value < LEAST_NORMAL, small, tl.where(value <= 65504.0, normal, INFINITY))


@triton.jit
def down(value: tl.tensor) -> tl.tensor:
    """Bits of the greatest float16 that is not above a float32; minus infinity if there is none."""
    size = tl.where(value > 0.0, tl.minimum(value, 65504.0), 0.0)
    small = (tl.where(size < LEAST_NORMAL, size, 0.0) * STEPS).to(tl.int32)
    positive = tl.where(size < LEAST_NORMAL, small, (bits_of(size) >> 13) - (112 << 10))
    return tl.where(value < 0.0, up(tl.abs(value)) | 0x8000, positive)


@triton.jit
def nearest(value: tl.tensor) -> tl.tensor:
    """Bits of the nearest float16, ties to even; infinite from 65520 on, and for NaN."""
    size = tl.abs(value)
    known = tl.where(size < 65520.0, size, 0.0)
    bits = bits_of(known)
    normal = ((bits + 0xFFF + ((bits >> 13) & 1)) >> 13) - (112 << 10)
    # 0.5 has the step that a subnormal float16 has: the sum is rounded to it.
    small = bits_of(tl.where(size < LEAST_NORMAL, size, 0.0) + 0.5) - 0x3F000000
    half = tl.where(size < LEAST_NORMAL, small, tl.where(size < 65520.0, normal, INFINITY))
    return half | ((bits_of(value) >> 16) & 0x8000)


@triton.jit
def widened(half: tl.tensor) -> tl.tensor:
    """The float32 that bits of a float16 stand for."""
    return half.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
