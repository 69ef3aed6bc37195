"""How numbers and rows of codes are written down, in plain numpy: see `layout` and `reference`."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtier.codecs.layout import UNIT

Floats = NDArray[np.float32]


def round_up(values: Floats) -> NDArray[np.float16]:
    """Round non-negative values up to a float16."""
    nearest = values.astype(np.float16)
    above = np.nextafter(nearest, np.float16(np.inf))
    return np.where(nearest.astype(np.float32) < values, above, nearest) + np.float16(0)


def round_down(values: Floats) -> NDArray[np.float16]:
    """Round down to a float16; what is above the largest becomes the largest."""
    nearest = values.astype(np.float16)
    below = np.nextafter(nearest, np.float16(-np.inf))
    return np.where(nearest.astype(np.float32) > values, below, nearest) + np.float16(0)


_FLOAT8 = {"e4m3": (3, 7), "e5m2": (2, 15)}
"""Bits of the mantissa, and bias of the exponent."""


def to_float8(precision: str, values: Floats) -> NDArray[np.int64]:
    """Codes of the nearest floats of 8 bits, ties to even; `values` are within their range."""
    mantissa, bias = _FLOAT8[precision]
    size = np.abs(values.astype(np.float64))
    # The step between neighbours is that of the exponent, and constant below the least normal number.
    exponent = np.maximum(np.floor(np.log2(np.where(size == 0, 1, size))), 1 - bias)
    steps = np.rint(size / 2.0 ** (exponent - mantissa))
    code = steps + (exponent + bias - 1) * 2**mantissa
    return np.where(np.signbit(values), 128, 0) + np.where(size == 0, 0, code).astype(np.int64)


def from_float8(precision: str, codes: NDArray[np.int64]) -> Floats:
    """What codes stand for; there is no Inf and no NaN among those that are stored."""
    mantissa, bias = _FLOAT8[precision]
    exponent, rest = (codes & 0x7F) >> mantissa, codes & (2**mantissa - 1)
    value = np.where(exponent > 0, rest + 2**mantissa, rest) * 2.0 ** (np.maximum(exponent, 1) - bias - mantissa)
    return np.where(codes & 0x80, -value, value).astype(np.float32)


def pack(codes: NDArray[Any], bits: int, *, zero: int = 0) -> bytes:
    """Rows of codes as `layout` says."""
    rows, count = codes.shape
    filled = np.full((rows, -(-count // UNIT) * UNIT), zero, np.int64)
    filled[:, :count] = codes
    unit = filled.reshape(-1, UNIT)
    if bits == 16:
        return filled.astype(np.uint16).tobytes()
    if bits == 8:
        return filled.astype(np.uint8).tobytes()
    if bits == 4:
        return (unit[:, :16] | unit[:, 16:] << 4).astype(np.uint8).tobytes()
    pairs = unit & 3
    lower = pairs[:, :8] | pairs[:, 8:16] << 2 | pairs[:, 16:24] << 4 | pairs[:, 24:] << 6
    if bits == 2:
        return lower.astype(np.uint8).tobytes()
    upper = np.packbits((unit >> 2 & 1).astype(np.uint8), axis=1, bitorder="little")
    return np.concatenate([lower.astype(np.uint8), upper], axis=1).tobytes()


def unpack(packed: bytes, bits: int, rows: int, count: int) -> NDArray[np.int64]:
    """The codes `[rows, count]` that `pack` was given."""
    stored = np.frombuffer(packed, np.uint16 if bits == 16 else np.uint8).astype(np.int64)
    if bits < 8:
        unit = stored.reshape(-1, UNIT * bits // 8)
        if bits == 4:
            stored = np.concatenate([unit & 15, unit >> 4], axis=1)
        else:
            stored = np.concatenate([unit[:, :8] >> shift & 3 for shift in (0, 2, 4, 6)], axis=1)
        if bits == 3:
            upper = np.unpackbits(unit[:, 8:].astype(np.uint8), axis=1, bitorder="little")
            stored = stored | upper.astype(np.int64) << 2
    return stored.reshape(rows, -1)[:, :count]


def to_float32(dtype: str, stored: NDArray[Any]) -> Floats:
    """Widen elements; exact."""
    if dtype == "bfloat16":
        return (stored.astype(np.uint32) << 16).view(np.float32)
    if dtype == "float16":
        return np.ascontiguousarray(stored).view(np.float16).astype(np.float32)
    return stored.astype(np.float32)


def from_float32(dtype: str, values: Floats) -> NDArray[Any]:
    """Round to nearest even; not for NaN. What is beyond a float16's range becomes its largest."""
    if dtype == "bfloat16":
        bits = np.ascontiguousarray(values).view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    if dtype == "float16":
        return np.clip(values, -65504, 65504).astype(np.float16).view(np.uint16)
    return values
