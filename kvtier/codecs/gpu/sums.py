"""Sums of rows in the order of `reference.SUMMED`, and their rotation: every addition is of two numbers."""

# ruff: noqa: N803, N806 (arguments of compile time are in capitals)

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _added(
    total: tl.tensor, steps: tl.tensor, ROWS: tl.constexpr, LANES: tl.constexpr, STEPS: tl.constexpr
) -> tl.tensor:
    """Add each of `[ROWS, STEPS, LANES]` to the total, one step after the other."""
    if STEPS > 1:
        halves = tl.permute(tl.reshape(steps, [ROWS, 2, STEPS // 2, LANES]), [0, 2, 3, 1])
        earlier, later = tl.split(halves)
        total = _added(total, earlier, ROWS, LANES, STEPS // 2)
        total = _added(total, later, ROWS, LANES, STEPS // 2)
    else:
        total += tl.reshape(steps, [ROWS, LANES])
    return total


@triton.jit
def ordered_sum(values: tl.tensor, ROWS: tl.constexpr, COUNT: tl.constexpr) -> tl.tensor:
    """Sum each of `[ROWS, COUNT]`: element i to sum i % 16, one after the other; then the upper half to the lower."""
    LANES: tl.constexpr = min(COUNT, 16)
    STEPS: tl.constexpr = COUNT // LANES
    total = _added(tl.zeros([ROWS, LANES], tl.float32), values, ROWS, LANES, STEPS)
    if LANES >= 16:
        total = tl.sum(tl.reshape(total, [ROWS, 2, 8]), axis=1)
    if LANES >= 8:
        total = tl.sum(tl.reshape(total, [ROWS, 2, 4]), axis=1)
    if LANES >= 4:
        total = tl.sum(tl.reshape(total, [ROWS, 2, 2]), axis=1)
    return tl.sum(total, axis=1)


@triton.jit
def _butterfly(values: tl.tensor, COUNT: tl.constexpr, APART: tl.constexpr) -> tl.tensor:
    """Sums of what is APART in the lower one's place, differences in the upper's."""
    pairs = tl.reshape(values, [COUNT // (2 * APART), 2, APART])
    bits = pairs.to(tl.int32, bitcast=True)
    # Both sums of bits less one's own are the other's: one exchange between threads, and exact.
    other = tl.sub(tl.sum(bits, axis=1, keep_dims=True), bits, sanitize_overflow=False).to(tl.float32, bitcast=True)
    upper = tl.arange(0, 2)[None, :, None] == 1
    return tl.where(upper, other - pairs, pairs + other)


@triton.jit
def rotate(values: tl.tensor, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEPS: tl.constexpr) -> tl.tensor:
    """Multiply each run of 2**STEPS of `[ROWS, COLUMNS]` by the Hadamard matrix over its root; neighbours first."""
    if STEPS > 0:
        for step in tl.static_range(STEPS):
            values = _butterfly(values, ROWS * COLUMNS, 2**step)
        values = tl.reshape(values, [ROWS, COLUMNS]) * (2 ** (-0.5 * STEPS))
    return values
