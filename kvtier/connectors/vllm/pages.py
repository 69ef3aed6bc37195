"""An engine's paged pools, as KV that the cache reads and writes in place.

    a pool, logically   [pages, kv_heads, page_tokens, C]     C: K and V of a head, one behind the other; or a latent
    in memory           in any order: heads before tokens (HND), after them (NHD), other layers between the pages
    as KV               K and V [pages, page_tokens, kv_heads, dim], by strides; nothing is moved

Some engines (vLLM on a CPU) regroup what is inside a page for their instruction set. Such a page is *opaque*: a run of
bytes, seen as K and V that lie one behind the other. So its bits come back, and mean something to an engine like the
one that wrote them; the plan must be raw, since any other would round what are no numbers of K and V.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from kvtier.codecs.view import KVView
from kvtier.errors import KVMismatch
from kvtier.spec import KVSpec

if TYPE_CHECKING:
    from kvtier.codecs.gpu import DeviceView

_BITS = {2: torch.int16, 4: torch.int32}
"""Pages are copied as integers, by the bytes of an element: no device then takes a NaN for another one."""


class Pages:
    """The pools of one engine, one tensor a layer.

    Args:
        pools: of each layer `[pages, kv_heads, page_tokens, head_dim + v_head_dim]` of any strides (MLA:
            `[pages, 1, page_tokens, head_dim]`), all on one device.
        spec: of the KV; its blocks are whole pages.
        opaque: whether pages are runs of bytes.

    Attributes:
        pools, spec, opaque: as they were given.
        count: pages of each pool.
        page_tokens: tokens in a page.
        parts: for each layer what `KVView.paged` and `DeviceView.paged` take.

    Raises:
        KVMismatch: pools of another shape or dtype than the spec says, or that cannot be seen so.
    """

    def __init__(self, pools: Sequence[Any], spec: KVSpec, *, opaque: bool) -> None:
        self.pools, self.spec, self.opaque = _checked(pools, spec), spec, opaque
        self.count, _, self.page_tokens, _ = self.pools[0].shape
        if spec.block_tokens % self.page_tokens:
            raise KVMismatch(
                f"a block of {spec.block_tokens} tokens is not whole pages of {self.page_tokens}; make block_tokens a "
                "multiple of the engine's page"
            )
        self.parts = [_run(pool, spec) if opaque else _canonical(pool, spec) for pool in self.pools]
        self._device = self.pools[0].device
        self._mine = threading.local()
        self._none = _paged(self.parts, spec, self._device)

    def view(self, pages: Sequence[int]) -> KVView | DeviceView:
        """A sequence whose pages these are, in their order; nothing is copied but their numbers.

        Raises:
            KVMismatch: there is no such page.
        """
        return self._none.at(pages)

    def scratch(self, count: int) -> Pages:
        """So many pages of the same layout in memory of their own; what is in them is undefined."""
        return Pages([_like(pool, count) for pool in self.pools], self.spec, opaque=self.opaque)

    def copy(self, source: Pages, theirs: Sequence[int], mine: Sequence[int], *, layers: range | None = None) -> None:
        """Copy pages from another of the same layout, each to its place; on a device that is queued.

        Args:
            source: from which.
            theirs: their numbers there.
            mine: their numbers here.
            layers: of these layers only; of all of them unless given.

        Raises:
            KVMismatch: another layout, or not one place a page.
        """
        shapes = {(tuple(pool.shape[1:]), pool.dtype) for one in (self, source) for pool in one.pools}
        if len(shapes) != 1 or len(source.pools) != len(self.pools) or source.opaque != self.opaque:
            raise KVMismatch("pages are copied between pools of one layout; take those that scratch() gives")
        if len(theirs) != len(mine):
            raise KVMismatch(f"{len(theirs)} pages do not go to {len(mine)} places; name one place a page")
        bits = _BITS[self.spec.itemsize]
        out_of, into = source._places(theirs), self._places(mine)
        wanted = slice(None) if layers is None else slice(layers.start, layers.stop)
        for pool, other in zip(self.pools[wanted], source.pools[wanted], strict=True):
            pool.view(bits)[into] = other.view(bits)[out_of].to(pool.device)

    def fence(self) -> Callable[[], None]:
        """Mark what is queued on the current stream now; calling what this gives waits until that is done."""
        if self._device.type != "cuda":
            return _nothing
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event.synchronize

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Work on a stream of this thread's own meanwhile, and wait for it at the end; in CPU memory there is none."""
        if self._device.type != "cuda":
            yield
            return
        stream = getattr(self._mine, "stream", None)
        if stream is None:
            stream = self._mine.stream = torch.cuda.Stream(self._device)
        with torch.cuda.device(self._device), torch.cuda.stream(stream):
            try:
                yield
            finally:
                stream.synchronize()

    def _places(self, pages: Sequence[int]) -> torch.Tensor:
        """Numbers of pages where the pools are, without waiting for what is queued there."""
        numbers = torch.tensor(list(pages), dtype=torch.int64)
        outside = [page for page in pages if not 0 <= page < self.count]
        if outside:
            raise KVMismatch(f"page {outside[0]} is not one of the pool's {self.count}")
        if self._device.type != "cuda":
            return numbers
        return numbers.pin_memory().to(self._device, non_blocking=True)


def _checked(pools: Sequence[Any], spec: KVSpec) -> list[torch.Tensor]:
    width = sum(spec.head_dims)
    wants = f"[pages, {spec.kv_heads}, page_tokens, {width}] of {spec.dtype}"
    if len(pools) != spec.layers:
        raise KVMismatch(f"there are {len(pools)} pools; the spec has {spec.layers} layers: pass one pool a layer")
    for pool in pools:
        shape, dtype = list(pool.shape), str(pool.dtype).removeprefix("torch.")
        if len(shape) != 4 or (shape[1], shape[3]) != (spec.kv_heads, width) or not shape[0] or not shape[2]:
            raise KVMismatch(f"a pool has the shape {shape}; the spec says {wants}")
        if dtype != spec.dtype:
            raise KVMismatch(
                f"a pool is {dtype}; the spec says {wants}: let the engine keep KV in the model's own dtype"
            )
    return [pool.detach() for pool in pools]


def _canonical(pool: torch.Tensor, spec: KVSpec) -> Any:
    """K and V as views of the pool."""
    by_token = pool.transpose(1, 2)
    return by_token if spec.mla else by_token.split(list(spec.head_dims), dim=3)


def _run(pool: torch.Tensor, spec: KVSpec) -> Any:
    """K and V of the size that they have, over pages of which only the bytes are known."""
    count, heads, tokens, width = pool.shape
    within = sorted((1, 2, 3), key=lambda axis: (pool.stride(axis), pool.shape[axis]))
    elements = 1
    for axis in within:
        if pool.shape[axis] > 1 and pool.stride(axis) != elements:
            raise KVMismatch(
                f"pages of the shape {list(pool.shape[1:])} and the strides {list(pool.stride()[1:])} are no runs of "
                "bytes; let the engine keep each page of a layer in one piece (LBHNC)"
            )
        elements *= pool.shape[axis]
    flat = pool.as_strided((count, heads * tokens * width), (pool.stride(0), 1))
    parts = flat.split([tokens * heads * dim for dim in spec.head_dims], dim=1)
    seen = [part.unflatten(1, (tokens, heads, dim)) for part, dim in zip(parts, spec.head_dims, strict=True)]
    return seen[0] if spec.mla else seen


def _paged(parts: Sequence[Any], spec: KVSpec, device: torch.device) -> KVView | DeviceView:
    """No page of these pools: what other views are made from."""
    if device.type == "cpu":
        return KVView.paged(parts, [], spec)
    try:
        from kvtier.codecs.gpu import DeviceView
    except ImportError as exc:
        raise KVMismatch(
            f"the pools are on {device}, and the codec there needs triton ({exc}): pip install 'kvtier[gpu]'"
        ) from exc
    return DeviceView.paged(parts, [], spec)


def _like(pool: torch.Tensor, count: int) -> torch.Tensor:
    """A pool of so many pages whose axes lie in the same order."""
    shape = (count, *pool.shape[1:])
    order = sorted(range(4), key=pool.stride, reverse=True)
    room = torch.empty([shape[axis] for axis in order], dtype=pool.dtype, device=pool.device)
    return room.permute([order.index(axis) for axis in range(4)])


def _nothing() -> None:
    pass
