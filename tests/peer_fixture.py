"""Two hosts for tests of the peer tier: one that has blocks, one that wants them."""

from __future__ import annotations

import contextlib
import gc
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvtier.index.base import Node, Replica
from kvtier.memory.arena import Arena
from kvtier.peers.fetcher import FetchLimits
from kvtier.peers.server import PeerServer
from kvtier.peers.tier import PeerTier
from kvtier.testing.payloads import key_of, payload_of
from kvtier.testing.shelf import Shelf
from kvtier.testing.tier import Desk
from kvtier.tiers.base import TierNumber

SECRET = b"what the hosts of a fleet know"
LIMITS = FetchLimits(seconds=10.0, stall=1.0, wait=0.5)


@dataclass
class Far:
    """A host that has blocks."""

    shelf: Shelf
    server: PeerServer
    number: int = 2

    @property
    def node(self) -> Node:
        return node_at("{}:{}".format(*self.server.address), self.number)

    def put(self, seeds: Sequence[int], nbytes: int) -> None:
        self.shelf.put([key_of(seed) for seed in seeds], [payload_of(seed, nbytes) for seed in seeds])


def node_at(door: str, number: int = 2) -> Node:
    return Node(number, 1, f"far{number}", door, 0.0, alive=True)


@contextlib.contextmanager
def far(
    number: int = 2, *, secret: bytes = SECRET, capacity: int = 64 << 20, shelf: type[Shelf] = Shelf, **options: Any
) -> Iterator[Far]:
    arena = Arena.private(capacity)
    blocks = shelf(arena)
    server = PeerServer(blocks, arena, ("127.0.0.1", 0), secret, **options)
    try:
        yield Far(blocks, server, number)
    finally:
        blocks.gate.set()
        server.close()


@contextlib.contextmanager
def near(
    arena: Arena, *, secret: bytes = SECRET, limits: FetchLimits = LIMITS, door: str = "", **options: Any
) -> Iterator[PeerTier]:
    with contextlib.closing(PeerTier(arena, "near", door, secret, limits=limits, **options)) as tier:
        yield tier


@dataclass
class PeerDesk(Desk):
    """A desk whose writes go to another host, and whose tier is told where they are."""

    hosts: list[Far] = field(default_factory=list)

    def write(self, seeds: Sequence[int], nbytes: int) -> list[bool]:
        for host in self.hosts:
            host.put(seeds, nbytes)
        return self.find(seeds, nbytes)

    def find(
        self, seeds: Sequence[int], nbytes: int, nodes: Sequence[Node] = (), tier: int = TierNumber.CPU
    ) -> list[bool]:
        """Tell the tier that these hosts have them."""
        nodes = nodes or [host.node for host in self.hosts]
        replicas = [tuple(Replica(node.node, node.incarnation, tier, nbytes) for node in nodes)] * len(seeds)
        self.sizes.update(dict.fromkeys(seeds, nbytes))
        self.tier.found([key_of(seed) for seed in seeds], replicas, {node.node: node for node in nodes})
        return [True] * len(seeds)


@contextlib.contextmanager
def nothing_left() -> Iterator[None]:
    """Whatever happens inside leaves no thread and no descriptor behind."""
    gc.collect()
    threads, files = set(threading.enumerate()), _files()
    yield
    gc.collect()
    until = time.monotonic() + 5
    while time.monotonic() < until and (set(threading.enumerate()) - threads or _files() > files):
        time.sleep(0.01)
    assert not set(threading.enumerate()) - threads
    assert _files() <= files


def _files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))
