"""Rows of float32 in the cache, between a caller's memory and the codes: one token, all heads, one after the other."""

# ruff: noqa: PLR0917 (numba passes a kernel's arguments by position)

from __future__ import annotations

from typing import Any

import numpy as np

from kvtier.codecs.cpu import units
from kvtier.codecs.cpu.batch import DTYPES
from kvtier.codecs.cpu.exact import copy_run
from kvtier.codecs.cpu.intrinsics import (
    LINE,
    load_f32,
    load_i64,
    load_u16,
    load_u32,
    prefetch,
    store_f32,
    store_u16,
    store_u32,
)
from kvtier.codecs.cpu.jit import part_of_kernel
from kvtier.codecs.cpu.lanes import one_narrowed, one_widened
from kvtier.codecs.cpu.sums import hadamard
from kvtier.codecs.layout import UNIT

BFLOAT16, FLOAT16, FLOAT32 = DTYPES.values()
AHEAD = 1024
"""Bytes that are prefetched before they are read: computing must not wait for the memory."""

_widen = tuple(units.widen(dtype) for dtype in DTYPES)
_narrow = tuple(units.narrow(dtype) for dtype in DTYPES)
_stream = tuple(units.narrow(dtype, streaming=True) for dtype in DTYPES)
_one_widened = tuple(one_widened(dtype) for dtype in DTYPES)
_one_narrowed = tuple(one_narrowed(dtype) for dtype in DTYPES)


@part_of_kernel
def place(base: int, step: Any, token: int, paging: Any) -> int:
    """Address of a token; `paging`: address of the page table, and tokens in a page, 0 when there are none."""
    table, page_tokens = paging
    if page_tokens == 0:
        return base + token * step[0]
    page = load_i64(table + token // page_tokens * 8)
    return base + page * step[3] + token % page_tokens * step[0]


@part_of_kernel
def prefetch_lines(address: int, nbytes: int) -> None:
    """Ask for what will be read next."""
    for at in range(0, nbytes, LINE):
        prefetch(address + at)


def _reader(number: int) -> Any:
    itemsize = 4 if number == FLOAT32 else 2
    wide, one = _widen[number], _one_widened[number]
    load = load_u32 if number == FLOAT32 else load_u16

    @part_of_kernel
    def read(row: int, at: int, count: int, by_element: int) -> None:
        done = 0
        if by_element == itemsize:
            done = count // UNIT * UNIT
            for i in range(0, done, UNIT):
                wide(row + 4 * i, at + itemsize * i)
        for i in range(done, count):
            store_f32(row + 4 * i, one(load(at + by_element * i)))

    return read


def _writer(number: int) -> Any:
    itemsize = 4 if number == FLOAT32 else 2
    wide, line, one = _narrow[number], _stream[number], _one_narrowed[number]
    store = store_u32 if number == FLOAT32 else store_u16

    @part_of_kernel
    def write(at: int, row: int, count: int, by_element: int, past_cache: Any) -> None:
        streaming, staging = past_cache
        if streaming and by_element == itemsize and at % LINE == 0 and count % UNIT == 0:
            for i in range(0, count, UNIT):
                line(at + itemsize * i, row + 4 * i)
            return
        streaming = streaming and by_element == itemsize and count * itemsize >= 2 * LINE
        target = staging if streaming else at
        done = 0
        if by_element == itemsize:
            done = count // UNIT * UNIT
            for i in range(0, done, UNIT):
                wide(target + itemsize * i, row + 4 * i)
        for i in range(done, count):
            store(target + by_element * i, one(load_f32(row + 4 * i)))
        if streaming:
            copy_run(at, staging, count * itemsize, streaming)

    return write


_read_bf16, _read_fp16, _read_fp32 = (_reader(number) for number in DTYPES.values())
_write_bf16, _write_fp16, _write_fp32 = (_writer(number) for number in DTYPES.values())


@part_of_kernel
def _read(row: int, at: int, count: int, by_element: int, dtype: int) -> None:
    if dtype == BFLOAT16:
        _read_bf16(row, at, count, by_element)
    elif dtype == FLOAT16:
        _read_fp16(row, at, count, by_element)
    else:
        _read_fp32(row, at, count, by_element)


@part_of_kernel
def _write(at: int, row: int, count: int, by_element: int, dtype: int, past_cache: Any) -> None:
    if dtype == BFLOAT16:
        _write_bf16(at, row, count, by_element, past_cache)
    elif dtype == FLOAT16:
        _write_fp16(at, row, count, by_element, past_cache)
    else:
        _write_fp32(at, row, count, by_element, past_cache)


@part_of_kernel
def gather(row: int, source: Any, paging: Any, token: int, count: int, dtype: int) -> None:
    """Widen the heads of `count` tokens into a row, one token after the other.

    `source`: address, steps in bytes (token, head, element, page), first token, heads, dim.
    """
    base, step, begin, heads, dim = source
    itemsize, elements = 4 if dtype == FLOAT32 else 2, heads * dim
    whole = step[2] == itemsize and step[1] == dim * itemsize
    if whole and step[0] == elements * itemsize and paging[1] == 0:
        _read(row, base + (begin + token) * step[0], count * elements, itemsize, dtype)
        return
    for t in range(count):
        at = place(base, step, begin + token + t, paging)
        if whole:
            _read(row, at, elements, itemsize, dtype)
        else:
            for h in range(heads):
                _read(row + 4 * h * dim, at + h * step[1], dim, step[2], dtype)
        row += 4 * elements


@part_of_kernel
def scatter(row: int, target: Any, paging: Any, token: int, count: int, dtype: int, past_cache: Any) -> None:
    """Narrow a row into the heads of `count` tokens: the inverse of `gather`.

    `past_cache`: whether to write so, and room for as many elements.
    """
    base, step, begin, heads, dim = target
    itemsize, elements = 4 if dtype == FLOAT32 else 2, heads * dim
    whole = step[2] == itemsize and step[1] == dim * itemsize
    if whole and step[0] == elements * itemsize and paging[1] == 0:
        _write(base + (begin + token) * step[0], row, count * elements, itemsize, dtype, past_cache)
    elif whole or paging[1]:
        for t in range(count):
            at = place(base, step, begin + token + t, paging)
            if whole:
                _write(at, row, elements, itemsize, dtype, past_cache)
            else:
                for h in range(heads):
                    _write(at + h * step[1], row + 4 * h * dim, dim, step[2], dtype, past_cache)
            row += 4 * elements
    else:
        # A head's tokens lie beside each other where heads do not: write them in the order of memory.
        at = base + (begin + token) * step[0]
        for h in range(heads):
            for t in range(count):
                from_ = row + 4 * (t * elements + h * dim)
                _write(at + h * step[1] + t * step[0], from_, dim, step[2], dtype, past_cache)


_LARGEST = 256
_hadamard_2, _hadamard_4, _hadamard_8 = (hadamard(n, n**-0.5) for n in (2, 4, 8))
_hadamard_16, _hadamard_32, _hadamard_64 = (hadamard(n, n**-0.5) for n in (16, 32, 64))
_hadamard_128, _hadamard_256, _hadamard_unscaled = (
    hadamard(n, f) for n, f in ((128, 128**-0.5), (256, 1 / 16), (256, 1))
)


@part_of_kernel
def rotate(row: int, count: int, size: int) -> None:  # noqa: C901 (one line a size)
    """Rotate each run of `size` elements of a row, which has room up to a multiple of 16."""
    if size < 2:
        return
    for at in range(row, row + 4 * count, 4 * max(size, 16)):
        if size == 128:
            _hadamard_128(at)
        elif size == 64:
            _hadamard_64(at)
        elif size == 256:
            _hadamard_256(at)
        elif size == 32:
            _hadamard_32(at)
        elif size == 16:
            _hadamard_16(at)
        elif size == 8:
            _hadamard_8(at)
        elif size == 4:
            _hadamard_4(at)
        elif size == 2:
            _hadamard_2(at)
        else:
            _rotate_long(at, size)


@part_of_kernel
def _rotate_long(row: int, size: int) -> None:
    for at in range(row, row + 4 * size, 4 * _LARGEST):
        _hadamard_unscaled(at)
    apart = _LARGEST
    while apart < size:
        for at in range(size):
            if not at & apart:
                low, high = row + 4 * at, row + 4 * (at + apart)
                one, other = load_f32(low), load_f32(high)
                store_f32(low, one + other)
                store_f32(high, one - other)
        apart *= 2
    factor = np.float32(np.float64(size) ** -0.5)
    for at in range(row, row + 4 * size, 4):
        store_f32(at, load_f32(at) * factor)
