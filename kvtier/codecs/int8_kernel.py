"""The kernels of `int8`: one fused loop each way over blocks, layers and rows."""

# ruff: noqa: FBT001, PLR0917 (numba passes a kernel's arguments by position)

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types

from kvtier.codecs import lanes
from kvtier.codecs.batch import SIGNATURE
from kvtier.codecs.intrinsics import LINE, bits_of_float, fence, float_of_bits, load_u16, store_u8, store_u16
from kvtier.codecs.jit import compiled, part_of_kernel
from kvtier.codecs.lanes import LANES

DTYPES = {"bfloat16": 0, "float16": 1, "float32": 2}
"""Numbers of the dtypes, for the kernels."""

BFLOAT16, FLOAT16 = 0, 1
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


@part_of_kernel
def _scale_of(largest: Any) -> int:
    """Round largest / 127 up to a float16 (its bits), at least the smallest one; infinity if there is none."""
    scale = largest / np.float32(127.0)
    if scale < np.float32(2.0**-14):
        steps = scale * np.float32(2.0**24)
        half = int(steps)
        return max(half + 1 if np.float32(half) < steps else half, 1)
    return min(((bits_of_float(scale) + 0x1FFF) >> 13) - (112 << 10), HALF_INFINITY)


def _decoder(dtype: str, itemsize: int) -> Any:
    plain, single = lanes.dequantise(dtype, LANES), lanes.dequantise(dtype, 1)
    stream = lanes.dequantise(dtype, LANES, streaming=True)

    @part_of_kernel
    def decode_row(at: int, codes: int, dim: int, step: int, scale: Any, streaming: bool) -> None:
        wide = dim - dim % LANES if step == itemsize else 0
        if streaming:
            for d in range(0, wide, LANES):
                stream(at + d * itemsize, codes + d, scale)
        else:
            for d in range(0, wide, LANES):
                plain(at + d * itemsize, codes + d, scale)
        for d in range(wide, dim):
            single(at + d * step, codes + d, scale)

    return decode_row


def _encoder(dtype: str, itemsize: int) -> Any:
    plain, single = lanes.quantise(dtype, LANES), lanes.quantise(dtype, 1)
    largest_of, larger_of = lanes.magnitude(dtype, LANES), lanes.magnitude(dtype, 1)

    @part_of_kernel
    def largest(at: int, dim: int, step: int) -> int:
        wide = dim - dim % LANES if step == itemsize else 0
        found = largest_of(at, wide // LANES)
        for d in range(wide, dim):
            found = max(found, larger_of(at + d * step, 1))
        return found

    @part_of_kernel
    def encode_row(codes: int, at: int, dim: int, step: int, inverse: Any) -> None:
        wide = dim - dim % LANES if step == itemsize else 0
        for d in range(0, wide, LANES):
            plain(codes + d, at + d * itemsize, inverse)
        for d in range(wide, dim):
            single(codes + d, at + d * step, inverse)

    return largest, encode_row


_decode_bf16, _decode_fp16, _decode_fp32 = (_decoder(d, s) for d, s in zip(DTYPES, (2, 2, 4), strict=True))
(_largest_bf16, _encode_bf16), (_largest_fp16, _encode_fp16), (_largest_fp32, _encode_fp32) = (
    _encoder(d, s) for d, s in zip(DTYPES, (2, 2, 4), strict=True)
)


@part_of_kernel
def _decode_row(at: int, codes: int, dim: int, step: int, scale: Any, dtype: int, streaming: bool) -> None:
    if dtype == BFLOAT16:
        _decode_bf16(at, codes, dim, step, scale, streaming)
    elif dtype == FLOAT16:
        _decode_fp16(at, codes, dim, step, scale, streaming)
    else:
        _decode_fp32(at, codes, dim, step, scale, streaming)


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
    block_tokens, heads = shape[1], shape[2]
    for i in range(offsets.size):
        for layer in range(first, stop):
            codes = memory + offsets[i] + layer * shape[0]
            for part in range(addresses.shape[1]):
                dim = shape[4 + part]
                by_token, by_head, by_element = strides[layer, part]
                at = addresses[layer, part] + tokens[i] * by_token
                scales = codes + block_tokens * heads * dim
                stream = streaming and dim % LANES == 0 and (at | by_token | by_head) % LINE == 0
                for row in range(block_tokens * heads):
                    t = row // heads
                    where = at + t * by_token + (row - t * heads) * by_head
                    scale = _half_to_float(load_u16(scales + 2 * row))
                    _decode_row(where, codes + row * dim, dim, by_element, scale, dtype, stream)
                codes = scales + 2 * block_tokens * heads
    if streaming:
        fence()


@part_of_kernel
def _encode_row(codes: int, at: int, dim: int, step: int, dtype: int) -> int:
    """Encode one row; return its scale, or infinity for a row that cannot be encoded."""
    if dtype == BFLOAT16:
        found = _largest_bf16(at, dim, step)
        largest = float_of_bits(found << 16)
    elif dtype == FLOAT16:
        found = _largest_fp16(at, dim, step)
        largest = _half_to_float(found)
    else:
        found = _largest_fp32(at, dim, step)
        largest = float_of_bits(found)
    half, inverse = 0, np.float32(0.0)
    if found:
        half = _scale_of(largest)
        if dtype == FLOAT16:
            half = min(half, LARGEST_FP16_SCALE) if found < HALF_INFINITY else HALF_INFINITY
        if half >= HALF_INFINITY:
            return HALF_INFINITY
        inverse = np.float32(1.0) / _half_to_float(half)
    if dtype == BFLOAT16:
        _encode_bf16(codes, at, dim, step, inverse)
    elif dtype == FLOAT16:
        _encode_fp16(codes, at, dim, step, inverse)
    else:
        _encode_fp32(codes, at, dim, step, inverse)
    return half


@part_of_kernel
def _encode_layer(body: int, addresses: Any, strides: Any, token: int, shape: Any, dtype: int) -> bool:
    block_tokens, heads = shape[1], shape[2]
    codes = body
    for part in range(addresses.shape[0]):
        dim = shape[4 + part]
        by_token, by_head, by_element = strides[part]
        at = addresses[part] + token * by_token
        scales = codes + block_tokens * heads * dim
        for row in range(block_tokens * heads):
            t = row // heads
            where = at + t * by_token + (row - t * heads) * by_head
            half = _encode_row(codes + row * dim, where, dim, by_element, dtype)
            if half == HALF_INFINITY:
                return False
            store_u16(scales + 2 * row, half)
        codes = scales + 2 * block_tokens * heads
    for padding in range(codes, body + shape[0]):
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
