"""A caller's KV as addresses and strides, whatever holds it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtier.errors import KVMismatch
from kvtier.spec import KVSpec


@dataclass(frozen=True, slots=True)
class KVView:
    """Where the KV of a sequence lies in CPU memory.

    Attributes:
        addresses: int64 `[layers, parts]`, address of token 0, head 0, element 0; parts are (K, V), or (latent,).
        strides: int64 `[layers, parts, 4]`, bytes from one token, head, element and page to the next.
        tokens: how many tokens there are.
        spec: what the KV is of.
        writable: whether blocks may be decoded into it.
        owner: views of the memory, which keep it alive whatever the caller does with his.
        pages: int64, for each page of the sequence which of the engine's pages it is; empty when it is not paged.
        page_tokens: tokens in a page; 0 when it is not paged.
    """

    addresses: NDArray[np.int64]
    strides: NDArray[np.int64]
    tokens: int
    spec: KVSpec
    writable: bool
    owner: Any
    pages: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    page_tokens: int = 0

    @classmethod
    def of(cls, kv: Any, spec: KVSpec) -> KVView:
        """Look at torch tensors or numpy arrays.

        Args:
            kv: one tensor `[layers, 2, tokens, kv_heads, head_dim]` (MLA: `[layers, tokens, head_dim]`), or a sequence
                with one entry a layer: a pair (k, v) of tensors `[tokens, kv_heads, dim]` of any strides (MLA: one
                tensor `[tokens, head_dim]`). Or a view, which is returned as it is.
            spec: what it must be.

        Raises:
            KVMismatch: another shape, dtype or device than the spec says.
        """
        if isinstance(kv, cls):
            if kv.spec != spec:
                raise KVMismatch(f"the view was made for {kv.spec}; here is {spec}")
            return kv
        try:
            return cls._of(kv, spec)
        except (AttributeError, TypeError) as exc:
            wants = "[tokens, head_dim] tensor" if spec.mla else "(k, v) pair of [tokens, kv_heads, head_dim] tensors"
            raise KVMismatch(
                f"kv is no KV ({type(kv).__name__}): pass one tensor of all layers, or one {wants} a layer"
            ) from exc

    @classmethod
    def _of(cls, kv: Any, spec: KVSpec) -> KVView:
        if hasattr(kv, "shape"):
            return _of_one(kv, spec)
        parts = [[_own(part) for part in _parts(layer, spec, i)] for i, layer in enumerate(_layers(kv, spec))]
        tokens = {part.shape[0] for layer in parts for part in layer}
        if len(tokens) != 1:
            raise KVMismatch(f"the layers have {sorted(tokens)} tokens; all must have the same number")
        described = [[_describe(part, spec) for part in layer] for layer in parts]
        return cls(
            np.array([[d[0] for d in layer] for layer in described], np.int64),
            np.array([[[*d[1], 0] for d in layer] for layer in described], np.int64),
            tokens.pop(),
            spec,
            all(d[2] for layer in described for d in layer),
            parts,
        )

    @classmethod
    def paged(cls, pools: Sequence[Any], pages: Any, spec: KVSpec, *, tokens: int | None = None) -> KVView:
        """Look at a sequence in an engine's paged pool.

        Args:
            pools: for each layer a pair (k, v) of tensors `[pages, page_tokens, kv_heads, dim]` of any strides, or what
                has K and V in one: `kv[0], kv[1]`, or `kv[:, 0], kv[:, 1]` (MLA: one `[pages, page_tokens, head_dim]`
                a layer).
            pages: for each page of the sequence, in order, which of the pool's it is: the block table.
            spec: what it must be.
            tokens: tokens of the sequence; as many as the pages hold unless given.

        Raises:
            KVMismatch: another shape, dtype or device than the spec says, or a page that the pool has not.
        """
        try:
            return cls._paged(pools, pages, spec, tokens)
        except (AttributeError, TypeError, ValueError) as exc:
            raise KVMismatch(
                f"these are no pools, or no pages ({exc}): pass for each layer a pair of tensors [pages, page_tokens, "
                "kv_heads, dim], and the sequence's row of the block table"
            ) from exc

    @classmethod
    def _paged(cls, pools: Sequence[Any], pages: Any, spec: KVSpec, tokens: int | None) -> KVView:
        flat = [tuple(_first_page(part) for part in ((pool,) if spec.mla else pool)) for pool in pools]
        view = cls.of([layer[0] if spec.mla else layer for layer in flat], spec)
        whole = [[_own(part) for part in ((pool,) if spec.mla else pool)] for pool in pools]
        sizes = {tuple(part.shape[:2]) for layer in whole for part in layer}
        if len(sizes) != 1:
            raise KVMismatch(f"the layers' pools have {sorted(sizes)} pages and tokens in one; all must have the same")
        (count, page_tokens) = sizes.pop()
        strides = view.strides.copy()
        strides[:, :, 3] = [[_stride(part) for part in layer] for layer in whole]
        writable = view.writable and (count == 1 or bool(strides[:, :, 3].all()))
        pool = replace(view, strides=strides, tokens=0, writable=writable, owner=whole, page_tokens=page_tokens)
        return pool.at(pages, tokens=tokens)

    def at(self, pages: Any, *, tokens: int | None = None) -> KVView:
        """Look at another sequence in the same pools, without looking at these again; arguments as for `paged`.

        Raises:
            KVMismatch: a page that the pool has not, or too few of them; or this is no view of a pool.
        """
        if not self.page_tokens:
            raise KVMismatch("this view is not of a paged pool; make one with KVView.paged")
        table = table_of(pages)
        held = held_by(table, self.owner[0][0].shape[0], self.page_tokens, tokens)
        # A page that stands twice in the table, as one does that fills up its row, cannot hold both of its parts.
        alone = len(set(table.tolist())) == len(table)
        return replace(self, tokens=held, writable=self.writable and alone, pages=table)

    @property
    def dtype(self) -> str:
        """Dtype of the elements, by name."""
        return self.spec.dtype

    def require_writable(self) -> None:
        """Raise `KVMismatch` unless blocks may be decoded into it."""
        if not self.writable:
            raise KVMismatch(
                "kv is read-only, or elements or pages of it share memory; pass what can be written to, each place once"
            )


def table_of(pages: Any) -> NDArray[np.int64]:
    """A copy of these numbers of pages: engines change their tables in place, and nobody looks at them again.

    Raises:
        KVMismatch: they are no integers.
    """
    given = np.asarray(pages)
    if given.size and given.dtype.kind not in "iu":
        raise KVMismatch(f"the pages are {given.dtype}; pass integers, the sequence's row of the block table")
    return np.ascontiguousarray(given, np.int64).copy()


def held_by(pages: NDArray[np.int64], count: int, page_tokens: int, tokens: int | None) -> int:
    """How many tokens a sequence has whose pages these are: `tokens`, or as many as they hold.

    Raises:
        KVMismatch: they do not hold so many, or one of them is not one of the pool's `count`.
    """
    if pages.ndim != 1:
        raise KVMismatch(f"pages has the shape {list(pages.shape)}; pass one row of the block table")
    held = len(pages) * page_tokens if tokens is None else tokens
    if not 0 <= held <= len(pages) * page_tokens:
        raise KVMismatch(f"{len(pages)} pages of {page_tokens} tokens do not hold {held} tokens")
    outside = pages[(pages < 0) | (pages >= count)]
    if outside.size:
        raise KVMismatch(f"page {int(outside[0])} is not one of the pool's {count}")
    return held


def _own(part: Any) -> Any:
    """Another view of the same memory: it stays when the caller's list, or tensor, is given other contents."""
    return part.detach() if hasattr(part, "detach") else part[...]


def _first_page(pool: Any) -> Any:
    """The first page of a pool, which says all but where the others are."""
    if len(pool.shape) < 3 or not pool.shape[0]:
        raise KVMismatch(f"a pool has the shape {list(pool.shape)}; pass [pages, page_tokens, kv_heads, dim]")
    return pool[0]


def _stride(pool: Any) -> int:
    """Bytes from one page to the next."""
    return int(pool.stride(0) * pool.element_size() if hasattr(pool, "data_ptr") else pool.strides[0])


def _of_one(kv: Any, spec: KVSpec) -> KVView:
    kv = _own(kv)
    wants = "[layers, tokens, head_dim]" if spec.mla else "[layers, 2, tokens, kv_heads, head_dim]"
    if not spec.mla and spec.head_dim != spec.v_head_dim:
        raise KVMismatch("K and V have different head dimensions: pass one (k, v) pair a layer")
    if len(kv.shape) != (3 if spec.mla else 5):
        raise KVMismatch(f"kv has the shape {list(kv.shape)}; pass {wants} or one entry a layer")
    kv_tensor = kv[:, None, :, None, :] if spec.mla else kv
    layers, parts, tokens, heads, dim = kv_tensor.shape
    if (layers, parts, heads, dim) != (spec.layers, len(spec.head_dims), spec.kv_heads, spec.head_dim):
        raise KVMismatch(f"kv has the shape {list(kv.shape)}; the spec says {wants} with {spec}")
    pointer, strides, writable = _describe(kv_tensor, spec)
    by_layer = np.arange(layers, dtype=np.int64)[:, None] * strides[0]
    addresses = pointer + by_layer + np.arange(parts, dtype=np.int64) * strides[1]
    steps = np.tile(np.array([*strides[2:], 0], np.int64), (layers, parts, 1))
    return KVView(addresses, steps, tokens, spec, writable, kv)


def _layers(kv: Any, spec: KVSpec) -> Sequence[Any]:
    if len(kv) != spec.layers:
        raise KVMismatch(f"kv has {len(kv)} layers; the spec has {spec.layers}")
    layers: Sequence[Any] = kv
    return layers


def _parts(layer: Any, spec: KVSpec, number: int) -> list[Any]:
    if spec.mla:
        parts = [layer[:, None, :] if len(layer.shape) == 2 else layer]
    else:
        if len(layer) != 2:
            raise KVMismatch(f"layer {number} has {len(layer)} parts; pass K and V")
        parts = list(layer)
    for part, dim in zip(parts, spec.head_dims, strict=True):
        if len(part.shape) != 3 or tuple(part.shape[1:]) != (spec.kv_heads, dim):
            raise KVMismatch(
                f"layer {number} has the shape {list(part.shape)}; the spec says [tokens, {spec.kv_heads}, {dim}]"
            )
    return parts


def _describe(part: Any, spec: KVSpec) -> tuple[int, list[int], bool]:
    if hasattr(part, "data_ptr"):
        if part.device.type != "cpu":
            raise KVMismatch(f"kv is on {part.device}; pass a tensor in CPU memory")
        if str(part.layout) != "torch.strided" or part.is_neg() or part.is_conj():
            raise KVMismatch("kv's memory is not its values: call resolve_conj().resolve_neg(), or to_dense(), on it")
        dtype, size, pointer = str(part.dtype).removeprefix("torch."), part.element_size(), part.data_ptr()
        strides = [s * size for s in part.stride()]
        writable = True
    else:
        dtype, size, pointer = str(part.dtype), part.dtype.itemsize, part.__array_interface__["data"][0]
        strides, writable = list(part.strides), part.flags.writeable
    same = dtype == spec.dtype or (dtype == "uint16" and spec.itemsize == 2)
    if not same:
        raise KVMismatch(f"kv is {dtype}; the spec says {spec.dtype}")
    return pointer, strides, writable and not _overlaps(strides, part.shape, size)


def _overlaps(strides: list[int], shape: Sequence[int], size: int) -> bool:
    """Whether elements share memory: then they cannot all be loaded."""
    if 0 in shape:
        return False
    span = size
    for stride, length in sorted((abs(stride), length) for stride, length in zip(strides, shape, strict=True)):
        if length > 1:
            if stride < span:
                return True
            span += stride * (length - 1)
    return False
