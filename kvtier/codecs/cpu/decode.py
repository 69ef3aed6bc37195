"""Bodies to a caller's memory: one pass, row by row."""

# ruff: noqa: FBT001, PLR0917 (numba passes a kernel's arguments by position)

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types

from kvtier.codecs.cpu import tokens
from kvtier.codecs.cpu.batch import SIGNATURE
from kvtier.codecs.cpu.exact import LOAD, copy_tokens
from kvtier.codecs.cpu.fields import (
    CHANNEL,
    CODES,
    FP16,
    GRANULARITY,
    GROUP,
    KIND,
    OFFSET,
    RAW,
    ROTATION,
    ROW,
    ROW_NBYTES,
    SCALES,
    SINKS,
    TENSOR,
    UNSCALED,
    ZEROS,
    entry_of,
)
from kvtier.codecs.cpu.intrinsics import fence, load_u16, store_f32
from kvtier.codecs.cpu.jit import compiled, inlined, part_of_kernel
from kvtier.codecs.cpu.packing import unit_nbytes, unpack_alike, unpack_each
from kvtier.codecs.cpu.rows import AHEAD, prefetch_lines, rotate, scatter
from kvtier.codecs.cpu.scales import code_of_zero, one_half
from kvtier.codecs.cpu.tokens import fill, row_of, tokens_of_row
from kvtier.codecs.cpu.units import widen, zeros_of
from kvtier.codecs.layout import UNIT

_widen_bf16, _widen_fp16 = widen("bfloat16"), widen("float16")


@part_of_kernel
def _parameters(part: int, entry: Any, index: int) -> tuple[Any, Any]:
    """Scale `index`, and its zero point or what stands for it."""
    scale = one_half(load_u16(part + entry[SCALES] + 2 * index))
    if entry[ZEROS]:
        return scale, one_half(load_u16(part + entry[ZEROS] + 2 * index))
    return scale, np.float32(0.0) - code_of_zero(entry) * scale


@inlined
def _spread(part: int, entry: Any, first: int, count: int, scales: int, zeros: int) -> None:
    """Scales `first` and following, one for each of `count` elements."""
    whole = count // UNIT * UNIT
    for i in range(0, whole, UNIT):
        _widen_fp16(scales + 4 * i, part + entry[SCALES] + 2 * (first + i))
        if entry[ZEROS]:
            _widen_fp16(zeros + 4 * i, part + entry[ZEROS] + 2 * (first + i))
        else:
            zeros_of(zeros + 4 * i, scales + 4 * i, code_of_zero(entry))
    for i in range(whole, count):
        scale, zero = _parameters(part, entry, first + i)
        store_f32(scales + 4 * i, scale)
        store_f32(zeros + 4 * i, zero)


@inlined
def _by_row(part: int, entry: Any, index: int, extent: Any, codes: int, rows: Any) -> None:
    """Rows whose heads, or groups of channels, have a scale each; the first has number `index`."""
    heads, dim = extent
    row, scales, zeros = rows
    group = entry[GROUP]
    alike = dim % UNIT == 0 and group % UNIT == 0
    nbytes = unit_nbytes(entry[KIND])
    for _ in range(heads):
        for first in range(0, dim, group):
            count = min(group, dim - first)
            scale, zero = _parameters(part, entry, index)
            index += 1
            if alike:
                unpack_alike(entry[KIND], row, codes, scale, zero, count)
                codes += count // UNIT * nbytes
                row += 4 * count
            else:
                fill(scales, scale, count)
                fill(zeros, zero, count)
                scales += 4 * count
                zeros += 4 * count
    if not alike:
        elements = heads * dim
        unpack_each(entry[KIND], row, codes, scales - 4 * elements, zeros - 4 * elements, elements)


@inlined
def _widened(kind: int, row: int, codes: int, count: int) -> None:
    for i in range((count + UNIT - 1) // UNIT):
        if kind == FP16:
            _widen_fp16(row + i * 4 * UNIT, codes + i * 2 * UNIT)
        else:
            _widen_bf16(row + i * 4 * UNIT, codes + i * 2 * UNIT)


@inlined
def _decode_part(body: int, entry: Any, kv: Any, paging: Any, shape: Any, dim: int, rows: int, streaming: bool) -> None:
    base, step, begin = kv
    count, heads, itemsize, dtype, length = shape[0], shape[1], shape[2], shape[3], shape[4]
    part, kind = body + entry[OFFSET], entry[KIND]
    exact = count if kind == RAW else entry[SINKS]
    copy_tokens(part, base, step, (exact, heads, dim, itemsize), begin, paging, LOAD, streaming)
    row, scales, zeros = (
        row_of(rows, length, tokens.TOKEN),
        row_of(rows, length, tokens.SCALES),
        row_of(rows, length, tokens.ZEROS),
    )
    elements = heads * dim
    if entry[GRANULARITY] == TENSOR:
        scale, zero = _parameters(part, entry, 0)
        fill(scales, scale, elements)
        fill(zeros, zero, elements)
    many = tokens_of_row(elements, length)
    groups = heads * ((dim + entry[GROUP] - 1) // max(entry[GROUP], 1))
    for t in range(0, count - exact, many):
        some = min(many, count - exact - t)
        codes = part + entry[CODES] + t * entry[ROW_NBYTES]
        prefetch_lines(codes + AHEAD, some * entry[ROW_NBYTES])
        if entry[GRANULARITY] == ROW:
            _by_row(part, entry, t * groups, (some * heads, dim), codes, (row, scales, zeros))
        elif entry[GRANULARITY] == UNSCALED:
            _widened(kind, row, codes, some * elements)
        else:
            for i in range(some):
                if entry[GRANULARITY] == CHANNEL and (t + i) % entry[GROUP] == 0:
                    _spread(part, entry, (t + i) // entry[GROUP] * elements, elements, scales, zeros)
                into = row + 4 * i * elements
                unpack_each(kind, into, codes + i * entry[ROW_NBYTES], scales, zeros, elements)
        rotate(row, some * elements, entry[ROTATION])
        target = (base, step, begin + exact, heads, dim)
        scatter(row, target, paging, t, some, dtype, (streaming, row_of(rows, length, tokens.LEVELS)))


@compiled(types.void(*SIGNATURE, types.boolean))
def decode_blocks(call: Any, blocks: Any, view: Any, tables: Any, shape: Any, streaming: bool) -> None:
    """Decode layers of bodies; `streaming`: past the cache."""
    memory, rows, first, stop = call
    begins, offsets, positions = blocks
    addresses, strides, paging = view
    for i in range(begins.size):
        for layer in range(first, stop):
            for part in range(addresses.shape[1]):
                entry = entry_of(tables[0] if positions[i] == 0 else tables[1], layer, part)
                by = strides[layer, part]
                kv = (addresses[layer, part], (by[0], by[1], by[2], by[3]), begins[i])
                _decode_part(
                    memory + offsets[i], entry, kv, paging, shape, shape[5] if part == 0 else shape[6], rows, streaming
                )
    if streaming:
        fence()
