"""The kernels of `int8`: one fused loop each way over blocks, layers and rows."""

# ruff: noqa: FBT001, PLR0917 (numba passes a kernel's arguments by position)

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types

from kvtier.codecs import lanes
from kvtier.codecs.batch import SIGNATURE
from kvtier.codecs.intrinsics import (
    LINE,
    SCRATCH,
    bits_of_float,
    fence,
    float_of_bits,
    load_u16,
    prefetch,
    scratch,
    store_u8,
    store_u16,
)
from kvtier.codecs.jit import compiled, part_of_kernel
from kvtier.codecs.lanes import NARROW, WIDE
from kvtier.codecs.raw_kernel import copy_run

DTYPES = {"bfloat16": 0, "float16": 1, "float32": 2}
"""Numbers of the dtypes, for the kernels."""

BFLOAT16, FLOAT16 = 0, 1
AHEAD = 1024
"""Bytes that are prefetched before they are read: computing must not wait for the memory."""
HALF_INFINITY = 0x7C00
LARGEST_FP16_SCALE = 0x6007
"""515.5, the largest scale whose 127-fold is still a float16."""


@part_of_kernel
def _half_to_float(half: int) -> Any:
    magnitude = half & 0x7FFF
    if magnitude >= HALF_INFINITY:
        return np.float32(np.nan)
    if magnitude < 0x0400:
        value = np.float32(magnitude) * np.float32(2.0**-24)
    else:
        value = float_of_bits((magnitude << 13) + (112 << 23))
    return -value if half & 0x8000 else value


def _scale(dtype: str) -> Any:
    widen, infinity = lanes.widen(dtype), lanes.INFINITY[dtype]
    last = LARGEST_FP16_SCALE if dtype == "float16" else HALF_INFINITY

    @part_of_kernel
    def scale_of(largest: int) -> int:
        """Round largest / 127 up to a float16 (its bits), at least the smallest one; infinity if there is none."""
        if largest == 0:
            return 0
        if largest >= infinity:
            return HALF_INFINITY
        scale = widen(largest) / np.float32(127.0)
        if scale < np.float32(2.0**-14):
            steps = scale * np.float32(2.0**24)
            half = int(steps)
            return max(half + 1 if np.float32(half) < steps else half, 1)
        return min(((bits_of_float(scale) + 0x1FFF) >> 13) - (112 << 10), last)

    return scale_of


@part_of_kernel
def _steps(dim: int, dense: bool) -> tuple[int, int]:
    """How many wide and narrow steps a row takes; the rest goes element by element."""
    if not dense:
        return 0, 0
    return dim // WIDE, dim % WIDE // NARROW


def _decoder(dtype: str, itemsize: int) -> Any:
    wide, narrow, single = (lanes.dequantise(dtype, n) for n in (WIDE, NARROW, 1))

    @part_of_kernel
    def decode_part(at: int, codes: int, step: Any, extent: Any, streaming: bool) -> None:
        tokens, heads, dim = extent
        by_token, by_head, by_element = step
        scales = codes + tokens * heads * dim
        wides, narrows = _steps(dim, by_element == itemsize)
        first_single = wides * WIDE + narrows * NARROW
        row_nbytes = dim * itemsize
        run = min(heads, SCRATCH // row_nbytes) if by_head == row_nbytes else 1
        streaming = streaming and row_nbytes <= SCRATCH and by_element == itemsize
        for t in range(tokens):
            for h in range(0, heads, run):
                place = at + t * by_token + h * by_head
                rows = min(run, heads - h)
                target = scratch() if streaming else place
                for r in range(rows):
                    row = target + r * row_nbytes
                    for i in range(0, dim, LINE):
                        prefetch(codes + AHEAD + i)
                    scale = _half_to_float(load_u16(scales))
                    for i in range(wides):
                        wide(row + i * (WIDE * itemsize), codes + i * WIDE, scale)
                    for d in range(wides * WIDE, first_single, NARROW):
                        narrow(row + d * itemsize, codes + d, scale)
                    for d in range(first_single, dim):
                        single(row + d * by_element, codes + d, scale)
                    codes += dim
                    scales += 2
                if streaming:
                    copy_run(place, target, rows * row_nbytes, streaming)

    return decode_part


def _largest(dtype: str, itemsize: int) -> Any:
    wide, narrow, single = (lanes.magnitude(dtype, n) for n in (WIDE, NARROW, 1))

    @part_of_kernel
    def largest(row: int, dim: int, by_element: int, wides: int, first_single: int) -> int:
        found = 0
        for i in range(wides):
            found = max(found, wide(row + i * (WIDE * itemsize)))
        for d in range(wides * WIDE, first_single, NARROW):
            found = max(found, narrow(row + d * itemsize))
        for d in range(first_single, dim):
            found = max(found, single(row + d * by_element))
        return found

    return largest


def _encoder(dtype: str, itemsize: int) -> Any:
    wide, narrow, single = (lanes.quantise(dtype, n) for n in (WIDE, NARROW, 1))
    largest, scale_of = _largest(dtype, itemsize), _scale(dtype)

    @part_of_kernel
    def encode_part(codes: int, at: int, step: Any, extent: Any) -> bool:
        tokens, heads, dim = extent
        by_token, by_head, by_element = step
        scales = codes + tokens * heads * dim
        wides, narrows = _steps(dim, by_element == itemsize)
        first_single = wides * WIDE + narrows * NARROW
        for t in range(tokens):
            for h in range(heads):
                row = at + t * by_token + h * by_head
                for i in range(0, dim * itemsize, LINE):
                    prefetch(row + AHEAD + i)
                half = scale_of(largest(row, dim, by_element, wides, first_single))
                if half == HALF_INFINITY:
                    return False
                inverse = np.float32(1.0) / _half_to_float(half) if half else np.float32(0.0)
                for i in range(wides):
                    wide(codes + i * WIDE, row + i * (WIDE * itemsize), inverse)
                for d in range(wides * WIDE, first_single, NARROW):
                    narrow(codes + d, row + d * itemsize, inverse)
                for d in range(first_single, dim):
                    single(codes + d, row + d * by_element, inverse)
                store_u16(scales, half)
                codes += dim
                scales += 2
        return True

    return encode_part


_decode_bf16, _decode_fp16, _decode_fp32 = (_decoder(d, s) for d, s in zip(DTYPES, (2, 2, 4), strict=True))
_encode_bf16, _encode_fp16, _encode_fp32 = (_encoder(d, s) for d, s in zip(DTYPES, (2, 2, 4), strict=True))


@compiled(types.void(*SIGNATURE, types.int64, types.boolean))
def decode_blocks(
    memory: int,
    offsets: Any,
    addresses: Any,
    strides: Any,
    tokens: Any,
    shape: Any,
    first: int,
    stop: int,
    dtype: int,
    streaming: bool,
) -> None:
    """Decode layers of bodies into the caller's arrays; `streaming`: past the cache, where rows are aligned for it."""
    for i in range(offsets.size):
        for layer in range(first, stop):
            body = memory + offsets[i] + layer * shape[0]
            for part in range(addresses.shape[1]):
                step = (strides[layer, part, 0], strides[layer, part, 1], strides[layer, part, 2])
                extent = (shape[1], shape[2], shape[4 + part])
                at = addresses[layer, part] + tokens[i] * step[0]
                if dtype == BFLOAT16:
                    _decode_bf16(at, body, step, extent, streaming)
                elif dtype == FLOAT16:
                    _decode_fp16(at, body, step, extent, streaming)
                else:
                    _decode_fp32(at, body, step, extent, streaming)
                body += extent[0] * extent[1] * (extent[2] + 2)
    if streaming:
        fence()


@part_of_kernel
def _encode_layer(body: int, addresses: Any, strides: Any, token: int, shape: Any, dtype: int) -> bool:
    end = body + shape[0]
    for part in range(addresses.shape[0]):
        step = (strides[part, 0], strides[part, 1], strides[part, 2])
        extent = (shape[1], shape[2], shape[4 + part])
        at = addresses[part] + token * step[0]
        if dtype == BFLOAT16:
            finite = _encode_bf16(body, at, step, extent)
        elif dtype == FLOAT16:
            finite = _encode_fp16(body, at, step, extent)
        else:
            finite = _encode_fp32(body, at, step, extent)
        if not finite:
            return False
        body += extent[0] * extent[1] * (extent[2] + 2)
    for padding in range(body, end):
        store_u8(padding, 0)
    return True


@compiled(types.void(*SIGNATURE, types.int64, types.Array(types.boolean, 1, "C")))
def encode_blocks(
    memory: int,
    offsets: Any,
    addresses: Any,
    strides: Any,
    tokens: Any,
    shape: Any,
    first: int,
    stop: int,
    dtype: int,
    stored: Any,
) -> None:
    """Encode layers of the caller's arrays into bodies; a block that cannot be encoded is left half done."""
    for i in range(offsets.size):
        stored[i] = True
        for layer in range(first, stop):
            body = memory + offsets[i] + layer * shape[0]
            if not _encode_layer(body, addresses[layer], strides[layer], tokens[i], shape, dtype):
                stored[i] = False
                break
