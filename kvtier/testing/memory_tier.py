"""A tier in a dictionary, for tests of what lies above tiers."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np

from kvtier.block import slot_nbytes
from kvtier.memory.arena import Arena
from kvtier.tiers.base import Inventory, Slots, TierUsage


class MemoryTier:
    """A `Tier` that plays NVMe.

    Attributes:
        gate: while it is cleared, reads and writes hang.
        lose: keys that it cannot read any more.
    """

    name = "nvme"

    def __init__(self, arena: Arena, capacity: int) -> None:
        self._arena = arena
        self._capacity = capacity
        self._stored: dict[bytes, bytes] = {}
        self._lock = threading.Lock()
        self.gate = threading.Event()
        self.gate.set()
        self.lose: set[bytes] = set()

    def write(self, keys: Sequence[bytes], slots: Slots) -> list[bool]:
        self.gate.wait()
        return [
            self._write(key, bytes(self._arena.payload(offset, nbytes)))
            for key, offset, nbytes in zip(keys, slots.offsets.tolist(), slots.nbytes.tolist(), strict=True)
        ]

    def read(self, keys: Sequence[bytes], slots: Slots) -> list[bool]:
        self.gate.wait()
        return [
            self._read(key, offset, nbytes)
            for key, offset, nbytes in zip(keys, slots.offsets.tolist(), slots.nbytes.tolist(), strict=True)
        ]

    def remove(self, keys: Sequence[bytes]) -> None:
        with self._lock:
            for key in keys:
                self._stored.pop(key, None)

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        return [key in self._stored for key in keys]

    def inventory(self) -> Inventory:
        with self._lock:
            return Inventory.of(list(self._stored), list(self._stored.values()))

    def dropped(self) -> list[bytes]:
        return []

    def usage(self) -> TierUsage:
        return TierUsage(self._capacity, self._used(), len(self._stored))

    def close(self) -> None:
        self.gate.set()

    def _used(self) -> int:
        with self._lock:
            return sum(map(slot_nbytes, map(len, self._stored.values())))

    def _write(self, key: bytes, payload: bytes) -> bool:
        if key not in self._stored and self._used() + slot_nbytes(len(payload)) > self._capacity:
            return False
        with self._lock:
            self._stored.setdefault(key, payload)
        return True

    def _read(self, key: bytes, offset: int, nbytes: int) -> bool:
        with self._lock:
            payload = None if key in self.lose else self._stored.get(key)
        if payload is None or slot_nbytes(len(payload)) != slot_nbytes(nbytes):
            self.remove([key])
            return False
        self._arena.memory[offset : offset + len(payload)] = np.frombuffer(payload, np.uint8)
        return True
