"""The kernels of `int8`: one fused loop each way over blocks, layers and parts."""

# ruff: noqa: FBT001, PLR0917 (numba passes a kernel's arguments by position)

from __future__ import annotations

from typing import Any

from numba import types

from kvtier.codecs.batch import SIGNATURE
from kvtier.codecs.int8_rows import (
    decode_bf16,
    decode_fp16,
    decode_fp32,
    encode_bf16,
    encode_fp16,
    encode_fp32,
)
from kvtier.codecs.intrinsics import fence, store_u8
from kvtier.codecs.jit import compiled, part_of_kernel

DTYPES = {"bfloat16": 0, "float16": 1, "float32": 2}
"""Numbers of the dtypes, for the kernels."""

BFLOAT16, FLOAT16 = 0, 1


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
                    decode_bf16(at, body, step, extent, streaming)
                elif dtype == FLOAT16:
                    decode_fp16(at, body, step, extent, streaming)
                else:
                    decode_fp32(at, body, step, extent, streaming)
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
            finite = encode_bf16(body, at, step, extent)
        elif dtype == FLOAT16:
            finite = encode_fp16(body, at, step, extent)
        else:
            finite = encode_fp32(body, at, step, extent)
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
