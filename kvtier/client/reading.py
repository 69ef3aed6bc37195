"""From slots to tensors: where payloads are read, and what they are decoded into.

    from, to            CPU memory            GPU
    arena, emulated     in place              through pinned memory
    GPU tier's memory   through host memory   in place, or copied when it is another GPU

In place nothing is copied but by the codec. Otherwise bodies go, some at a time, to memory where the codec runs.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kvtier.codecs.base import Codec
from kvtier.codecs.view import KVView
from kvtier.errors import KVMismatch
from kvtier.spec import KVSpec

if TYPE_CHECKING:
    import torch

    from kvtier.codecs.gpu import DeviceView, GpuCodec

PIECE_NBYTES = 32 << 20
"""Bytes of bodies that are on their way at a time; a body larger than this goes alone."""
ALIGN = 64
Numbers = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Bodies:
    """Bodies in one memory.

    Attributes:
        memory: u8: an array, or a tensor.
        offsets, nbytes: of each.
        positions: of each in its chain.
    """

    memory: Any
    offsets: Numbers
    nbytes: Numbers
    positions: Numbers

    def cut(self, part: slice) -> Bodies:
        """Some of them."""
        return Bodies(self.memory, self.offsets[part], self.nbytes[part], self.positions[part])


class Target(Protocol):
    """KV to load into.

    Attributes:
        tokens: for which it has room.
        device: where it is.
    """

    @property
    def tokens(self) -> int:
        """See the class."""
        ...

    @property
    def device(self) -> str:
        """See the class."""
        ...

    def decode(self, bodies: Bodies, layers: range) -> None:
        """Decode bodies to their places, and wait until it is done.

        Raises:
            RuntimeError: the device failed, or has no memory for what is on its way.
        """
        ...


def target_of(kv: Any, codec: Codec, threads: int, origin: int = 0) -> Target:
    """What a caller gave to load into; its first token is the sequence's token `origin`.

    Raises:
        KVMismatch: it is not of the codec's spec, or cannot be written to, or nothing can decode there.
    """
    if not is_on_device(kv):
        return _InCpuMemory(KVView.of(kv, codec.spec), codec, threads, origin)
    try:
        return _OnGpu.of(kv, codec, origin)
    except ImportError as exc:
        raise KVMismatch(
            f"kv is on a GPU, and decoding there needs triton ({exc}): pip install 'kvtier[gpu]', or pass a tensor "
            "in CPU memory"
        ) from exc


class _InCpuMemory:
    device = "cpu"

    def __init__(self, view: KVView, codec: Codec, threads: int, origin: int) -> None:
        view.require_writable()
        self._view, self._codec, self._threads, self._origin = view, codec, threads, origin
        self.tokens = view.tokens

    def decode(self, bodies: Bodies, layers: range) -> None:
        for part in _on_host(bodies):
            self._decode(part, layers)

    def _decode(self, bodies: Bodies, layers: range) -> None:
        count = len(bodies.offsets)
        parts = min(self._threads, count)
        if parts < 2:
            self._run(bodies, layers)
            return
        cuts = [slice(count * i // parts, count * (i + 1) // parts) for i in range(parts)]
        with ThreadPoolExecutor(parts) as threads:
            for done in [threads.submit(self._run, bodies.cut(cut), layers) for cut in cuts]:
                done.result()

    def _run(self, bodies: Bodies, layers: range) -> None:
        tokens = bodies.positions * self._codec.spec.block_tokens - self._origin
        self._codec.decode(bodies.memory, bodies.offsets, bodies.positions, self._view, tokens, layers)


class _OnGpu:
    def __init__(self, view: DeviceView, codec: GpuCodec, origin: int) -> None:
        view.require_writable()
        self._view, self._codec, self._origin = view, codec, origin
        self.tokens, self.device = view.tokens, str(view.device)

    @classmethod
    def of(cls, kv: Any, codec: Codec, origin: int) -> _OnGpu:
        from kvtier.codecs.gpu import DeviceView

        view = DeviceView.of(kv, codec.spec)
        return cls(view, gpu_codec(codec.plan, codec.spec, str(view.device)), origin)

    def decode(self, bodies: Bodies, layers: range) -> None:
        for part in _on_device(bodies, self._view.device):
            tokens = part.positions * self._view.spec.block_tokens - self._origin
            self._codec.decode(part.memory, part.offsets, part.positions, self._view, tokens, layers)
        if self._view.device.type == "cuda":
            import torch

            torch.cuda.current_stream(self._view.device).synchronize()


@cache
def gpu_codec(plan: str, spec: KVSpec, device: str) -> GpuCodec:
    """The codec of a plan on a device; made once."""
    from kvtier.codecs.gpu import GpuCodec

    return GpuCodec(plan, spec, device)


def heads(memory: Any, offsets: Numbers, nbytes: int) -> NDArray[np.uint8]:
    """The first bytes of slots in host memory, `[slots, nbytes]`; `nbytes` is a multiple of 8."""
    places = (offsets // 8)[:, None] + np.arange(nbytes // 8)
    if isinstance(memory, np.ndarray):
        words: NDArray[np.uint64] = memory.view(np.uint64)[places]
        return words.view(np.uint8)
    import torch

    found = memory.view(torch.int64)[torch.from_numpy(places).to(memory.device)]
    return np.asarray(found.cpu().numpy()).view(np.uint8)


def on_host(memory: Any, offset: int, nbytes: int) -> NDArray[np.uint8]:
    """Some bytes in host memory."""
    part = memory[offset : offset + nbytes]
    return part if isinstance(part, np.ndarray) else np.asarray(part.cpu().numpy())


def is_on_device(kv: Any) -> bool:
    """Whether the GPU's codec works on this KV: that is where its first tensor is, or a view of it says so."""
    gpu = sys.modules.get("kvtier.codecs.gpu")
    if gpu and isinstance(kv, gpu.DeviceView):
        return True
    while isinstance(kv, list | tuple) and kv:
        kv = kv[0]
    return str(getattr(kv, "device", "cpu")).startswith("cuda")


def _on_host(bodies: Bodies) -> Iterator[Bodies]:
    if isinstance(bodies.memory, np.ndarray):
        yield bodies
        return
    import torch

    for part, places, room in pieces(bodies):
        memory = torch.empty(room, dtype=torch.uint8)
        for here, there, nbytes in moves(part, places):
            memory[there : there + nbytes].copy_(part.memory[here : here + nbytes])
        yield Bodies(memory.numpy(), places, part.nbytes, part.positions)


def _on_device(bodies: Bodies, device: torch.device) -> Iterator[Bodies]:
    if not isinstance(bodies.memory, np.ndarray) and bodies.memory.device == device:
        yield bodies
        return
    import torch

    cuda = device.type == "cuda"
    pinned: list[tuple[torch.Tensor, Any]] = []
    for number, (part, places, room) in enumerate(pieces(bodies)):
        memory = torch.empty(room, dtype=torch.uint8, device=device)
        if isinstance(bodies.memory, np.ndarray):
            if len(pinned) < 2:  # the processor fills one while the other is on its way
                space = torch.empty(max(room, PIECE_NBYTES), dtype=torch.uint8, pin_memory=cuda)
                pinned.append((space, torch.cuda.Event() if cuda else None))
            space, sent = pinned[number % 2]
            if cuda:
                sent.synchronize()
            if space.numel() < room:
                space = torch.empty(room, dtype=torch.uint8, pin_memory=cuda)
                pinned[number % 2] = space, sent
            host = space.numpy()
            for here, there, nbytes in moves(part, places):
                host[there : there + nbytes] = part.memory[here : here + nbytes]
            memory.copy_(space[:room], non_blocking=cuda)
            if cuda:
                sent.record(torch.cuda.current_stream(device))
        else:
            for here, there, nbytes in moves(part, places):
                memory[there : there + nbytes].copy_(part.memory[here : here + nbytes])
        yield Bodies(memory, places, part.nbytes, part.positions)


def pieces(bodies: Bodies) -> Iterator[tuple[Bodies, Numbers, int]]:
    """Some bodies at a time: with the place of each in memory that has only them, and how large that is."""
    first, count = 0, len(bodies.offsets)
    while first < count:
        ends = np.cumsum(-(-bodies.nbytes[first:] // ALIGN) * ALIGN)
        number = max(1, int(np.searchsorted(ends, PIECE_NBYTES, side="right")))
        part = bodies.cut(slice(first, first + number))
        yield part, np.concatenate(([0], ends[: number - 1])).astype(np.int64), int(ends[number - 1])
        first += number


def moves(bodies: Bodies, places: Numbers) -> Iterator[tuple[int, int, int]]:
    """Of each body where it is in its memory, its place in the other, and its bytes."""
    return zip(bodies.offsets.tolist(), places.tolist(), bodies.nbytes.tolist(), strict=True)
