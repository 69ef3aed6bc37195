"""Codes: between float32 and integers, and packed into units as `layout` says."""

# ruff: noqa: N803, N806, PLR0917 (triton passes arguments by position; those of compile time are in capitals)

from __future__ import annotations

import triton
import triton.language as tl

from kvtier.codecs.gpu.halves import bits_of

MAGIC = tl.constexpr(12582912.0)
"""1.5 * 2**23: added to a small float32 it rounds it to nearest even, and the lower bits of the sum are the integer."""


@triton.jit
def load_codes(
    rows: tl.tensor,
    first: tl.tensor,
    count: tl.tensor,
    inside: tl.tensor,
    BITS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> tl.tensor:
    """Codes as int32 from element `first` of rows on, a multiple of a unit; 0 from the `count`-th on."""
    if BITS >= 8:
        column = tl.arange(0, COLUMNS)[None, :]
        mask = inside[:, None] & (column < count)
        if BITS == 16:
            rows = rows.to(tl.pointer_type(tl.uint16))
        codes = tl.load(rows[:, None] + first + column, mask=mask, other=0).to(tl.int32)
    else:
        FIELDS: tl.constexpr = 2 if BITS == 4 else 4
        UNITS: tl.constexpr = COLUMNS // 32
        unit = tl.arange(0, UNITS)[None, :, None]
        mask = inside[:, None, None] & (unit * 32 < count)
        at = rows[:, None, None] + first // 32 * (4 * BITS) + unit * (4 * BITS)
        packed = tl.load(at + tl.arange(0, 32 // FIELDS)[None, None, :], mask=mask, other=0).to(tl.int32)
        shift = tl.arange(0, FIELDS)[None, None, :, None] * (8 // FIELDS)
        codes = (packed[:, :, None, :] >> shift) & (2 ** (8 // FIELDS) - 1)
        if BITS == 3:
            upper = tl.load(at + 8 + tl.arange(0, 4)[None, None, :], mask=mask, other=0).to(tl.int32)
            codes |= ((upper[:, :, :, None] >> tl.arange(0, 8)[None, None, None, :]) & 1) << 2
        codes = tl.reshape(codes, [ROWS, COLUMNS])
    return codes


@triton.jit
def store_codes(
    rows: tl.tensor,
    first: tl.tensor,
    count: tl.tensor,
    inside: tl.tensor,
    codes: tl.tensor,
    BITS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Pack `[ROWS, COLUMNS]` codes from element `first` of rows on, multiples of a unit, but only the first `count`."""
    if BITS >= 8:
        column = tl.arange(0, COLUMNS)[None, :]
        mask = inside[:, None] & (column < count)
        if BITS == 16:
            tl.store(rows.to(tl.pointer_type(tl.uint16))[:, None] + first + column, codes.to(tl.uint16), mask=mask)
        else:
            tl.store(rows[:, None] + first + column, codes.to(tl.uint8), mask=mask)
    else:
        FIELDS: tl.constexpr = 2 if BITS == 4 else 4
        UNITS: tl.constexpr = COLUMNS // 32
        unit = tl.arange(0, UNITS)[None, :, None]
        mask = inside[:, None, None] & (unit * 32 < count)
        at = rows[:, None, None] + first // 32 * (4 * BITS) + unit * (4 * BITS)
        shift = tl.arange(0, FIELDS)[None, None, :, None] * (8 // FIELDS)
        lower = tl.reshape(codes & (2 ** (8 // FIELDS) - 1), [ROWS, UNITS, FIELDS, 32 // FIELDS]) << shift
        tl.store(at + tl.arange(0, 32 // FIELDS)[None, None, :], tl.sum(lower, axis=2).to(tl.uint8), mask=mask)
        if BITS == 3:
            upper = tl.reshape(codes >> 2, [ROWS, UNITS, 4, 8]) << tl.arange(0, 8)[None, None, None, :]
            tl.store(at + 8 + tl.arange(0, 4)[None, None, :], tl.sum(upper, axis=3).to(tl.uint8), mask=mask)


@triton.jit
def value_of(codes: tl.tensor, levels: tl.tensor, PART: tl.constexpr) -> tl.tensor:
    """What codes stand for, before scale and zero point."""
    if PART.form == "lloyd":
        value = tl.load(levels + codes)
    elif PART.form == "int":
        value = (codes - PART.zero).to(tl.float32)
    elif PART.form == "bf16":
        value = (codes << 16).to(tl.float32, bitcast=True)
    elif PART.form == "fp16":
        value = codes.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        # The bits of the float of 8 bits are those of a float32 that is too small by a power of two.
        sign = tl.where(codes >= 0x80, -1.0, 1.0)
        if PART.form == "e4m3":
            value = ((codes & 0x7F) << 20).to(tl.float32, bitcast=True) * (2.0**120) * sign
        else:
            value = ((codes & 0x7F) << 21).to(tl.float32, bitcast=True) * (2.0**112) * sign
    return value


@triton.jit
def _float8(value: tl.tensor, MANTISSA: tl.constexpr, BIAS: tl.constexpr) -> tl.tensor:
    """Bits of the nearest float of 8 bits."""
    SHIFT: tl.constexpr = 23 - MANTISSA
    bits = bits_of(value)
    size = bits & 0x7FFFFFFF
    normal = (size + (2 ** (SHIFT - 1) - 1) + ((size >> SHIFT) & 1)) >> SHIFT
    normal -= (127 - BIAS) << MANTISSA
    # 2**(24 - BIAS - MANTISSA) has the step that a subnormal has: the sum is rounded to it.
    raised = size.to(tl.float32, bitcast=True) + 2.0 ** (24 - BIAS - MANTISSA)
    small = bits_of(raised) - ((127 + 24 - BIAS - MANTISSA) << 23)
    is_small = size < (127 - BIAS + 1) << 23
    return tl.where(is_small, small, normal) | ((bits >> 24) & 0x80)


@triton.jit
def code_of(values: tl.tensor, inverse: tl.tensor, zero: tl.tensor, levels: tl.tensor, PART: tl.constexpr) -> tl.tensor:
    """Nearest codes of float32, less the zero point, times the inverse of the scale."""
    scaled = values * inverse if PART.symmetric else (values - zero) * inverse
    if PART.form == "e4m3":
        code = _float8(scaled, 3, 7)
    elif PART.form == "e5m2":
        code = _float8(scaled, 2, 15)
    elif PART.form == "lloyd":
        above = tl.zeros(values.shape, tl.int32)
        for middle in range(2 ** (PART.bits - 1) - 1):
            above += (tl.abs(scaled) > tl.load(levels + 2**PART.bits + middle)).to(tl.int32)
        code = tl.where(scaled < 0.0, PART.zero - 1 - above, PART.zero + above)
    else:
        code = (bits_of(_clamped(scaled, PART) + MAGIC) + PART.zero) & (2**PART.bits - 1)
    return code


@triton.jit
def _clamped(scaled: tl.tensor, PART: tl.constexpr) -> tl.tensor:
    least = -PART.most if PART.symmetric else 0.0
    return tl.minimum(tl.maximum(scaled, least), PART.most)


@triton.jit
def squared_error(
    values: tl.tensor, scale: tl.tensor, inverse: tl.tensor, zero: tl.tensor, PART: tl.constexpr
) -> tl.tensor:
    """Of elements as integer codes."""
    code = (_clamped((values - zero) * inverse, PART) + MAGIC) - MAGIC
    error = code * scale + zero - values
    return error * error
