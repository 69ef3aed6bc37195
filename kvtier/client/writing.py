"""From tensors to slots: what a save encodes, and where.

    from                  into
    CPU memory            the slots, in place
    GPU                   memory of the GPU, some bodies at a time; from there through pinned memory into the slots

A client does not pin the arena: that would take a while and the memory of all of it, and a remote client's is not there
until it is written. So a body is copied once more on its way, on the thread that hashes it anyway, while the next ones
are being encoded.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvtier.client.reading import Bodies, Numbers, gpu_codec, is_on_device, moves, pieces
from kvtier.codecs.base import Codec
from kvtier.codecs.view import KVView
from kvtier.errors import KVMismatch

if TYPE_CHECKING:
    import torch

    from kvtier.codecs.gpu import DeviceView, GpuCodec

PIECE_NBYTES = 512 << 10
"""Encoded and hashed while it is in the processor's cache."""


class Source(Protocol):
    """KV to save from.

    Attributes:
        tokens: that it has.
    """

    @property
    def tokens(self) -> int:
        """See the class."""
        ...

    def encode(self, bodies: Bodies) -> Iterator[int]:
        """Encode blocks to their bodies' places in host memory, in order.

        Yields:
            The checksum of each body that is there, until one that the plan cannot represent.

        Raises:
            RuntimeError: the device failed, or has no memory for what is on its way.
        """
        ...


def source_of(kv: Any, codec: Codec, origin: int = 0) -> Source:
    """What a caller gave to save; its first token is the sequence's token `origin`.

    KV on a GPU is read behind what is queued on the current stream now, on another stream.

    Raises:
        KVMismatch: it is not of the codec's spec, or nothing can encode there.
        ConfigError: the plan cannot be encoded on a GPU (see `GpuCodec`), and `kv` is there.
    """
    if not is_on_device(kv):
        return _InCpuMemory(KVView.of(kv, codec.spec), codec, origin)
    try:
        return _OnGpu.of(kv, codec, origin)
    except ImportError as exc:
        raise KVMismatch(
            f"kv is on a GPU, and encoding there needs triton ({exc}): pip install 'kvtier[gpu]', or pass a tensor in "
            "CPU memory"
        ) from exc


class _InCpuMemory:
    def __init__(self, view: KVView, codec: Codec, origin: int) -> None:
        self._view, self._codec, self._origin = view, codec, origin
        self.tokens = view.tokens

    def encode(self, bodies: Bodies) -> Iterator[int]:
        for i in range(len(bodies.offsets)):
            checksum = self._encode(bodies.cut(slice(i, i + 1)))
            if checksum is None:
                return
            yield checksum

    def _encode(self, body: Bodies) -> int | None:
        """Of one; None when the plan cannot represent it."""
        codec, spec = self._codec, self._codec.spec
        begins = codec.layers(int(body.positions[0])).tolist()
        step = max(1, PIECE_NBYTES * spec.layers // begins[-1])
        tokens = body.positions * spec.block_tokens - self._origin
        at, hasher = int(body.offsets[0]), xxhash.xxh3_64()
        for first in range(0, spec.layers, step):
            layers = range(first, min(first + step, spec.layers))
            if not codec.encode(self._view, tokens, body.memory, body.offsets, body.positions, layers)[0]:
                return None
            hasher.update(body.memory[at + begins[layers.start] : at + begins[layers.stop]].data)
        return hasher.intdigest()


class _OnGpu:
    def __init__(self, view: DeviceView, codec: GpuCodec, origin: int) -> None:
        self._view, self._codec, self._origin = view, codec, origin
        self.tokens = view.tokens
        self._ready = _mark(view.device)

    @classmethod
    def of(cls, kv: Any, codec: Codec, origin: int) -> _OnGpu:
        from kvtier.codecs.gpu import DeviceView

        view = DeviceView.of(kv, codec.spec)
        return cls(view, gpu_codec(codec.plan, codec.spec, str(view.device)), origin)

    def encode(self, bodies: Bodies) -> Iterator[int]:
        before: _Sent | None = None
        for part, places, room in pieces(bodies):
            sent = self._send(part, places, room)
            if before is not None:
                yield from before.land()
            before = sent
            if len(sent.bodies.offsets) < len(part.offsets):
                break
        if before is not None:
            yield from before.land()

    def _send(self, bodies: Bodies, places: Numbers, room: int) -> _Sent:
        """Encode bodies on the device, and let them come."""
        import torch

        device = self._view.device
        cuda = device.type == "cuda"
        tokens = bodies.positions * self._codec.spec.block_tokens - self._origin
        with _apart(device, self._ready):
            memory = torch.empty(room, dtype=torch.uint8, device=device)
            every = range(self._codec.spec.layers)
            stored = self._codec.encode(self._view, tokens, memory, places, bodies.positions, every)
            good = len(stored) if stored.all() else int(np.argmin(stored))
            host = torch.empty(room, dtype=torch.uint8, pin_memory=cuda)
            host.copy_(memory, non_blocking=cuda)
            return _Sent(bodies.cut(slice(0, good)), places[:good], host, _mark(device))


@dataclass(frozen=True, slots=True)
class _Sent:
    """Bodies on their way to host memory: where each will be there, and what says that they have come."""

    bodies: Bodies
    places: Numbers
    host: torch.Tensor
    come: Any

    def land(self) -> Iterator[int]:
        """Copy each into its slot; its checksum."""
        if self.come is not None:
            self.come.synchronize()
        host: NDArray[np.uint8] = self.host.numpy()
        for at, there, nbytes in moves(self.bodies, self.places):
            hasher = xxhash.xxh3_64()
            for first in range(0, nbytes, PIECE_NBYTES):
                end = min(first + PIECE_NBYTES, nbytes)
                self.bodies.memory[at + first : at + end] = host[there + first : there + end]
                hasher.update(host[there + first : there + end].data)
            yield hasher.intdigest()


def _mark(device: torch.device) -> Any:
    """What says when all is done that is queued on the current stream now; None where nothing is queued."""
    if device.type != "cuda":
        return None
    import torch

    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event


def _apart(device: torch.device, ready: Any) -> AbstractContextManager[Any]:
    """Work on a stream of its own, behind what `ready` marks."""
    if device.type != "cuda":
        return nullcontext()
    import torch

    stream = _stream(device)
    stream.wait_event(ready)
    return torch.cuda.stream(stream)


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    import torch

    return torch.cuda.Stream(device)
