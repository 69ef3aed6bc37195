"""A caller's KV on a device, as a table of addresses and strides that kernels read there."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

from kvtier.codecs.gpu.traits import Seen
from kvtier.codecs.view import held_by, table_of
from kvtier.errors import KVMismatch
from kvtier.spec import KVSpec

INTERPRETED = bool(triton.knobs.runtime.interpret)
"""Whether kernels run in Triton's interpreter, on tensors in CPU memory."""
_TYPES = {"bfloat16": (tl.bfloat16, tl.int16), "float16": (tl.float16, tl.int16), "float32": (tl.float32, tl.int32)}


@dataclass(frozen=True, slots=True)
class DeviceView:
    """Where the KV of a sequence lies on a device: what `KVView` is for CPU memory.

    Attributes:
        table: int64 `[layers, parts, 5]` on the device: the address of page 0, token 0, head 0, element 0, and the
            elements from one token, head, element and page to the next.
        pages: int64, on the device: for each page of the sequence which of the engine's pages it is.
        seen: what kernels are compiled for.
        tokens: how many tokens there are.
        spec: what the KV is of.
        device: where it is.
        writable: whether blocks may be decoded into it.
        owner: the tensors, which keep the memory.
    """

    table: torch.Tensor
    pages: torch.Tensor
    seen: Seen
    tokens: int
    spec: KVSpec
    device: torch.device
    writable: bool
    owner: Any

    @classmethod
    def of(cls, kv: Any, spec: KVSpec) -> DeviceView:
        """Look at torch tensors; the same as `KVView.of`.

        Args:
            kv: one tensor `[layers, 2, tokens, kv_heads, head_dim]` (MLA: `[layers, tokens, head_dim]`), or a sequence
                with one entry a layer: a pair (k, v) of tensors `[tokens, kv_heads, dim]` of any strides (MLA: one
                tensor `[tokens, head_dim]`). Or a view, which is returned as it is.
            spec: what it must be.

        Raises:
            KVMismatch: another shape or dtype than the spec says, or tensors on several devices.
        """
        if isinstance(kv, cls):
            if kv.spec != spec:
                raise KVMismatch(f"the view was made for {kv.spec}; here is {spec}")
            return kv
        parts = [[part[None] for part in _parts(layer, spec, 3)] for layer in _layers(kv, spec)]
        return cls._of(parts, spec, paged=False)

    @classmethod
    def paged(cls, pools: Sequence[Any], pages: Any, spec: KVSpec, *, tokens: int | None = None) -> DeviceView:
        """Look at a sequence in an engine's paged pool; the same as `KVView.paged`.

        Args:
            pools: for each layer a pair (k, v) of tensors `[pages, page_tokens, kv_heads, dim]` of any strides, or what
                has K and V in one: vLLM's `kv[0], kv[1]`, or `kv[:, 0], kv[:, 1]` (MLA: one
                `[pages, page_tokens, head_dim]` a layer).
            pages: for each page of the sequence, in order, which of the pool's it is: the block table. One on the
                device is copied to the host to be checked.
            spec: what it must be.
            tokens: tokens of the sequence; as many as the pages hold unless given.

        Raises:
            KVMismatch: another shape or dtype than the spec says, tensors on several devices, or a page that the pool
                has not.
        """
        parts = [_parts(layer, spec, 4) for layer in _layers(pools, spec)]
        return cls._of(parts, spec, paged=True).at(pages, tokens=tokens)

    def at(self, pages: Any, *, tokens: int | None = None) -> DeviceView:
        """Look at another sequence in the same pools; the same as `KVView.at`."""
        if not self.seen.page_tokens:
            raise KVMismatch("this view is not of a paged pool; make one with DeviceView.paged")
        table = table_of(pages.detach().cpu().numpy() if isinstance(pages, torch.Tensor) else pages)
        held = held_by(table, self.owner[0][0].shape[0], self.seen.page_tokens, tokens)
        alone = len(set(table.tolist())) == len(table)
        pages = _upload(torch.from_numpy(table), self.device)
        return replace(self, pages=pages, tokens=held, writable=self.writable and alone)

    @classmethod
    def _of(cls, parts: list[list[Any]], spec: KVSpec, *, paged: bool) -> DeviceView:
        flat = [part for layer in parts for part in layer]
        sizes, devices = {tuple(part.shape[:2]) for part in flat}, {part.device for part in flat}
        if len(sizes) != 1 or len(devices) != 1:
            raise KVMismatch(f"the layers have {sorted(sizes)} pages and tokens on {devices}; all must have the same")
        (_, page_tokens), device = sizes.pop(), devices.pop()
        if (device.type == "cpu") != INTERPRETED:
            raise KVMismatch(f"kv is on {device}; pass tensors on the GPU, or take KVView for CPU memory")
        by = [[_stride(part, axis) for axis in (1, 2, 3, 0)] for part in flat]
        table = torch.tensor([[part.data_ptr(), *steps] for part, steps in zip(flat, by, strict=True)])
        element, word = _TYPES[spec.dtype]
        known = [part.data_ptr() for part in flat] + [s * spec.itemsize for b in by for s in (b[0], b[1], b[3])]
        return cls(
            _upload(table.view(spec.layers, -1, 5), device),
            _upload(torch.zeros(1, dtype=torch.int64), device),
            Seen(
                element=element,
                word=word,
                nbytes=math.gcd(16, *known),
                dense=all(b[2] in (0, 1) for b in by),
                page_tokens=page_tokens if paged else 0,
                native=not INTERPRETED,
            ),
            0 if paged else page_tokens,
            spec,
            device,
            all(_own_elements(part) for part in flat),
            parts,
        )

    def keep(self) -> None:
        """Keep the tables for work that is about to be queued on the current stream, though the view be dropped."""
        if self.device.type == "cuda":
            for table in (self.table, self.pages):  # they are of the stream that they came on
                table.record_stream(torch.cuda.current_stream(self.device))

    def require_writable(self) -> None:
        """Raise `KVMismatch` unless blocks may be decoded into it."""
        if not self.writable:
            raise KVMismatch("elements or pages of kv share memory; pass what has each of them once to load into")


def _layers(kv: Any, spec: KVSpec) -> list[Any]:
    if not hasattr(kv, "__len__") or len(kv) != spec.layers:
        raise KVMismatch(f"kv is no KV of {spec.layers} layers: pass one tensor of all layers, or one entry a layer")
    return list(kv)


def _parts(layer: Any, spec: KVSpec, ndim: int) -> list[Any]:
    """K and V, or the latent with one head, each of `ndim` dimensions."""
    if spec.mla:
        parts = [layer.unsqueeze(-2) if isinstance(layer, torch.Tensor) and layer.ndim == ndim - 1 else layer]
    else:
        parts = list(layer) if hasattr(layer, "__len__") else [layer]
    if len(parts) != len(spec.head_dims):
        raise KVMismatch(f"a layer has {len(parts)} parts; pass K and V")
    for part, dim in zip(parts, spec.head_dims, strict=True):
        if not isinstance(part, torch.Tensor):
            raise KVMismatch(f"kv is no torch tensor ({type(part).__name__})")
        if part.ndim != ndim or tuple(part.shape[-2:]) != (spec.kv_heads, dim):
            raise KVMismatch(f"a layer has the shape {list(part.shape)}; the spec says [..., {spec.kv_heads}, {dim}]")
        dtype = str(part.dtype).removeprefix("torch.")
        if dtype != spec.dtype and (dtype != "uint16" or spec.itemsize != 2):
            raise KVMismatch(f"kv is {dtype}; the spec says {spec.dtype}")
        if part.layout != torch.strided or part.is_neg() or part.is_conj():
            raise KVMismatch("kv's memory is not its values: call resolve_conj().resolve_neg(), or to_dense(), on it")
    return [part.detach() for part in parts]


def _upload(numbers: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy on the device, which is there when this returns; what is queued there is not waited for."""
    if device.type != "cuda":
        return numbers.to(device)
    with torch.cuda.stream(_uploads(device)):
        return numbers.to(device)


@cache
def _uploads(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def _stride(part: Any, axis: int) -> int:
    """Elements from one to the next; 0 where there is no next one."""
    return int(part.stride(axis)) if part.shape[axis] > 1 else 0


def _own_elements(part: Any) -> bool:
    return not part.numel() or all(
        stride or length < 2 for stride, length in zip(part.stride(), part.shape, strict=True)
    )
