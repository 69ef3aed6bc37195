"""Other hosts without a network, for tests of what lies above the peer transport."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvtier.block import verify_payload
from kvtier.errors import CorruptPayload
from kvtier.index.base import Node, Replica
from kvtier.memory.arena import Arena
from kvtier.peers.base import Lender, PeerStatus
from kvtier.tiers.base import STORED, Inventory, Slots, TierUsage


@dataclass(slots=True)
class Network:
    """Hosts by their door; one that is not here does not answer.

    Attributes:
        hosts: lender and arena of each.
        unreachable: doors that nobody gets through now.
    """

    hosts: dict[str, tuple[Lender, Arena]] = field(default_factory=dict)
    unreachable: set[str] = field(default_factory=set)


class MemoryPeers:
    """The `Tier` that is all other hosts of a `Network`.

    Attributes:
        gate: while it is cleared, reads hang.
        corrupt: keys whose bytes arrive damaged.
        avoided: doors that are not asked now.
        calls: by name.
    """

    name = "peer"

    def __init__(self, arena: Arena, network: Network, door: str, *, patience: float = 1.0) -> None:
        """Be the host behind `door`; others may take so long to stage what they are asked for."""
        self._arena = arena
        self._network = network
        self._door = door
        self._patience = patience
        self._routes: dict[bytes, list[str]] = {}
        self.gate = threading.Event()
        self.gate.set()
        self.corrupt: set[bytes] = set()
        self.avoided: set[str] = set()
        self.calls: Counter[str] = Counter()

    def found(self, keys: Sequence[bytes], replicas: Sequence[tuple[Replica, ...]], nodes: Mapping[int, Node]) -> None:
        self.calls["found"] += 1
        for key, some in zip(keys, replicas, strict=True):
            self._routes[key] = [nodes[replica.node].door for replica in some if replica.node in nodes]

    def offer(self, node: Node, keys: Sequence[bytes], nbytes: NDArray[np.int64], until: float) -> int:
        del until
        self.calls["offer"] += 1
        lender = self._lender(node.door)
        return lender[0].offered(self._door, keys, np.asarray(nbytes), self._door) if lender else 0

    def status(self) -> list[PeerStatus]:
        doors = sorted(set(self._network.hosts) - {self._door})
        return [PeerStatus(door, door, 0, 0, 0, 0.0, 0, float(door in self._network.unreachable), "") for door in doors]

    def write(self, keys: Sequence[bytes], slots: Slots) -> list[bool]:
        del slots
        return [False] * len(keys)

    def read(self, keys: Sequence[bytes], slots: Slots) -> list[bool]:
        self.calls["read"] += 1
        self.gate.wait()
        sizes, offsets = slots.nbytes.tolist(), slots.offsets.tolist()
        return [self._read(key, *slot) for key, slot in zip(keys, zip(offsets, sizes, strict=True), strict=True)]

    def remove(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            self._routes.pop(key, None)

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        return [not self.avoided.issuperset(self._routes.get(key, ())) for key in keys]

    def inventory(self) -> Inventory:
        return Inventory([], np.empty(0, STORED))

    def dropped(self) -> list[bytes]:
        return []

    def usage(self) -> TierUsage:
        return TierUsage(0, 0, len(self._routes), "", dict(self.calls))

    def close(self) -> None:
        self.gate.set()

    def _lender(self, door: str) -> tuple[Lender, Arena] | None:
        return None if door in self._network.unreachable else self._network.hosts.get(door)

    def _read(self, key: bytes, offset: int, nbytes: int) -> bool:
        for door in self._routes.pop(key, []):
            found = self._lender(door)
            if found is None:
                continue
            lender, arena = found
            lent = lender.lend(self._door, [key], np.array([nbytes], np.int64), self._patience)
            try:
                source = int(lent.slots.offsets[0])
                if source < 0:
                    continue
                self._arena.memory[offset : offset + nbytes] = arena.memory[source : source + nbytes]
            finally:
                lender.give_back(lent)
            if key in self.corrupt:
                self._arena.memory[offset + nbytes - 1] ^= 1
            try:
                verify_payload(self._arena.payload(offset, nbytes), expected=key)
            except CorruptPayload:
                continue
            return True
        return False
