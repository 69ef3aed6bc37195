"""What the codecs mean, in plain numpy: slow, and written to be read. Tests hold every kernel to it, bit for bit.

16-bit elements are arrays of uint16 (their bits), float32 elements arrays of float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtier.spec import KVSpec

Parts = Sequence[NDArray[Any]]
"""K and V of one layer of one block, each `[block_tokens, kv_heads, dim]` (MLA: the latent alone)."""


def encode_raw(layers: Sequence[Parts]) -> bytes:
    """The bytes of all layers, K before V."""
    return b"".join(np.ascontiguousarray(part).tobytes() for layer in layers for part in layer)


def decode_raw(spec: KVSpec, body: bytes) -> list[list[NDArray[Any]]]:
    """The layers that `encode_raw` was given."""
    element = np.dtype(np.float32 if spec.dtype == "float32" else np.uint16)
    layers, at = [], 0
    for _ in range(spec.layers):
        layer = []
        for dim in spec.head_dims:
            count = spec.block_tokens * spec.kv_heads * dim
            part = np.frombuffer(body, element, count, at).reshape(spec.block_tokens, spec.kv_heads, dim)
            layer.append(part)
            at += part.nbytes
        layers.append(layer)
    return layers


def encode_int8(dtype: str, layers: Sequence[Parts]) -> bytes | None:
    """Codes and scales of all layers; None if some row has no scale."""
    body = b""
    for layer in layers:
        for part in layer:
            row = to_float32(dtype, part)
            scale = _scales(dtype, np.abs(row).max(axis=-1))
            if scale is None:
                return None
            with np.errstate(divide="ignore"):
                inverse = np.where(scale == 0, np.float32(0), np.float32(1) / scale.astype(np.float32))
            body += np.rint(row * inverse[..., None]).astype(np.int8).tobytes() + scale.tobytes()
        body += bytes(-len(body) % 64)
    return body


def decode_int8(spec: KVSpec, body: bytes) -> list[list[NDArray[Any]]]:
    """Codes times scales, rounded to the dtype."""
    layers, at, rows = [], 0, (spec.block_tokens, spec.kv_heads)
    count = spec.block_tokens * spec.kv_heads
    for _ in range(spec.layers):
        layer = []
        for dim in spec.head_dims:
            codes = np.frombuffer(body, np.int8, count * dim, at).reshape(*rows, dim)
            at += count * dim
            scales = np.frombuffer(body, np.float16, count, at).reshape(*rows, 1)
            at += count * 2
            layer.append(from_float32(spec.dtype, codes.astype(np.float32) * scales.astype(np.float32)))
        layers.append(layer)
        at += -at % 64
    return layers


def _scales(dtype: str, largest: NDArray[np.float32]) -> NDArray[np.float16] | None:
    if not np.isfinite(largest).all():
        return None
    exact = largest / np.float32(127)
    with np.errstate(over="ignore"):
        scale = exact.astype(np.float16)
        up = np.nextafter(scale, np.float16(np.inf))
    scale = np.where(scale.astype(np.float32) < exact, up, scale)
    scale = np.where(largest > 0, np.maximum(scale, np.float16(2.0**-24)), np.float16(0))
    if dtype == "float16":
        scale = np.minimum(scale, np.float16(515.5))
    return scale if np.isfinite(scale).all() else None


def to_float32(dtype: str, stored: NDArray[Any]) -> NDArray[np.float32]:
    """Widen elements; exact."""
    if dtype == "bfloat16":
        return (stored.astype(np.uint32) << 16).view(np.float32)
    if dtype == "float16":
        return np.ascontiguousarray(stored).view(np.float16).astype(np.float32)
    return stored.astype(np.float32)


def from_float32(dtype: str, values: NDArray[np.float32]) -> NDArray[Any]:
    """Round to nearest even; not for NaN."""
    if dtype == "bfloat16":
        bits = np.ascontiguousarray(values).view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    if dtype == "float16":
        with np.errstate(over="ignore"):
            return values.astype(np.float16).view(np.uint16)
    return values
