"""One call's blocks, checked: what every kernel is given."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types
from numpy.typing import NDArray

from kvtier.codecs.view import KVView
from kvtier.errors import KVMismatch, UsageError
from kvtier.spec import KVSpec

STREAMING_NBYTES = 4 << 20
"""Calls that write this much write past the cache: they would only push everything else out of it."""


def _ints(ndim: int) -> Any:
    return types.Array(types.int64, ndim, "C", readonly=True)


SIGNATURE = (types.int64, _ints(1), _ints(2), _ints(3), _ints(1), _ints(1), types.int64, types.int64)
"""What `arguments` returns, as numba types."""


def arguments(
    spec: KVSpec,
    layer_nbytes: int,
    kv: KVView,
    tokens: NDArray[np.int64],
    memory: NDArray[np.uint8],
    offsets: NDArray[np.int64],
    *,
    layers: range,
) -> tuple[Any, ...]:
    """Check that every byte that the kernel will touch is inside `memory` and `kv`.

    Returns:
        The kernel's arguments: address of `memory`, offsets, the view's addresses and strides, tokens, then
        `[layer_nbytes, block_tokens, kv_heads, itemsize, head_dim of each part...]`, first layer and the one after the
        last.

    Raises:
        KVMismatch: the view is of another spec.
        UsageError: a block outside `memory` or outside the view, or layers that the spec has not.
    """
    if kv.spec is not spec and kv.spec != spec:
        raise KVMismatch(f"the view was made for {kv.spec}; the codec was called for {spec}")
    if memory.dtype != np.uint8 or memory.ndim != 1 or not memory.flags.c_contiguous:
        raise UsageError("memory must be a contiguous array of uint8 with one dimension")
    if layers.step != 1 or not 0 <= layers.start <= layers.stop <= spec.layers:
        raise UsageError(f"the layers {layers} are not a range within the {spec.layers} layers of the spec")
    tokens = np.ascontiguousarray(tokens, np.int64)
    offsets = np.ascontiguousarray(offsets, np.int64)
    if tokens.ndim != 1 or tokens.shape != offsets.shape:
        raise UsageError(f"{tokens.shape} tokens and {offsets.shape} offsets: each block has one of each")
    if tokens.size:
        _within("token", tokens, spec.block_tokens, kv.tokens, "kv")
        _within("offset", offsets, layer_nbytes * spec.layers, memory.size, "memory")
    shape = np.array([layer_nbytes, spec.block_tokens, spec.kv_heads, spec.itemsize, *spec.head_dims], np.int64)
    address = memory.__array_interface__["data"][0]
    return address, offsets, kv.addresses, kv.strides, tokens, shape, layers.start, layers.stop


def _within(what: str, starts: NDArray[np.int64], length: int, end: int, where: str) -> None:
    low, high = int(starts.min()), int(starts.max())
    if low < 0 or high > end - length:
        raise UsageError(
            f"a block of {length} at {what} {low if low < 0 else high} is outside of {where}, which has {end}"
        )
