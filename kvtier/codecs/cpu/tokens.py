"""The rows that a kernel works in, and reading a token into the first of them."""



from __future__ import annotations

from typing import Any

import numpy as np

from kvtier.codecs.cpu.fields import ROTATION
from kvtier.codecs.cpu.intrinsics import store_f32
from kvtier.codecs.cpu.jit import part_of_kernel
from kvtier.codecs.layout import UNIT
from kvtier.codecs.cpu.rows import gather, place, rotate
from kvtier.codecs.cpu.sums import keep_largest_bits

TOKEN, SCALES, INVERSES, ZEROS, LOW, HIGH, LEVELS, ERRORS, BEST, HALVES, LARGEST, WORST = range(12)
"""A token's elements; of each group its scale, the inverse, the zero point, the least and the greatest element; room for a
row; squared errors of the scales on trial, and the least so far; room for float16; the largest bits of elements so far, and
of scales and zero points."""


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
def read_token(source: Any, paging: Any, shape: Any, rows: int, token: int, entry: Any) -> None:
    """Widen a token into the first row, remember its largest bits, and rotate it; zeros follow up to a whole unit."""
    base, step, begin, heads, dim = source
    row, count = row_of(rows, shape[4], TOKEN), heads * dim
    gather(row, place(base, step, begin + token, paging), step, heads, dim, shape[3])
    clear_rest(row, count)
    keep_largest_bits(row, (count + UNIT - 1) // UNIT, row_of(rows, shape[4], LARGEST))
    rotate(row, count, entry[ROTATION])
