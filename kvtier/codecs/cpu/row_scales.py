"""Encoding tokens whose heads, or groups of channels, have a scale each."""

# ruff: noqa: PLR0917 (numba passes a kernel's arguments by position)

from __future__ import annotations

from typing import Any

import numpy as np

from kvtier.codecs.cpu import fields
from kvtier.codecs.cpu.fields import CLIP, CODES, GROUP, KIND, LLOYD2, LLOYD3, LLOYD4, ROW_NBYTES
from kvtier.codecs.cpu.halves import INFINITY, nearest_half
from kvtier.codecs.cpu.intrinsics import load_f32, store_f32, store_u16, store_u32
from kvtier.codecs.cpu.jit import inlined, part_of_kernel
from kvtier.codecs.cpu.packing import pack_alike, pack_each, unit_nbytes, unpack_alike
from kvtier.codecs.cpu.scales import SHARES, choose_scales, keep_better, squared_error, take_back, within
from kvtier.codecs.cpu.sums import SUMMED, extremes, sum_of_lanes, sum_of_products
from kvtier.codecs.cpu.tokens import (
    ERRORS,
    HALVES,
    HIGH,
    INVERSES,
    LEVELS,
    LOW,
    SCALES,
    TOKEN,
    WORST,
    ZEROS,
    clear_rest,
    fill,
    row_of,
)
from kvtier.codecs.layout import UNIT

TRIALS = len(SHARES)
ZERO = np.float32(0.0)


@part_of_kernel
def _groups(entry: Any, heads: int, dim: int) -> int:
    return heads * ((dim + entry[GROUP] - 1) // entry[GROUP])


@inlined
def _extremes(entry: Any, heads: int, dim: int, rows: int, length: int) -> None:
    """The least and the greatest of each group."""
    row, low, high = row_of(rows, length, TOKEN), row_of(rows, length, LOW), row_of(rows, length, HIGH)
    for _ in range(heads):
        for first in range(0, dim, entry[GROUP]):
            count = min(entry[GROUP], dim - first)
            if count % UNIT == 0:
                extremes(row, count // UNIT, low, high)
            else:
                least, greatest = np.float32(np.inf), -np.float32(np.inf)
                for i in range(0, 4 * count, 4):
                    value = load_f32(row + i)
                    least = min(least, value)
                    greatest = max(greatest, value)
                store_f32(low, least)
                store_f32(high, greatest)
            row += 4 * count
            low += 4
            high += 4
    count = _groups(entry, heads, dim)
    clear_rest(row_of(rows, length, LOW), count)
    clear_rest(row_of(rows, length, HIGH), count)


@inlined
def _clip(part: int, entry: Any, index: int, heads: int, dim: int, rows: int, length: int) -> None:
    """Try narrower ranges, and leave the best in the body and in the rows."""
    groups = _groups(entry, heads, dim)
    sums = row_of(rows, length, LEVELS)
    for trial in range(TRIALS):
        choose_scales(part, entry, rows, length, index, groups, trial)
        row, group = row_of(rows, length, TOKEN), 0
        for _ in range(heads):
            for first in range(0, dim, entry[GROUP]):
                count = min(entry[GROUP], dim - first)
                scale = load_f32(row_of(rows, length, SCALES) + 4 * group)
                inverse = load_f32(row_of(rows, length, INVERSES) + 4 * group)
                zero = load_f32(row_of(rows, length, ZEROS) + 4 * group)
                fill(sums, ZERO, SUMMED)
                for i in range(count):
                    lane = sums + 4 * (i % SUMMED)
                    error = squared_error(entry, load_f32(row + 4 * i), scale, inverse, zero)
                    store_f32(lane, load_f32(lane) + error)
                store_f32(row_of(rows, length, ERRORS) + 4 * group, sum_of_lanes(sums))
                row += 4 * count
                group += 1
        keep_better(part, entry, rows, length, index, groups, trial)
    take_back(part, entry, rows, length, index, groups)


@part_of_kernel
def _pack(entry: Any, codes: int, heads: int, dim: int, rows: int, length: int) -> None:
    """Pack a row with the inverse and the zero point of each group."""
    row, kind = row_of(rows, length, TOKEN), entry[KIND]
    inverses, zeros = row_of(rows, length, INVERSES), row_of(rows, length, ZEROS)
    if dim % UNIT == 0 and entry[GROUP] % UNIT == 0:
        unit = unit_nbytes(kind)
        for _ in range(heads):
            for first in range(0, dim, entry[GROUP]):
                count = min(entry[GROUP], dim - first)
                pack_alike(kind, codes, row, load_f32(inverses), load_f32(zeros), count, within(entry))
                codes += count // UNIT * unit
                row += 4 * count
                inverses += 4
                zeros += 4
        return
    each_inverse, each_zero = row_of(rows, length, LEVELS), row_of(rows, length, ERRORS)
    for _ in range(heads):
        for first in range(0, dim, entry[GROUP]):
            count = min(entry[GROUP], dim - first)
            fill(each_inverse, load_f32(inverses), count)
            fill(each_zero, load_f32(zeros), count)
            each_inverse += 4 * count
            each_zero += 4 * count
            inverses += 4
            zeros += 4
    each_inverse, each_zero = row_of(rows, length, LEVELS), row_of(rows, length, ERRORS)
    clear_rest(each_inverse, heads * dim)
    clear_rest(each_zero, heads * dim)
    pack_each(kind, codes, row, each_inverse, each_zero, heads * dim, within(entry))


@part_of_kernel
def _sum_of_products(one: int, other: int, count: int, sums: int) -> Any:
    """In the order that `reference.SUMMED` says; `sums` is room for them."""
    if count % SUMMED == 0:
        return sum_of_products(one, other, count // SUMMED)
    fill(sums, ZERO, SUMMED)
    for i in range(count):
        lane = sums + 4 * (i % SUMMED)
        store_f32(lane, load_f32(lane) + load_f32(one + 4 * i) * load_f32(other + 4 * i))
    return sum_of_lanes(sums)


@inlined
def _encode_levels(part: int, entry: Any, index: int, codes: int, heads: int, dim: int, rows: int, length: int) -> None:
    """Nearest levels of each head over its root mean square, and the scale that gives it its length again."""
    row, inverses, sums = row_of(rows, length, TOKEN), row_of(rows, length, INVERSES), row_of(rows, length, HALVES)
    squares, levels = row_of(rows, length, SCALES), row_of(rows, length, LEVELS)
    sound = True
    for head in range(heads):
        at = row + 4 * head * dim
        total = _sum_of_products(at, at, dim, sums)
        sound = sound and total < np.float32(np.inf)
        size = np.sqrt(total / np.float32(dim))
        store_f32(squares + 4 * head, total)
        store_f32(inverses + 4 * head, np.float32(1.0) / size if size > ZERO else ZERO)
        store_f32(row_of(rows, length, ZEROS) + 4 * head, ZERO)
    _pack(entry, codes, heads, dim, rows, length)
    unpack_alike(entry[KIND], levels, codes, np.float32(1.0), ZERO, heads * dim)
    for head in range(heads):
        at = levels + 4 * head * dim
        scale = nearest_half(np.sqrt(load_f32(squares + 4 * head) / _sum_of_products(at, at, dim, sums)))
        sound = sound and scale < INFINITY
        store_u16(part + entry[fields.SCALES] + 2 * (index + head), scale)
    if not sound:
        store_u32(row_of(rows, length, WORST), INFINITY)


@inlined
def encode_rows(part: int, entry: Any, token: int, count: int, heads: int, dim: int, rows: int, length: int) -> None:
    """Encode the tokens that are in the first row."""
    codes = part + entry[CODES] + token * entry[ROW_NBYTES]
    index = token * _groups(entry, heads, dim)
    # What has scales of its own is a head: of how many tokens does not matter.
    heads *= count
    if entry[KIND] in (LLOYD4, LLOYD3, LLOYD2):
        _encode_levels(part, entry, index, codes, heads, dim, rows, length)
        return
    _extremes(entry, heads, dim, rows, length)
    if entry[CLIP]:
        _clip(part, entry, index, heads, dim, rows, length)
    else:
        choose_scales(part, entry, rows, length, index, _groups(entry, heads, dim), 0)
    _pack(entry, codes, heads, dim, rows, length)
