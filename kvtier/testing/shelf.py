"""A host's blocks without its hierarchy, for tests of what other hosts do with them."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from kvtier.block import slot_nbytes
from kvtier.memory.arena import Arena
from kvtier.peers.base import Lent
from kvtier.tiers.base import Slots


class Shelf:
    """A `Lender` of payloads that lie side by side in an arena, and never leave it.

    Attributes:
        arena: where they lie.
        gate: while it is cleared, lending waits, as long as it may.
        held: leases that were not given back.
        offers: what was offered: by whom, keys, sizes, door.
        interest: how many offered blocks it takes.
    """

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self.gate = threading.Event()
        self.gate.set()
        self.held: set[int] = set()
        self.offers: list[tuple[str, list[bytes], list[int], str]] = []
        self.interest = 0
        self._places: dict[bytes, tuple[int, int]] = {}
        self._end = 0
        self._leases = 0
        self._lock = threading.Lock()

    def put(self, keys: Iterable[bytes], payloads: Iterable[bytes | memoryview]) -> list[int]:
        """Lay payloads down; where each one is."""
        offsets = []
        with self._lock:
            for key, payload in zip(keys, payloads, strict=True):
                at = self._end
                self.arena.memory[at : at + len(payload)] = np.frombuffer(payload, np.uint8)
                self._places[key] = at, len(payload)
                self._end += slot_nbytes(len(payload))
                offsets.append(at)
        return offsets

    def lend(self, peer: str, keys: Sequence[bytes], nbytes: NDArray[np.int64], wait: float) -> Lent:
        if not self.gate.wait(wait):
            return Lent.nothing(len(keys))
        with self._lock:
            self._leases += 1
            self.held.add(self._leases)
            places = [self._places.get(key, (-1, 0)) for key in keys]
            return Lent(self._leases, Slots.of(*zip(*places, strict=True)))

    def give_back(self, lent: Lent) -> None:
        with self._lock:
            self.held.discard(lent.lease)

    def offered(self, peer: str, keys: Sequence[bytes], nbytes: NDArray[np.int64], door: str) -> int:
        self.offers.append((peer, list(keys), nbytes.tolist(), door))
        return self.interest
