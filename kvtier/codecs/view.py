"""A caller's KV as addresses and strides, whatever holds it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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
        strides: int64 `[layers, parts, 3]`, bytes from one token, head and element to the next.
        tokens: how many tokens there are.
        dtype: dtype of the elements, by name.
        owner: what must stay alive while the view is used.
    """

    addresses: NDArray[np.int64]
    strides: NDArray[np.int64]
    tokens: int
    dtype: str
    owner: Any

    @classmethod
    def of(cls, kv: Any, spec: KVSpec) -> KVView:
        """Look at torch tensors or numpy arrays.

        Args:
            kv: one tensor `[layers, 2, tokens, kv_heads, head_dim]` (MLA: `[layers, tokens, head_dim]`), or a sequence
                with one entry a layer: a pair (k, v) of tensors `[tokens, kv_heads, dim]` of any strides (MLA: one
                tensor `[tokens, head_dim]`).
            spec: what it must be.

        Raises:
            KVMismatch: another shape, dtype or device than the spec says.
        """
        parts = [_parts(layer, spec, i) for i, layer in enumerate(_layers(kv, spec))]
        tokens = {part.shape[0] for layer in parts for part in layer}
        if len(tokens) != 1:
            raise KVMismatch(f"the layers have {sorted(tokens)} tokens; all must have the same number")
        described = [[_describe(part, spec) for part in layer] for layer in parts]
        return cls(
            np.array([[d[0] for d in layer] for layer in described], np.int64),
            np.array([[d[1] for d in layer] for layer in described], np.int64),
            tokens.pop(),
            spec.dtype,
            kv,
        )


def _layers(kv: Any, spec: KVSpec) -> Sequence[Any]:
    if hasattr(kv, "shape"):
        want = 3 if spec.mla else 5
        if len(kv.shape) != want:
            shape = "[layers, tokens, head_dim]" if spec.mla else "[layers, 2, tokens, kv_heads, head_dim]"
            raise KVMismatch(f"kv has the shape {list(kv.shape)}; pass {shape} or one entry a layer")
        if not spec.mla and spec.head_dim != spec.v_head_dim:
            raise KVMismatch("K and V have different head dimensions: pass one (k, v) pair a layer")
    if len(kv) != spec.layers:
        raise KVMismatch(f"kv has {len(kv)} layers; the spec has {spec.layers}")
    return kv  # type: ignore[no-any-return]


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


def _describe(part: Any, spec: KVSpec) -> tuple[int, list[int]]:
    if hasattr(part, "data_ptr"):
        if part.device.type != "cpu":
            raise KVMismatch(f"kv is on {part.device}; pass a tensor in CPU memory")
        dtype, size, pointer = str(part.dtype).removeprefix("torch."), part.element_size(), part.data_ptr()
        strides = [s * size for s in part.stride()]
    else:
        dtype, size, pointer = str(part.dtype), part.dtype.itemsize, part.__array_interface__["data"][0]
        strides = list(part.strides)
    same = dtype == spec.dtype or (dtype == "uint16" and spec.itemsize == 2)
    if not same:
        raise KVMismatch(f"kv is {dtype}; the spec says {spec.dtype}")
    return pointer, strides
