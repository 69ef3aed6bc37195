"""One part (K or V) of one layer of one block, to int8 and back, row by row: inlined into the kernels of `int8`."""

# ruff: noqa: FBT001 (numba passes a kernel's arguments by position)

from __future__ import annotations

from typing import Any

import numpy as np

from kvtier.codecs import lanes
from kvtier.codecs.intrinsics import (
    LINE,
    SCRATCH,
    bits_of_float,
    float_of_bits,
    load_u16,
    prefetch,
    scratch,
    store_u16,
)
from kvtier.codecs.jit import part_of_kernel
from kvtier.codecs.lanes import NARROW, WIDE
from kvtier.codecs.raw_kernel import copy_run

ITEMSIZES = {"bfloat16": 2, "float16": 2, "float32": 4}
AHEAD = 3072
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


@part_of_kernel
def _prefetch(address: int, nbytes: int) -> None:
    for i in range(0, nbytes, LINE):
        prefetch(address + AHEAD + i)


def _line_decoder(dtype: str, itemsize: int) -> Any:
    stream = lanes.dequantise(dtype, WIDE, streaming=True)

    @part_of_kernel
    def decode_lines(at: int, codes: int, scales: int, step: Any, extent: Any) -> None:
        """Decode rows that are whole cache lines past the cache."""
        tokens, heads, dim = extent
        for t in range(tokens):
            for h in range(heads):
                row = at + t * step[0] + h * step[1]
                _prefetch(codes, dim)
                scale = _half_to_float(load_u16(scales))
                for i in range(dim // WIDE):
                    stream(row + i * (WIDE * itemsize), codes + i * WIDE, scale)
                codes += dim
                scales += 2

    return decode_lines


def _row_decoder(dtype: str, itemsize: int) -> Any:
    wide, narrow, single = (lanes.dequantise(dtype, n) for n in (WIDE, NARROW, 1))

    @part_of_kernel
    def decode_row(row: int, codes: int, scale: Any, dim: int, by_element: int) -> None:
        wides, narrows = _steps(dim, by_element == itemsize)
        first_single = wides * WIDE + narrows * NARROW
        for i in range(wides):
            wide(row + i * (WIDE * itemsize), codes + i * WIDE, scale)
        for d in range(wides * WIDE, first_single, NARROW):
            narrow(row + d * itemsize, codes + d, scale)
        for d in range(first_single, dim):
            single(row + d * by_element, codes + d, scale)

    return decode_row


def _decoder(dtype: str, itemsize: int) -> Any:
    decode_lines, decode_row = (
        _line_decoder(dtype, itemsize),
        _row_decoder(dtype, itemsize),
    )

    @part_of_kernel
    def decode_part(at: int, codes: int, step: Any, extent: Any, streaming: bool) -> None:
        """Decode rows; contiguous ones that are not whole lines stream by way of `scratch`, several at a time."""
        tokens, heads, dim = extent
        by_token, by_head, by_element = step
        scales, nbytes = codes + tokens * heads * dim, dim * itemsize
        streaming = streaming and by_element == itemsize
        if streaming and dim % WIDE == 0 and (at | by_token | by_head) % LINE == 0:
            decode_lines(at, codes, scales, step, extent)
            return
        streaming = streaming and nbytes <= SCRATCH
        run = max(1, min(heads, SCRATCH // nbytes)) if by_head == nbytes else 1
        for t in range(tokens):
            for h in range(0, heads, run):
                place = at + t * by_token + h * by_head
                target = scratch() if streaming else place
                rows = min(run, heads - h)
                for r in range(rows):
                    _prefetch(codes, dim)
                    scale = _half_to_float(load_u16(scales))
                    decode_row(target + r * nbytes, codes, scale, dim, by_element)
                    codes += dim
                    scales += 2
                if streaming:
                    copy_run(place, target, rows * nbytes, streaming)

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
                _prefetch(row, dim * itemsize)
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


decode_bf16, decode_fp16, decode_fp32 = (_decoder(*dtype) for dtype in ITEMSIZES.items())
encode_bf16, encode_fp16, encode_fp32 = (_encoder(*dtype) for dtype in ITEMSIZES.items())
