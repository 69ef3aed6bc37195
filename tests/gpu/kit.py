"""KV on the device as engines hold it there, and calls of the codecs that are compared."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from kvtier.codecs.gpu import DeviceView, GpuCodec
from kvtier.codecs.registry import codec_for
from kvtier.spec import KVSpec
from kvtier.testing.kv import Layers, ones_like, view_of

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
PAGE_TOKENS = 16
GUARD = 0xA5
GAP = 48
"""Bytes before, between and behind bodies."""
Tensors = list[list[torch.Tensor]]


def tensors(spec: KVSpec, layers: Layers) -> Tensors:
    """A copy on the device."""
    dtype = getattr(torch, spec.dtype)
    signed = np.int16 if spec.itemsize == 2 else np.int32
    return [[torch.from_numpy(part.view(signed).copy()).view(dtype).to(DEVICE) for part in layer] for layer in layers]


def arrays(layers: Tensors) -> Layers:
    """A copy of the bits on the host."""
    return [[_bits(part.cpu()) for part in layer] for layer in layers]


def _bits(part: torch.Tensor) -> np.ndarray:
    if part.element_size() == 4:
        return part.contiguous().numpy()
    return part.contiguous().view(torch.int16).numpy().view(np.uint16)


def dense(part: torch.Tensor) -> torch.Tensor:
    return part.clone()


def heads_first(part: torch.Tensor) -> torch.Tensor:
    """As transformers keeps it: `[heads, tokens, dim]`."""
    return part.transpose(0, 1).contiguous().transpose(0, 1)


def every_other_element(part: torch.Tensor) -> torch.Tensor:
    return part.repeat_interleave(2, 2)[:, :, ::2]


def odd(part: torch.Tensor) -> torch.Tensor:
    """At no multiple of more than an element."""
    room = torch.zeros(part.shape[0], part.numel() // len(part) + 1, dtype=part.dtype, device=part.device)
    room[:, 1:] = part.reshape(len(part), -1)
    return room[:, 1:].view(part.shape)


class Whole:
    """KV in one tensor a part."""

    def __init__(self, spec: KVSpec, layers: Layers, how: Callable[[torch.Tensor], torch.Tensor] = dense) -> None:
        self._spec = spec
        self.layers = [[how(part) for part in layer] for layer in tensors(spec, layers)]

    def view(self) -> DeviceView:
        return DeviceView.of([layer[0] if self._spec.mla else layer for layer in self.layers], self._spec)

    def contiguous(self) -> Layers:
        return arrays(self.layers)


Pool = Callable[[KVSpec, int], tuple[torch.Tensor, Sequence[torch.Tensor]]]


def _room(spec: KVSpec, *shape: int) -> torch.Tensor:
    return torch.full(shape, 2.0, dtype=getattr(torch, spec.dtype), device=DEVICE)


def k_then_v(spec: KVSpec, pages: int) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
    """vLLM's FlashAttention: `[2, pages, page_tokens, heads, dim]`."""
    room = _room(spec, 2, pages, PAGE_TOKENS, spec.kv_heads, spec.head_dim)
    return room, (room[0], room[1])


def k_beside_v(spec: KVSpec, pages: int) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
    """FlashInfer's: `[pages, 2, page_tokens, heads, dim]`."""
    room = _room(spec, pages, 2, PAGE_TOKENS, spec.kv_heads, spec.head_dim)
    return room, (room[:, 0], room[:, 1])


def k_then_v_by_head(spec: KVSpec, pages: int) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
    """The first with the strides of HND."""
    room = _room(spec, 2, pages, spec.kv_heads, PAGE_TOKENS, spec.head_dim).transpose(2, 3)
    return room, (room[0], room[1])


def k_beside_v_by_head(spec: KVSpec, pages: int) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
    """The second with the strides of HND."""
    room = _room(spec, pages, 2, spec.kv_heads, PAGE_TOKENS, spec.head_dim).transpose(2, 3)
    return room, (room[:, 0], room[:, 1])


def joined(spec: KVSpec, pages: int) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
    """K and V behind each other in each head: `[pages, heads, page_tokens, k_dim + v_dim]`."""
    room = _room(spec, pages, spec.kv_heads, PAGE_TOKENS, spec.head_dim + spec.v_head_dim).transpose(1, 2)
    return room, (room[..., : spec.head_dim], room[..., spec.head_dim :])


def latents(spec: KVSpec, pages: int) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
    """MLA: `[pages, page_tokens, dim]`."""
    room = _room(spec, pages, PAGE_TOKENS, spec.head_dim)
    return room, (room.unsqueeze(2),)


class Paged:
    """KV in shuffled pages of a pool of each layer, which has others too."""

    def __init__(self, spec: KVSpec, layers: Layers, how: Pool) -> None:
        self._spec, self._tokens = spec, len(layers[0][0])
        used = -(-self._tokens // PAGE_TOKENS)
        self.table = np.random.default_rng(0).permutation(2 * used + 1)[:used]
        made = [how(spec, 2 * used + 1) for _ in layers]
        self.rooms, self.pools = [room for room, _ in made], [parts for _, parts in made]
        for parts, source in zip(self.pools, tensors(spec, layers), strict=True):
            for pool, part in zip(parts, source, strict=True):
                for number, page in enumerate(self.table.tolist()):
                    tokens = part[number * PAGE_TOKENS : (number + 1) * PAGE_TOKENS]
                    pool[page, : len(tokens)] = tokens

    def view(self) -> DeviceView:
        pools = [parts[0][:, :, 0] if self._spec.mla else parts for parts in self.pools]
        return DeviceView.paged(pools, torch.from_numpy(self.table).int(), self._spec, tokens=self._tokens)

    def contiguous(self) -> Layers:
        return arrays([[pool[self.table].flatten(0, 1)[: self._tokens] for pool in parts] for parts in self.pools])

    def rest(self) -> list[torch.Tensor]:
        """Elements that are not of the sequence."""
        last = self._tokens - (len(self.table) - 1) * PAGE_TOKENS
        others = [page for page in range(len(self.pools[0][0])) if page not in self.table]
        return [part for parts in self.pools for pool in parts for part in (pool[others], pool[self.table[-1], last:])]


def room_for(plan: str, spec: KVSpec, positions: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Guarded memory for bodies, and where each begins."""
    sizes = [-(-codec_for(plan, spec).nbytes(position) // 16) * 16 + GAP for position in positions]
    offsets = GAP + np.cumsum([0, *sizes[:-1]])
    return np.full(sum(sizes) + GAP, GUARD, np.uint8), offsets


def on_device(memory: np.ndarray) -> torch.Tensor:
    """A copy; tensors begin at multiples of 16 bytes."""
    return torch.from_numpy(memory).clone().to(DEVICE)


def encoded(
    plan: str, spec: KVSpec, view: DeviceView, tokens: Sequence[int], positions: Sequence[int], layers: Any = None
) -> tuple[np.ndarray, np.ndarray]:
    """The guarded memory after encoding on the device, and which blocks were stored."""
    memory, offsets = room_for(plan, spec, positions)
    there, codec = on_device(memory), GpuCodec(plan, spec, DEVICE)
    where = np.array(tokens), there, offsets, np.array(positions)
    stored = codec.encode(view, *where, layers or range(spec.layers))
    return there.cpu().numpy(), stored


def encoded_on_cpu(
    plan: str, spec: KVSpec, kv: Layers, tokens: Sequence[int], positions: Sequence[int], layers: Any = None
) -> tuple[np.ndarray, np.ndarray]:
    """The same by the CPU's codec."""
    memory, offsets = room_for(plan, spec, positions)
    where = np.array(tokens), memory, offsets, np.array(positions)
    stored = codec_for(plan, spec).encode(view_of(spec, kv), *where, layers or range(spec.layers))
    return memory, stored


def decode(
    plan: str,
    spec: KVSpec,
    memory: np.ndarray,
    view: DeviceView,
    tokens: Sequence[int],
    positions: Sequence[int],
    layers: Any = None,
) -> None:
    """Decode on the device what `encoded` gave."""
    _, offsets = room_for(plan, spec, positions)
    where = on_device(memory), offsets, np.array(positions), view, np.array(tokens)
    GpuCodec(plan, spec, DEVICE).decode(*where, layers or range(spec.layers))


def decoded_on_cpu(
    plan: str, spec: KVSpec, memory: np.ndarray, kv: Layers, tokens: Sequence[int], positions: Sequence[int]
) -> Layers:
    """Ones where nothing was decoded, by the CPU's codec."""
    _, offsets = room_for(plan, spec, positions)
    out = ones_like(kv)
    where = memory, offsets, np.array(positions), view_of(spec, out), np.array(tokens)
    codec_for(plan, spec).decode(*where, range(spec.layers))
    return out
