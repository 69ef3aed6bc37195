"""Bodies to a caller's memory: one pass, row by row."""

# ruff: noqa: FBT001, PLR0917 (numba passes a kernel's arguments by position)

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types

from kvtier.codecs.cpu import tokens
from kvtier.codecs.cpu.batch import SIGNATURE
from kvtier.codecs.cpu.direct import is_direct, stream_alike, stream_each
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
    TOKENS,
    UNSCALED,
    ZEROS,
    entry_of,
)
from kvtier.codecs.cpu.intrinsics import fence, load_u16, store_f32
from kvtier.codecs.cpu.jit import compiled, inlined, part_of_kernel
from kvtier.codecs.cpu.packing import unit_nbytes, unpack_alike, unpack_each
from kvtier.codecs.cpu.rows import AHEAD, place, prefetch_lines, rotate, scatter
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


@part_of_kernel
def _some(entry: Any, shape: Any, paging: Any, elements: int, token: int, done: int, left: int) -> int:
    """How many tokens to decode at once: those of a row, of one group of tokens, of one page."""
    some = min(tokens_of_row(elements, shape[4]), left)
    if entry[GRANULARITY] == CHANNEL:
        some = min(some, entry[GROUP] - done % entry[GROUP])
    return min(some, paging[1] - token % paging[1]) if paging[1] else some


@inlined
def _into_row(part: int, entry: Any, done: int, extent: Any, codes: int, rows: Any) -> None:
    """Decode tokens into a row of float32."""
    some, heads, dim = extent
    row, scales, zeros = rows
    elements = heads * dim
    if entry[GRANULARITY] == UNSCALED:
        _widened(entry[KIND], row, codes, some * elements)
    elif entry[GRANULARITY] == ROW:
        groups = heads * ((dim + entry[GROUP] - 1) // entry[GROUP])
        _by_row(part, entry, done * groups, (some * heads, dim), codes, rows)
    else:
        for i in range(some):
            unpack_each(entry[KIND], row + 4 * i * elements, codes + i * entry[ROW_NBYTES], scales, zeros, elements)
    rotate(row, some * elements, entry[ROTATION])


@inlined
def _decode_part(body: int, entry: Any, kv: Any, paging: Any, shape: Any, dim: int, rows: int, streaming: bool) -> None:
    base, step, begin = kv
    heads, dtype, length = shape[1], shape[3], shape[4]
    part, elements = body + entry[OFFSET], heads * dim
    exact = entry[TOKENS] if entry[KIND] == RAW else entry[SINKS]
    copy_tokens(part, base, step, (exact, heads, dim, shape[2]), begin, paging, LOAD, streaming)
    row = row_of(rows, length, tokens.TOKEN)
    scales = row_of(rows, length, tokens.SCALES)
    zeros = row_of(rows, length, tokens.ZEROS)
    if entry[GRANULARITY] == TENSOR:
        scale, zero = _parameters(part, entry, 0)
        fill(scales, scale, elements)
        fill(zeros, zero, elements)
    direct = is_direct(entry, base, step, dim, dtype, streaming)
    target = (base, step, begin + exact, heads, dim)
    by = (step[0], step[1], entry[GROUP])
    count, done = entry[TOKENS] - exact, 0
    while done < count:
        token = begin + exact + done
        some = _some(entry, shape, paging, elements, token, done, count - done)
        codes = part + entry[CODES] + done * entry[ROW_NBYTES]
        prefetch_lines(codes + AHEAD, some * entry[ROW_NBYTES])
        if entry[GRANULARITY] == CHANNEL and done % entry[GROUP] == 0:
            _spread(part, entry, done // entry[GROUP] * elements, elements, scales, zeros)
        if not direct:
            _into_row(part, entry, done, (some, heads, dim), codes, (row, scales, zeros))
            scatter(row, target, paging, done, some, dtype, (streaming, row_of(rows, length, tokens.LEVELS)))
        elif entry[GRANULARITY] == ROW:
            groups = heads * (dim // entry[GROUP])
            _spread(part, entry, done * groups, some * groups, scales, zeros)
            at, extent = place(base, step, token, paging), (some, heads, dim)
            stream_alike(entry[KIND], dtype, at, by, codes, scales, zeros, extent)
        else:
            at = place(base, step, token, paging)
            extent = (some, 1, elements) if step[1] == 2 * dim else (some, heads, dim)
            stream_each(entry[KIND], dtype, at, by, codes, scales, zeros, extent)
        done += some


@compiled(types.void(*SIGNATURE, types.boolean))
def decode_blocks(call: Any, blocks: Any, view: Any, tables: Any, shape: Any, streaming: bool) -> None:
    """Decode layers of bodies; `streaming`: past the cache."""
    memory, rows, first, stop = call
    begins, offsets, which = blocks
    addresses, strides, paging = view
    for i in range(begins.size):
        for layer in range(first, stop):
            for part in range(addresses.shape[1]):
                entry = entry_of(tables[which[i]], layer, part)
                by = strides[layer, part]
                kv = (addresses[layer, part], (by[0], by[1], by[2], by[3]), begins[i])
                _decode_part(
                    memory + offsets[i], entry, kv, paging, shape, shape[5] if part == 0 else shape[6], rows, streaming
                )
    if streaming:
        fence()
