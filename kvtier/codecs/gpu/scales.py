"""Scale and zero point of groups of elements."""

# ruff: noqa: N803, PLR0917 (triton passes arguments by position; those of compile time are in capitals)

from __future__ import annotations

import triton
import triton.language as tl

from kvtier.codecs.gpu.codes import code_of, squared_error
from kvtier.codecs.gpu.halves import INFINITY, bits_of, down, nearest, up, widened
from kvtier.codecs.gpu.sums import ordered_sum

INFINITE = tl.constexpr(0x7F800000)
"""Bits of the float32 infinity."""
TRIALS = tl.constexpr(8)
"""Shares of the range that `clip` tries: see `reference.CLIPS`."""


@triton.jit
def unsound(values: tl.tensor, LIMIT: tl.constexpr) -> tl.tensor:
    """Which float32 have bits from LIMIT on, but for the sign."""
    return (bits_of(values) & 0x7FFFFFFF) >= LIMIT


@triton.jit
def refuse(stored: tl.tensor, block: tl.tensor, bad: tl.tensor) -> None:
    """Note that a block cannot be stored if anything of a tile is bad."""
    some = tl.max(tl.max(bad.to(tl.int32), axis=1), axis=0)
    tl.store(stored + block, 0, mask=some > 0)


@triton.jit
def inverse_of(scale: tl.tensor) -> tl.tensor:
    """1 over it, and 0 of 0."""
    return tl.where(scale > 0.0, tl.div_rn(1.0, tl.where(scale > 0.0, scale, 1.0)), 0.0)


@triton.jit
def choose(low: tl.tensor, high: tl.tensor, share: tl.tensor, cut: tl.tensor, PART: tl.constexpr) -> tl.tensor:
    """Bits of the scale and of the zero point, from the least and the greatest element of a group.

    `share` of the range is kept, and of the range `cut` is cut away at each end, where PART says so.
    """
    zero = tl.zeros(low.shape, tl.int32)
    if PART.form == "int" and not PART.symmetric:
        if PART.clip:
            away = (high - low) * cut
            low, high = low + away, high - away
        zero = down(low)
        reach = high - widened(zero)
    else:
        if not PART.symmetric:
            zero = nearest(low * 0.5 + high * 0.5)
            zero = tl.where(zero == 0x8000, 0, zero)
            low, high = low - widened(zero), high - widened(zero)
        reach = tl.maximum(tl.abs(low), tl.abs(high))
        if PART.clip:
            reach = reach * share
    return up(tl.div_rn(reach, PART.most)), zero


@triton.jit
def beyond(half: tl.tensor) -> tl.tensor:
    """Whether bits of a float16 are infinite."""
    return (half & 0x7FFF) >= INFINITY


@triton.jit
def choose_least(
    values: tl.tensor,
    valid: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    shares: tl.tensor,
    PART: tl.constexpr,
    ROWS: tl.constexpr,
    COUNT: tl.constexpr,
) -> tl.tensor:
    """Of each row the scale and the zero point whose codes have the least squared error, and whether all have them."""
    best = tl.full([ROWS], float("inf"), tl.float32)
    best_scale, best_zero = tl.zeros([ROWS], tl.int32), tl.zeros([ROWS], tl.int32)
    bad = tl.zeros([ROWS], tl.int1)
    for trial in range(TRIALS):
        scale, zero = choose(low, high, tl.load(shares + trial), tl.load(shares + TRIALS + trial), PART)
        bad = bad | beyond(scale) | beyond(zero)
        size, middle = widened(scale)[:, None], widened(zero)[:, None]
        error = tl.where(valid, squared_error(values, size, inverse_of(size), middle, PART), 0.0)
        error = ordered_sum(error, ROWS, COUNT)
        better = (trial == 0) | (error < best)
        best = tl.where(better, error, best)
        best_scale, best_zero = tl.where(better, scale, best_scale), tl.where(better, zero, best_zero)
    return best_scale, best_zero, bad


@triton.jit
def quantise(
    values: tl.tensor, valid: tl.tensor, table: tl.tensor, PART: tl.constexpr, ROWS: tl.constexpr, COUNT: tl.constexpr
) -> tl.tensor:
    """Codes of rows that have a scale each; bits of the scales and zero points, and which of them no float16 has.

    `valid`: which elements there are; the others are 0. `table`: levels and midpoints, or shares and cuts.
    """
    if PART.form == "lloyd":
        squares = ordered_sum(values * values, ROWS, COUNT)
        size = tl.sqrt_rn(tl.div_rn(squares, PART.dim * 1.0))
        codes = code_of(values, inverse_of(size)[:, None], 0.0, table, PART)
        level = tl.where(valid, tl.load(table + codes), 0.0)
        scale = nearest(tl.sqrt_rn(tl.div_rn(squares, ordered_sum(level * level, ROWS, COUNT))))
        zero = tl.zeros([ROWS], tl.int32)
        bad = beyond(scale) | unsound(squares, INFINITE)
    else:
        low = tl.min(tl.where(valid, values, float("inf")), axis=1)
        high = tl.max(tl.where(valid, values, float("-inf")), axis=1)
        if PART.clip:
            scale, zero, bad = choose_least(values, valid, low, high, table, PART, ROWS, COUNT)
        else:
            scale, zero = choose(low, high, 1.0, 0.0, PART)
            bad = beyond(scale) | beyond(zero)
        codes = code_of(values, inverse_of(widened(scale))[:, None], widened(zero)[:, None], table, PART)
    return codes, scale, zero, bad
