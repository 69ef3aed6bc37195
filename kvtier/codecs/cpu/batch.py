"""One call's blocks, checked: what every kernel is given."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
from numba import types
from numpy.typing import NDArray

from kvtier.codecs.layout import UNIT, Field, Layout
from kvtier.codecs.view import KVView
from kvtier.errors import KVMismatch, UsageError
from kvtier.spec import KVSpec

DTYPES = {"bfloat16": 0, "float16": 1, "float32": 2}
"""Numbers of the dtypes, for the kernels."""
STREAMING_NBYTES = 4 << 20
"""Calls that write this much write past the cache: they would only push everything else out of it."""


def ints(ndim: int) -> Any:
    """The numba type of int64 arrays."""
    return types.Array(types.int64, ndim, "C", readonly=True)


TABLES = ints(4)
"""`Tables.table`, as a numba type."""
SIGNATURE = (
    types.UniTuple(types.int64, 4),
    types.Tuple((ints(1), ints(1), ints(1))),
    types.Tuple((ints(2), ints(3), types.UniTuple(types.int64, 2))),
    TABLES,
    types.UniTuple(types.int64, 7),
)
"""What `arguments` returns, as numba types."""
ROW_ELEMENTS = 1024
"""A row holds as many tokens as come to this, or one: so that what is done once a row weighs little."""
ROWS = 12
"""Rows of float32 that a kernel works in."""


class Shape:
    """What kernels are told of a spec, worked out once.

    Attributes:
        spec: the spec.
        numbers: block_tokens, kv_heads, itemsize, number of the dtype, elements from one row to the next, head_dim of K
            and of V.
    """

    def __init__(self, spec: KVSpec) -> None:
        self.spec = spec
        self.length = max(ROW_ELEMENTS, -(-spec.kv_heads * max(spec.head_dims) // UNIT) * UNIT) + UNIT
        dtype = DTYPES[spec.dtype]
        heads = spec.head_dim, spec.v_head_dim
        self.numbers = (spec.block_tokens, spec.kv_heads, spec.itemsize, dtype, self.length, *heads)
        self._local = threading.local()

    def rows(self) -> int:
        """Address of this thread's rows of float32, in which kernels work."""
        rows = getattr(self._local, "rows", None)
        if rows is None:
            rows = self._local.rows = np.empty((ROWS, self.length), np.float32)
        return _address(rows)


class Tables:
    """The layouts that blocks may have, worked out once.

    Attributes:
        table: int64 `[layouts, layers, parts, FIELDS]`.
        nbytes: of a body, int64 `[layouts]`.
        tokens: of a body, int64 `[layouts]`.
        alike: all bodies have the same size and as many tokens.
    """

    def __init__(self, layouts: Sequence[Layout]) -> None:
        self.table = np.stack([layout.table for layout in layouts])
        self.nbytes = np.array([layout.nbytes for layout in layouts], np.int64)
        self.tokens = self.table[:, 0, 0, Field.TOKENS].copy()
        self.alike = bool((self.nbytes == self.nbytes[0]).all() and (self.tokens == self.tokens[0]).all())


def arguments(
    shape: Shape,
    tables: Tables,
    kv: KVView,
    blocks: tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]],
    memory: NDArray[np.uint8],
    layers: range,
) -> tuple[Any, ...]:
    """Check that every byte that the kernel will touch is inside `memory` and `kv`.

    Args:
        shape: of the blocks.
        tables: what lies where in their bodies.
        kv: what the caller has.
        blocks: tokens and offsets, see `Codec`, and which of the tables each is laid out by.
        memory: where the bodies are.
        layers: which layers.

    Returns:
        The kernel's arguments: (address of `memory`, its rows' address, first layer, the one after the last); (tokens,
        offsets, tables); (addresses, strides, (address of the page table, tokens in a page)) of the view; the tables;
        the shape's numbers.

    Raises:
        KVMismatch: the view is of another spec.
        UsageError: a block outside `memory` or outside the view, or layers that the spec has not.
    """
    spec = shape.spec
    if kv.spec is not spec and kv.spec != spec:
        raise KVMismatch(f"the view was made for {kv.spec}; the codec was called for {spec}")
    if memory.dtype != np.uint8 or memory.ndim != 1 or not memory.flags.c_contiguous:
        raise UsageError("memory must be a contiguous array of uint8 with one dimension")
    if layers.step != 1 or not 0 <= layers.start <= layers.stop <= spec.layers:
        raise UsageError(f"the layers {layers} are not a range within the {spec.layers} layers of the spec")
    tokens, offsets, which = (np.ascontiguousarray(each, np.int64) for each in blocks)
    if tokens.ndim != 1 or not tokens.shape == offsets.shape == which.shape:
        raise UsageError(
            f"{tokens.shape} tokens, {offsets.shape} offsets, {which.shape} positions: each block has one of each"
        )
    if tokens.size and tables.alike:
        _within("token", tokens, int(tables.tokens[0]), kv.tokens, "kv")
        _within("offset", offsets, int(tables.nbytes[0]), memory.size, "memory")
    elif tokens.size:
        _each_within("token", tokens, tables.tokens[which], kv.tokens, "kv")
        _each_within("offset", offsets, tables.nbytes[which], memory.size, "memory")
    return (
        (_address(memory), shape.rows(), layers.start, layers.stop),
        (tokens, offsets, which),
        (kv.addresses, kv.strides, (_address(kv.pages) if kv.page_tokens else 0, kv.page_tokens)),
        tables.table,
        shape.numbers,
    )


def _address(array: NDArray[Any]) -> int:
    return int(array.__array_interface__["data"][0])


def _within(what: str, starts: NDArray[np.int64], length: int, end: int, where: str) -> None:
    # Of a few numbers a list has the least and the greatest sooner.
    few = starts.tolist() if starts.size < 64 else (starts.min(), starts.max())
    low, high = min(few), max(few)
    if low < 0 or high > end - length:
        raise UsageError(
            f"a block of {length} at {what} {low if low < 0 else high} is outside of {where}, which has {end}"
        )


def _each_within(what: str, starts: NDArray[np.int64], lengths: NDArray[np.int64], end: int, where: str) -> None:
    if starts.min() < 0 or (starts > end - lengths).any():
        # Whichever it is: all of that length are looked at again.
        for length in np.unique(lengths).tolist():
            _within(what, starts[lengths == length], length, end, where)
