"""Scale and zero point of groups of elements, many at a time, and the ones that have the least squared error."""

# ruff: noqa: FBT001, PLR0917 (numba passes a kernel's arguments by position)

from __future__ import annotations

from typing import Any

import numpy as np

from kvtier.codecs.cpu import tokens
from kvtier.codecs.cpu.fields import E4M3, E5M2, INT2, INT3, INT4, INT8, KIND, SCALES, ZEROS
from kvtier.codecs.cpu.halves import choose, nearest_half
from kvtier.codecs.cpu.intrinsics import copy_memory, load_f32, load_u16, store_f32, store_u16
from kvtier.codecs.cpu.jit import part_of_kernel
from kvtier.codecs.cpu.lanes import one_widened
from kvtier.codecs.cpu.tokens import row_of
from kvtier.codecs.layout import UNIT

MAGIC = np.float32(12582912.0)
"""1.5 * 2**23: added to a small float32 and taken away again it rounds to nearest even."""
SHARES = np.array([1 - 0.08 * i for i in range(8)], np.float32)
"""Of the range that `clip` tries."""
one_half = one_widened("float16")
_symmetric, _integer, _float = choose("symmetric"), choose("integer"), choose("float")


@part_of_kernel
def most_of(kind: int, symmetric: bool) -> Any:
    """The largest code, or float of 8 bits: what the scale is a share of."""
    if kind == E4M3:
        return np.float32(448.0)
    if kind == E5M2:
        return np.float32(57344.0)
    most = 255 if kind == INT8 else 15 if kind == INT4 else 7 if kind == INT3 else 3
    return np.float32(most // 2) if symmetric else np.float32(most)


@part_of_kernel
def within(entry: Any) -> tuple[Any, Any, Any]:
    """The least and the greatest integer code, before what is added to it, and that."""
    most = most_of(entry[KIND], entry[ZEROS] == 0)
    if entry[ZEROS]:
        return np.float32(0.0), most, np.float32(0.0)
    return -most, most, most + np.float32(1.0)


@part_of_kernel
def code_of_zero(entry: Any) -> Any:
    """What integer codes without a zero point are shifted by; 0 of other codes."""
    if entry[ZEROS] or entry[KIND] not in (INT8, INT4, INT3, INT2):
        return np.float32(0.0)
    return most_of(entry[KIND], entry[ZEROS] == 0) + np.float32(1.0)


@part_of_kernel
def choose_scales(part: int, entry: Any, rows: int, length: int, first: int, count: int, trial: int) -> None:
    """Set scales, inverses and zero points of groups, from the least and the greatest of each.

    Those of the first trial are stored, from the `first` on. Whether all have a float16 is seen in the row `WORST`.
    """
    kind, symmetric = entry[KIND], entry[ZEROS] == 0
    how_far = (most_of(kind, symmetric), SHARES[trial])
    halves, worst = row_of(rows, length, tokens.HALVES), row_of(rows, length, tokens.WORST)
    for i in range(0, 4 * count, 4 * UNIT):
        low, high = row_of(rows, length, tokens.LOW) + i, row_of(rows, length, tokens.HIGH) + i
        scales, inverses = row_of(rows, length, tokens.SCALES) + i, row_of(rows, length, tokens.INVERSES) + i
        floats = (scales, inverses, row_of(rows, length, tokens.ZEROS) + i)
        if symmetric:
            _symmetric(low, high, how_far, halves, floats, worst)
        elif kind in (E4M3, E5M2):
            _float(low, high, how_far, halves, floats, worst)
        else:
            _integer(low, high, how_far, halves, floats, worst)
        if trial == 0:
            nbytes, at = min(2 * UNIT, 2 * count - i // 2), 2 * first + i // 2
            copy_memory(part + entry[SCALES] + at, halves, nbytes)
            if not symmetric:
                copy_memory(part + entry[ZEROS] + at, halves + 2 * UNIT, nbytes)


@part_of_kernel
def keep_better(part: int, entry: Any, rows: int, length: int, first: int, count: int, trial: int) -> None:
    """Store the scales of a trial for the groups where it has the least squared error so far."""
    scales, zeros = row_of(rows, length, tokens.SCALES), row_of(rows, length, tokens.ZEROS)
    errors, best = row_of(rows, length, tokens.ERRORS), row_of(rows, length, tokens.BEST)
    for i in range(count):
        error = load_f32(errors + 4 * i)
        if trial == 0 or error < load_f32(best + 4 * i):
            store_f32(best + 4 * i, error)
            store_u16(part + entry[SCALES] + 2 * (first + i), nearest_half(load_f32(scales + 4 * i)))
            if entry[ZEROS]:
                store_u16(part + entry[ZEROS] + 2 * (first + i), nearest_half(load_f32(zeros + 4 * i)))


@part_of_kernel
def take_back(part: int, entry: Any, rows: int, length: int, first: int, count: int) -> None:
    """Set inverses and zero points of groups to what is stored of them, from the `first` on."""
    inverses, zeros = row_of(rows, length, tokens.INVERSES), row_of(rows, length, tokens.ZEROS)
    for i in range(count):
        scale = one_half(load_u16(part + entry[SCALES] + 2 * (first + i)))
        store_f32(inverses + 4 * i, np.float32(1.0) / scale if scale > np.float32(0.0) else np.float32(0.0))
        if entry[ZEROS]:
            store_f32(zeros + 4 * i, one_half(load_u16(part + entry[ZEROS] + 2 * (first + i))))


@part_of_kernel
def squared_error(entry: Any, value: Any, scale: Any, inverse: Any, zero: Any) -> Any:
    """Of one element as an integer code."""
    least, most, _ = within(entry)
    code = min(max((value - zero) * inverse, least), most)
    code = (code + MAGIC) - MAGIC
    error = code * scale + zero - value
    return error * error
