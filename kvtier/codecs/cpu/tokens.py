"""The rows that a kernel works in, and reading tokens into the first of them."""

# ruff: noqa: PLR0917 (numba passes a kernel's arguments by position)

from __future__ import annotations

from typing import Any

import numpy as np

from kvtier.codecs.cpu.fields import ROTATION
from kvtier.codecs.cpu.intrinsics import store_f32
from kvtier.codecs.cpu.jit import part_of_kernel
from kvtier.codecs.cpu.rows import gather, rotate
from kvtier.codecs.cpu.sums import keep_largest_bits
from kvtier.codecs.layout import UNIT

TOKEN, SCALES, INVERSES, ZEROS, LOW, HIGH, LEVELS, ERRORS, BEST, HALVES, LARGEST, WORST = range(12)
"""The elements of some tokens; of each group its scale, the inverse, the zero point, the least and the greatest
element; room for a row; squared errors of the scales on trial, and the least so far; room for float16; the largest
bits of elements so far, and of scales and zero points."""


@part_of_kernel
def row_of(rows: int, length: int, number: int) -> int:
    """Address of one of the rows, each of `length` float32."""
    return rows + 4 * length * number


@part_of_kernel
def fill(row: int, value: Any, count: int) -> None:
    """Set elements of a row to one value."""
    for i in range(count):
        store_f32(row + 4 * i, value)


@part_of_kernel
def clear_rest(row: int, count: int) -> None:
    """Set what is behind the last of `count` elements, up to a whole unit, to 0."""
    for i in range(count, (count + UNIT - 1) // UNIT * UNIT):
        store_f32(row + 4 * i, np.float32(0.0))


@part_of_kernel
def tokens_of_row(elements: int, length: int) -> int:
    """How many tokens of this many elements a row takes; more than one only where no unit is half empty."""
    return max(1, (length - UNIT) // elements) if elements % UNIT == 0 else 1


@part_of_kernel
def read_tokens(source: Any, paging: Any, shape: Any, rows: int, token: int, count: int, entry: Any) -> None:
    """Widen tokens into the first row and rotate them; zeros follow up to a whole unit."""
    row, elements = row_of(rows, shape[4], TOKEN), source[3] * source[4]
    gather(row, source, paging, token, count, shape[3])
    clear_rest(row, count * elements)
    rotate(row, count * elements, entry[ROTATION])


@part_of_kernel
def look_at_tokens(source: Any, paging: Any, shape: Any, rows: int, token: int, count: int, entry: Any) -> None:
    """Read tokens, and remember the largest bits of their elements."""
    row, elements = row_of(rows, shape[4], TOKEN), count * source[3] * source[4]
    gather(row, source, paging, token, count, shape[3])
    clear_rest(row, elements)
    keep_largest_bits(row, (elements + UNIT - 1) // UNIT, row_of(rows, shape[4], LARGEST))
    rotate(row, elements, entry[ROTATION])
