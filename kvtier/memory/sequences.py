"""Preallocated memory for the KV of sequences, each in one piece."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from kvtier.block import PAGE
from kvtier.errors import ClosedError, ConfigError, KVMismatch, PoolFull, UsageError
from kvtier.memory.arena import Arena
from kvtier.memory.pinning import Pinner, cuda_present, unpin
from kvtier.memory.pool import SlotPool
from kvtier.spec import KVSpec


class SequencePool:
    """Memory for KV of one shape, allocated, touched and (with CUDA) page-locked once; sequences are slots of it.

    What is in a slot, for `room` tokens:

        | layer 0: K [room, kv_heads, head_dim] | V [room, kv_heads, v_head_dim] | layer 1: K | V | ...

    The slots are those of the arena (`SlotPool`): sequences of a few sizes share the memory without fragmenting it.
    Thread-safe; one sequence belongs to one thread at a time.

    Args:
        spec: of the KV.
        capacity: bytes.

    Attributes:
        spec: of the KV.
        fault: why the memory is not page-locked, on a machine with CUDA; empty when it is, or need not be.

    Raises:
        ConfigError: there is no room for it.
    """

    def __init__(self, spec: KVSpec, capacity: int) -> None:
        self.spec = spec
        self._memory = Arena.private(capacity).memory
        self._memory[::PAGE] = 0
        self._slots, self._lock = SlotPool(self._memory.nbytes), threading.Lock()
        pin = Pinner(_nothing)
        pin(self._memory)
        self.fault = pin.fault
        if cuda_present() and not pin.fault:
            weakref.finalize(self, unpin, self._memory).atexit = False

    @property
    def capacity(self) -> int:
        """Bytes."""
        return self._slots.capacity

    @property
    def held_nbytes(self) -> int:
        """Bytes of the slots that sequences have."""
        return self._slots.used

    def new(self, room: int) -> PooledSequence:
        """A sequence without tokens.

        Args:
            room: tokens that it holds without being moved.

        Raises:
            PoolFull: there is no room for it.
        """
        if room < 1:
            raise ConfigError(f"a sequence with room for {room} tokens holds nothing; give it room for at least 1")
        return PooledSequence(self, *self.take(room), room)

    def take(self, room: int) -> tuple[int, list[list[torch.Tensor]]]:
        """A slot for so many tokens, and what is in it; for sequences.

        Raises:
            PoolFull: there is none.
        """
        nbytes = self.spec.token_nbytes * room
        with self._lock:
            offset = self._slots.allocate(nbytes)
            free = self._slots.free_nbytes
        if offset is None:
            raise PoolFull(
                f"{room} tokens need {nbytes} bytes in one piece, and of {self.capacity} {free} are free: close "
                "sequences that are done, or make the pool larger"
            )
        with torch.inference_mode(mode=False):  # what is made in inference mode can only be written in it
            memory = torch.from_numpy(self._memory[offset : offset + nbytes])
            return offset, _parts(memory.view(getattr(torch, self.spec.dtype)), self.spec, room)

    def give_back(self, offset: int) -> None:
        """Free a slot; for sequences."""
        with self._lock:
            self._slots.release(np.array([offset], np.int64))


class PooledSequence:
    """The KV of one sequence, in one piece, with room for more; see `SequencePool.new`. A context manager.

    Views of it are valid until it is closed, or moved because it needs more room: the slot is then another's.

    Attributes:
        tokens: how many it has.
        room: how many it may have before it is moved.
    """

    def __init__(self, pool: SequencePool, offset: int, parts: list[list[torch.Tensor]], room: int) -> None:
        self._pool, self._offset, self._parts = pool, offset, parts
        self.tokens, self.room = 0, room

    @property
    def kv(self) -> list[Any]:
        """Views of what it has: for each layer K and V as `[tokens, kv_heads, dim]` (MLA: one `[tokens, head_dim]`)."""
        return self.span(0, self.tokens)

    def span(self, first: int, end: int) -> list[Any]:
        """Views of the tokens `[first, end)`, as for `kv`.

        Raises:
            UsageError: it has no such tokens.
        """
        if not 0 <= first <= end <= self.tokens:
            raise UsageError(f"the sequence has {self.tokens} tokens; there is no span from {first} to {end}")
        layers = [[part[first:end] for part in layer] for layer in self._live]
        return [layer[0][:, 0] if self._pool.spec.mla else tuple(layer) for layer in layers]

    def append(self, kv: Sequence[Any]) -> None:
        """Add tokens; `kv` as the property, or one tensor `[layers, 2, tokens, kv_heads, head_dim]`.

        A sequence that needs more room moves to a slot with twice as much, or as much as it needs.

        Raises:
            KVMismatch: another shape or dtype than the spec says.
            PoolFull: there is no room for it; nothing is added.
        """
        layers = [[layer[:, None]] if self._pool.spec.mla else list(layer) for layer in kv]
        wants = [[(tuple(part.shape[1:]), part.dtype) for part in layer] for layer in self._live]
        found = [[(tuple(part.shape[1:]), part.dtype) for part in layer] for layer in layers]
        sizes = {part.shape[0] for layer in layers for part in layer}
        if found != wants or len(sizes) != 1:
            raise KVMismatch(f"this is no KV of one length of {self._pool.spec}")
        end = self.tokens + sizes.pop()
        if end > self.room:
            self.reserve(max(end, 2 * self.room))
        for mine, new in zip(self._live, layers, strict=True):
            for part, more in zip(mine, new, strict=True):
                part[self.tokens : end] = more.detach()
        self.tokens = end

    def extend(self, tokens: int) -> None:
        """Have more tokens within the room, whose KV is then written through `span`: by a codec, or a copy of a GPU's.

        Raises:
            UsageError: there is no room for them; `reserve` makes some.
        """
        if not 0 <= tokens <= self.room - self.tokens:
            raise UsageError(
                f"{tokens} more tokens do not fit; the sequence has {self.tokens} and room for {self.room}"
            )
        self.tokens += tokens

    def reserve(self, room: int) -> None:
        """Move to where there is room for so many tokens, if there is less here.

        Raises:
            PoolFull: there is nowhere; the sequence stays as it is.
        """
        held = self._live
        if room <= self.room:
            return
        offset, parts = self._pool.take(room)
        for new, old in zip(parts, held, strict=True):
            for part, before in zip(new, old, strict=True):
                part[: self.tokens] = before[: self.tokens]
        self._pool.give_back(self._offset)
        self._offset, self._parts, self.room = offset, parts, room

    def cut(self, tokens: int) -> None:
        """Keep the first so many tokens."""
        if not 0 <= tokens <= self.tokens:
            raise UsageError(f"the sequence has {self.tokens} tokens; it cannot be cut to {tokens}")
        self.tokens = tokens

    def close(self) -> None:
        """Give the slot back."""
        if self._parts:
            self._parts, self.tokens, self.room = [], 0, 0
            self._pool.give_back(self._offset)

    def __enter__(self) -> PooledSequence:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def _live(self) -> list[list[torch.Tensor]]:
        if not self._parts:
            raise ClosedError("this sequence was closed; make another with new()")
        return self._parts


def _parts(memory: torch.Tensor, spec: KVSpec, room: int) -> list[list[torch.Tensor]]:
    """The parts of all layers, each `[room, kv_heads, dim]`."""
    sizes = [room * spec.kv_heads * dim for dim in spec.head_dims] * spec.layers
    shaped = [
        part.view(room, spec.kv_heads, dim)
        for part, dim in zip(memory.split(sizes), spec.head_dims * spec.layers, strict=True)
    ]
    width = len(spec.head_dims)
    return [shaped[layer * width : (layer + 1) * width] for layer in range(spec.layers)]


def _nothing(_: str) -> None:
    pass
