"""One call's blocks, checked, and what every kernel is given of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvtier.codecs.gpu.jobs import Jobs
from kvtier.codecs.gpu.view import DeviceView
from kvtier.codecs.layout import Layout
from kvtier.errors import KVMismatch, UsageError
from kvtier.spec import KVSpec

ALIGN = 16
"""Bodies begin at multiples of this many bytes, and kernels move as many at a time: headers and slots are multiples of
64."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Blocks of one call.

    Attributes:
        memory: where the bodies are.
        blocks: int64 `[3, blocks]` on the device: first tokens, offsets, and whether they are not the first of a
            sequence.
        count: how many.
        kv: the caller's KV.
        layers: which layers.
        firsts: whether there are first blocks.
    """

    memory: torch.Tensor
    blocks: torch.Tensor
    count: int
    kv: DeviceView
    layers: range
    firsts: bool

    def work(self, jobs: Jobs) -> tuple[int, tuple[Any, ...], tuple[int, ...]]:
        """Of some jobs: how many blocks' parts there are; the addresses and the numbers that kernels take."""
        first, here = jobs.within(self.layers)
        where = (self.memory, self.blocks, jobs.table, self.kv.table, self.kv.pages)
        return self.count * here, where, (self.count, len(jobs.layers), first, here)


def batch(
    spec: KVSpec,
    layouts: tuple[Layout, Layout],
    kv: DeviceView,
    blocks: tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]],
    memory: torch.Tensor,
    layers: range,
    *,
    device: torch.device,
) -> Batch:
    """Check that every byte that a kernel will touch is inside `memory` and `kv`.

    Raises:
        KVMismatch: the view is of another spec, or on another device.
        UsageError: a block outside `memory` or outside the view, or not at a multiple of `ALIGN`; layers that the spec
            has not.
    """
    if kv.spec is not spec and kv.spec != spec:
        raise KVMismatch(f"the view was made for {kv.spec}; the codec was called for {spec}")
    if kv.device != device:
        raise KVMismatch(f"kv is on {kv.device}; the codec is for {device}")
    if memory.device != device or memory.dtype != torch.uint8 or memory.ndim != 1 or not memory.is_contiguous():
        raise UsageError(f"memory must be a contiguous tensor of uint8 with one dimension on {device}")
    if layers.step != 1 or not 0 <= layers.start <= layers.stop <= spec.layers:
        raise UsageError(f"the layers {layers} are not a range within the {spec.layers} layers of the spec")
    tokens, offsets, positions = (np.ascontiguousarray(each, np.int64) for each in blocks)
    if tokens.ndim != 1 or tokens.shape != offsets.shape or tokens.shape != positions.shape:
        raise UsageError(
            f"{tokens.shape} tokens, {offsets.shape} offsets, {positions.shape} positions: each block has one of each"
        )
    if tokens.size:
        _within("token", tokens, spec.block_tokens, kv.tokens, "kv")
        for layout, which in zip(layouts, (positions == 0, positions != 0), strict=True):
            if which.any():
                _within("offset", offsets[which], layout.nbytes, memory.numel(), "memory")
        if ((offsets + memory.data_ptr()) % ALIGN).any():
            raise UsageError(f"on a GPU bodies must begin at multiples of {ALIGN} bytes")
    numbers = torch.from_numpy(np.stack([tokens, offsets, positions != 0])).to(device)
    kv.keep()
    return Batch(memory, numbers, tokens.size, kv, layers, bool((positions == 0).any()))


def _within(what: str, starts: NDArray[np.int64], length: int, end: int, where: str) -> None:
    low, high = int(starts.min()), int(starts.max())
    if low < 0 or high > end - length:
        raise UsageError(
            f"a block of {length} at {what} {low if low < 0 else high} is outside of {where}, which has {end}"
        )
