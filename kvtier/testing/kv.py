"""KV to test with: random values, contiguous or in shuffled pages, and comparing bits."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtier.codecs.view import KVView
from kvtier.spec import KVSpec

Layers = list[list[NDArray[Any]]]
"""For each layer its parts, each `[tokens, kv_heads, dim]`; 16-bit dtypes as their bits."""
PAGE_TOKENS = 16
LINE = 64
"""Bytes of a cache line."""


def random_kv(spec: KVSpec, tokens: int, seed: int = 0) -> Layers:
    """Normal values, the same for the same arguments."""
    return [[part.copy() for part in layer] for layer in _normal(spec, tokens, seed)]


@cache
def _normal(spec: KVSpec, tokens: int, seed: int) -> Layers:
    generator = np.random.default_rng(seed)
    return [
        [as_stored(spec, generator.standard_normal((tokens, spec.kv_heads, dim), np.float32)) for dim in spec.head_dims]
        for _ in range(spec.layers)
    ]


def as_stored(spec: KVSpec, values: NDArray[np.float32]) -> NDArray[Any]:
    """Values in the spec's dtype; bfloat16 is truncated, which is good enough to make test data."""
    if spec.dtype == "bfloat16":
        return (values.view(np.uint32) >> 16).astype(np.uint16)
    return values.astype(np.float16).view(np.uint16) if spec.dtype == "float16" else values


def ones_like(layers: Layers) -> Layers:
    """As many elements, all with the bits of 1: what a test sees when nothing was written."""
    return [[np.ones_like(part) for part in layer] for layer in layers]


def view_of(spec: KVSpec, layers: Layers) -> KVView:
    """A view of contiguous arrays."""
    return KVView.of([layer[0] if spec.mla else tuple(layer) for layer in layers], spec)


def same_bits(one: Layers, other: Layers) -> bool:
    """Whether all elements have the same bits, NaNs too."""
    return all(
        np.array_equal(np.ascontiguousarray(a).view(np.uint8), np.ascontiguousarray(b).view(np.uint8))
        for left, right in zip(one, other, strict=True)
        for a, b in zip(left, right, strict=True)
    )


def at_line(part: NDArray[Any], beyond: int = 0) -> NDArray[Any]:
    """A contiguous copy that begins at a cache line, or this many bytes beyond."""
    room = np.zeros(part.nbytes + 2 * LINE, np.uint8)
    start = -room.ctypes.data % LINE + beyond
    copy: NDArray[Any] = room[start : start + part.nbytes].view(part.dtype).reshape(part.shape)
    copy[:] = part
    return copy


def tokens_of(layers: Layers, first: int, count: int) -> Layers:
    """Some tokens of all layers, in place."""
    return [[part[first : first + count] for part in layer] for layer in layers]


class Pages:
    """The same KV in the shuffled pages of a pool that has more of them, and begins at a cache line.

    Attributes:
        table: which page of the pool each page of the sequence is.
        pools: for each layer its parts, each `[pages, PAGE_TOKENS, kv_heads, dim]`.
    """

    def __init__(self, spec: KVSpec, layers: Layers, seed: int = 0) -> None:
        self._spec, self._tokens = spec, len(layers[0][0])
        used = -(-self._tokens // PAGE_TOKENS)
        self.table = np.random.default_rng(seed).permutation(2 * used + 1)[:used]
        self.pools = [[self._pool(part, 2 * used + 1) for part in layer] for layer in layers]

    def _pool(self, part: NDArray[Any], pages: int) -> NDArray[Any]:
        pool = at_line(np.full((pages, PAGE_TOKENS, *part.shape[1:]), 2, part.dtype))
        for number, page in enumerate(self.table):
            tokens = part[number * PAGE_TOKENS : (number + 1) * PAGE_TOKENS]
            pool[page, : len(tokens)] = tokens
        return pool

    def view(self) -> KVView:
        """A view of the sequence."""
        pools = [layer[0][:, :, 0] if self._spec.mla else tuple(layer) for layer in self.pools]
        return KVView.paged(pools, self.table, self._spec, tokens=self._tokens)

    def contiguous(self) -> Layers:
        """What the sequence's tokens have now."""
        return [[pool[self.table].reshape(-1, *pool.shape[2:])[: self._tokens] for pool in y] for y in self.pools]

    def rest(self) -> Layers:
        """What all that is not of the sequence has now: pages of others, and behind the last token."""
        last = self._tokens - (len(self.table) - 1) * PAGE_TOKENS
        others = [page for page in range(len(self.pools[0][0])) if page not in self.table]
        return [[part for pool in y for part in (pool[others], pool[self.table[-1], last:])] for y in self.pools]
