"""A caller's memory to bodies: one pass, row by row; a second one over what shares scales between tokens."""

# ruff: noqa: FBT001, PLR0917 (numba passes a kernel's arguments by position)

from __future__ import annotations

from typing import Any

from numba import types

from kvtier.codecs.cpu.batch import SIGNATURE
from kvtier.codecs.cpu.channels import encode_channels, encode_tensor
from kvtier.codecs.cpu.exact import STORE, copy_tokens
from kvtier.codecs.cpu.fields import (
    BF16,
    CHANNEL,
    CODES,
    END,
    FP16,
    GRANULARITY,
    KIND,
    NBYTES,
    OFFSET,
    RAW,
    ROTATION,
    ROW,
    ROW_NBYTES,
    SINKS,
    TENSOR,
    TOKENS,
    entry_of,
)
from kvtier.codecs.cpu.halves import INFINITY
from kvtier.codecs.cpu.intrinsics import fence, store_u8, store_u32
from kvtier.codecs.cpu.jit import compiled, inlined
from kvtier.codecs.cpu.row_scales import encode_rows
from kvtier.codecs.cpu.sums import largest_bits
from kvtier.codecs.cpu.tokens import LARGEST, TOKEN, WORST, look_at_tokens, row_of, tokens_of_row
from kvtier.codecs.cpu.units import narrow
from kvtier.codecs.layout import UNIT

_narrow_bf16, _narrow_fp16 = narrow("bfloat16"), narrow("float16")
INFINITE = 0x7F800000
BEYOND_FP16 = 0x477FF000
"""65520, the least float32 that rounds to an infinite float16."""
BEYOND_BF16 = 0x7F7F8000
"""The least float32 that rounds to an infinite bfloat16."""
BEYOND_ROTATION = 0x71800000
"""2**100: far more than any scale reaches, and sums of so much less cannot overflow: Inf - Inf is no extreme."""


@inlined
def _narrowed(kind: int, row: int, codes: int, count: int) -> None:
    for i in range((count + UNIT - 1) // UNIT):
        if kind == FP16:
            _narrow_fp16(codes + i * 2 * UNIT, row + i * 4 * UNIT)
        else:
            _narrow_bf16(codes + i * 2 * UNIT, row + i * 4 * UNIT)


@inlined
def _encode_part(body: int, entry: Any, kv: Any, paging: Any, shape: Any, dim: int, rows: int, streaming: bool) -> bool:
    base, step, begin = kv
    tokens, heads = entry[TOKENS], shape[1]
    part, kind = body + entry[OFFSET], entry[KIND]
    for lane in range(UNIT):
        store_u32(row_of(rows, shape[4], LARGEST) + 4 * lane, 0)
        store_u32(row_of(rows, shape[4], WORST) + 4 * lane, 0)
    exact = tokens if kind == RAW else entry[SINKS]
    copy_tokens(part, base, step, (exact, heads, dim, shape[2]), begin, paging, STORE, streaming and kind == RAW)
    source = (base, step, begin + exact, heads, dim)
    count = tokens - exact
    if entry[GRANULARITY] == CHANNEL:
        encode_channels(part, entry, source, paging, shape, rows, count)
    elif entry[GRANULARITY] == TENSOR:
        encode_tensor(part, entry, source, paging, shape, rows, count)
    else:
        many = tokens_of_row(heads * dim, shape[4])
        for t in range(0, count, many):
            some = min(many, count - t)
            look_at_tokens(source, paging, shape, rows, t, some, entry)
            if entry[GRANULARITY] == ROW:
                encode_rows(part, entry, t, some, heads, dim, rows, shape[4])
            else:
                codes = part + entry[CODES] + t * entry[ROW_NBYTES]
                _narrowed(kind, row_of(rows, shape[4], TOKEN), codes, some * heads * dim)
    limit = BEYOND_FP16 if kind == FP16 else BEYOND_BF16 if kind == BF16 else INFINITE
    if entry[ROTATION] > 1:
        limit = BEYOND_ROTATION
    if largest_bits(row_of(rows, shape[4], LARGEST)) >= limit:
        return False
    if largest_bits(row_of(rows, shape[4], WORST)) >= INFINITY:
        return False
    for padding in range(part + entry[END], part + entry[NBYTES]):
        store_u8(padding, 0)
    return True


@inlined
def _encode_layer(
    body: int, table: Any, layer: int, kv: Any, paging: Any, token: int, shape: Any, rows: int, streaming: bool
) -> bool:
    addresses, strides = kv
    for part in range(addresses.size):
        by = strides[part]
        source = (addresses[part], (by[0], by[1], by[2], by[3]), token)
        if not _encode_part(
            body,
            entry_of(table, layer, part),
            source,
            paging,
            shape,
            shape[5] if part == 0 else shape[6],
            rows,
            streaming,
        ):
            return False
    return True


@compiled(types.void(*SIGNATURE, types.boolean, types.Array(types.boolean, 1, "C")))
def encode_blocks(call: Any, blocks: Any, view: Any, tables: Any, shape: Any, streaming: bool, stored: Any) -> None:
    """Encode layers into bodies; a block that cannot be encoded is left half done."""
    memory, rows, first, stop = call
    tokens, offsets, which = blocks
    addresses, strides, paging = view
    for i in range(tokens.size):
        table = tables[which[i]]
        stored[i] = True
        for layer in range(first, stop):
            kv = (addresses[layer], strides[layer])
            body = memory + offsets[i]
            if not _encode_layer(body, table, layer, kv, paging, tokens[i], shape, rows, streaming):
                stored[i] = False
                break
    if streaming:
        fence()
