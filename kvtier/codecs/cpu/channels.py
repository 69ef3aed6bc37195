"""Encoding with scales that tokens share: each channel of each head its own, or one for all."""

# ruff: noqa: PLR0917 (numba passes a kernel's arguments by position)

from __future__ import annotations

from typing import Any

import numpy as np

from kvtier.codecs.cpu.batch import DTYPES
from kvtier.codecs.cpu.fields import CLIP, CODES, GROUP, KIND, ROTATION, ROW_NBYTES
from kvtier.codecs.cpu.intrinsics import load_f32, store_f32
from kvtier.codecs.cpu.jit import inlined, part_of_kernel
from kvtier.codecs.cpu.packing import pack_each
from kvtier.codecs.cpu.rows import place
from kvtier.codecs.cpu.scales import SHARES, choose_scales, keep_better, squared_error, take_back, within
from kvtier.codecs.cpu.sums import extremes, extremes_each
from kvtier.codecs.cpu.tokens import (
    ERRORS,
    HALVES,
    HIGH,
    INVERSES,
    LARGEST,
    LOW,
    SCALES,
    TOKEN,
    ZEROS,
    clear_rest,
    fill,
    look_at_tokens,
    read_tokens,
    row_of,
    tokens_of_row,
)
from kvtier.codecs.layout import UNIT

TRIALS = len(SHARES)
BFLOAT16, FLOAT16, _ = DTYPES.values()
_of_bf16, _of_fp16, _of_row = (extremes_each(dtype) for dtype in DTYPES)


@part_of_kernel
def _extremes(source: Any, paging: Any, shape: Any, rows: int, first: int, last: int, entry: Any) -> None:
    """The least and the greatest of each channel over tokens; straight from the caller's memory where that is dense."""
    base, step, begin, heads, dim = source
    elements, length, dtype = heads * dim, shape[4], shape[3]
    units = (elements + UNIT - 1) // UNIT
    row, low, high = row_of(rows, length, TOKEN), row_of(rows, length, LOW), row_of(rows, length, HIGH)
    largest = row_of(rows, length, LARGEST)
    fill(low, np.float32(np.inf), units * UNIT)
    fill(high, -np.float32(np.inf), units * UNIT)
    dense = step[2] == 2 and step[1] == 2 * dim and elements % UNIT == 0 and entry[ROTATION] < 2
    for t in range(first, last):
        if dense and dtype == BFLOAT16:
            _of_bf16(place(base, step, begin + t, paging), units, low, high, largest)
        elif dense and dtype == FLOAT16:
            _of_fp16(place(base, step, begin + t, paging), units, low, high, largest)
        else:
            look_at_tokens(source, paging, shape, rows, t, 1, entry)
            _of_row(row, units, low, high, row_of(rows, length, HALVES))


@inlined
def _clip(part: int, entry: Any, source: Any, paging: Any, shape: Any, rows: int, first: int, last: int) -> None:
    """Try narrower ranges, and leave the best in the body and in the rows."""
    length, elements = shape[4], source[3] * source[4]
    index = first // entry[GROUP] * elements
    row, errors = row_of(rows, length, TOKEN), row_of(rows, length, ERRORS)
    scales, inverses, zeros = row_of(rows, length, SCALES), row_of(rows, length, INVERSES), row_of(rows, length, ZEROS)
    for trial in range(TRIALS):
        choose_scales(part, entry, rows, length, index, elements, trial)
        fill(errors, np.float32(0.0), elements)
        for t in range(first, last):
            read_tokens(source, paging, shape, rows, t, 1, entry)
            for i in range(0, 4 * elements, 4):
                scale, inverted, zero = load_f32(scales + i), load_f32(inverses + i), load_f32(zeros + i)
                error = squared_error(entry, load_f32(row + i), scale, inverted, zero)
                store_f32(errors + i, load_f32(errors + i) + error)
        keep_better(part, entry, rows, length, index, elements, trial)
    take_back(part, entry, rows, length, index, elements)


@part_of_kernel
def _pack(part: int, entry: Any, source: Any, paging: Any, shape: Any, rows: int, first: int, last: int) -> None:
    length = shape[4]
    row, inverses, zeros = row_of(rows, length, TOKEN), row_of(rows, length, INVERSES), row_of(rows, length, ZEROS)
    elements = source[3] * source[4]
    many = tokens_of_row(elements, length)
    for t in range(first, last, many):
        count = min(many, last - t)
        read_tokens(source, paging, shape, rows, t, count, entry)
        for i in range(count):
            codes = part + entry[CODES] + (t + i) * entry[ROW_NBYTES]
            pack_each(entry[KIND], codes, row + 4 * i * elements, inverses, zeros, elements, within(entry))


@inlined
def encode_channels(part: int, entry: Any, source: Any, paging: Any, shape: Any, rows: int, count: int) -> None:
    """Encode tokens of which `GROUP` share a scale a channel."""
    elements = source[3] * source[4]
    for first in range(0, count, entry[GROUP]):
        last = min(first + entry[GROUP], count)
        _extremes(source, paging, shape, rows, first, last, entry)
        if entry[CLIP]:
            _clip(part, entry, source, paging, shape, rows, first, last)
        else:
            choose_scales(part, entry, rows, shape[4], first // entry[GROUP] * elements, elements, 0)
        _pack(part, entry, source, paging, shape, rows, first, last)


@inlined
def encode_tensor(part: int, entry: Any, source: Any, paging: Any, shape: Any, rows: int, count: int) -> None:
    """Encode tokens that all share one scale."""
    length, elements = shape[4], source[3] * source[4]
    low, high = row_of(rows, length, LOW), row_of(rows, length, HIGH)
    _extremes(source, paging, shape, rows, 0, count, entry)
    if elements % UNIT:
        for i in range(elements, (elements + UNIT - 1) // UNIT * UNIT):
            store_f32(low + 4 * i, load_f32(low))
            store_f32(high + 4 * i, load_f32(high))
    units = (elements + UNIT - 1) // UNIT
    extremes(low, units, low, row_of(rows, length, ERRORS))
    extremes(high, units, row_of(rows, length, ERRORS), high)
    for i in range(1, UNIT):
        store_f32(low + 4 * i, np.float32(0.0))
        store_f32(high + 4 * i, np.float32(0.0))
    choose_scales(part, entry, rows, length, 0, 1, 0)
    inverses, zeros = row_of(rows, length, INVERSES), row_of(rows, length, ZEROS)
    inverse, zero = load_f32(inverses), load_f32(zeros)
    fill(inverses, inverse, elements)
    fill(zeros, zero, elements)
    clear_rest(inverses, elements)
    clear_rest(zeros, elements)
    _pack(part, entry, source, paging, shape, rows, 0, count)
