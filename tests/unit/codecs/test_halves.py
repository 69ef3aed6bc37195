"""Rounding to float16 up, down and to nearest, at and around every float16; a sorted table of all is the oracle."""

from __future__ import annotations

import numpy as np
from llvmlite import ir

from kvtier.codecs.cpu import halves
from kvtier.codecs.layout import UNIT
from tests.unit.codecs.emitted import emitted

FLOAT16 = np.arange(0x7C00, dtype=np.uint16)
TABLE = FLOAT16.view(np.float16).astype(np.float64)
"""All finite ones without sign: the place of each is its bits."""
EDGES = np.concatenate([TABLE, (TABLE[1:] + TABLE[:-1]) / 2]).astype(np.float32)
NEAR = [np.nextafter(EDGES, np.float32(way)) for way in (-np.inf, np.inf)]
MORE = [0, 1e-45, 1e-40, 1e-30, 2.0**-25, 65519.0, 65520.0, 65521.0, 65536.0, 1e6, 1e30, np.inf]
VALUES = np.abs(np.concatenate([EDGES, *NEAR, MORE])).astype(np.float32)
VALUES = np.concatenate([VALUES, np.zeros(-len(VALUES) % UNIT, np.float32)])


def rounded(convert: object, values: np.ndarray) -> np.ndarray:
    return emitted(convert, ir.FloatType(), values, np.zeros(values.size, np.uint32), UNIT)


def above(values: np.ndarray) -> np.ndarray:
    """Bits of the least float16 that is not below; 0x7C00 if there is none."""
    return np.searchsorted(TABLE, values, "left")


def below(values: np.ndarray) -> np.ndarray:
    """Bits of the greatest float16 that is not above."""
    return np.searchsorted(TABLE, values, "right") - 1


def test_up_is_the_least_float16_that_is_not_below() -> None:
    assert np.array_equal(rounded(lambda b, v: halves._rounded(b, v, up=True), VALUES), above(VALUES))


def test_down_is_the_greatest_float16_that_is_not_above() -> None:
    got = rounded(halves._rounded_down, VALUES)
    assert np.array_equal(got, below(VALUES)), "what is above the largest is the largest"
    got = rounded(halves._rounded_down, -VALUES)
    assert np.array_equal(got[VALUES > 0], 0x8000 | above(VALUES)[VALUES > 0])
    assert (got[VALUES == 0] == 0).all(), "-0 is 0"


def test_nearest_is_numpys() -> None:
    with np.errstate(over="ignore"):
        want = VALUES.astype(np.float16).view(np.uint16)
        assert np.array_equal(rounded(halves._nearest, VALUES), want)
        small = VALUES < 65520
        assert np.array_equal(rounded(halves._nearest, -VALUES)[small], 0x8000 | want[small])


def test_nan_has_no_float16() -> None:
    """It must be seen by what looks for scales that are too large."""
    values = np.full(UNIT, np.nan, np.float32)
    assert (rounded(lambda b, v: halves._rounded(b, v, up=True), values) & 0x7FFF >= halves.INFINITY).all()
