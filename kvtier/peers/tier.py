"""The tier that is other hosts."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from kvtier.block import ADDRESS_NBYTES, PAGE, slot_nbytes
from kvtier.errors import ClosedError, KVTierError, ProtocolMismatch
from kvtier.index.base import Node, Replica
from kvtier.memory.arena import Arena
from kvtier.peers import wire
from kvtier.peers.base import PeerStatus
from kvtier.peers.book import Book
from kvtier.peers.choose import Want
from kvtier.peers.dial import Dialer
from kvtier.peers.fetcher import Fetcher, FetchLimits
from kvtier.peers.peer import Peer
from kvtier.peers.tls import Tls, TlsFiles
from kvtier.peers.wire import Kind
from kvtier.tiers.base import STORED, Inventory, Slots, TierUsage


class PeerTier:
    """Blocks of other hosts, fetched into arena slots; a `Tier` that is only read.

    It finds nothing by itself: `found` tells it where blocks are, before they are read. Nothing is written here: a host
    that wants others to have its blocks offers them.

    Args:
        arena: where the slots are.
        name: of this host; other hosts show it as who holds their blocks.
        door: where this host's own `PeerServer` is reached; empty when it has none, and then it offers nothing.
        secret: the fleet's.
        tls: None for plain connections.
        clock: monotonic.
        limits: how long a fetch may take, and on how many links.

    Raises:
        ConfigError: the secret is too short; the certificate cannot be used.
    """

    name = "peer"

    def __init__(
        self,
        arena: Arena,
        name: str,
        door: str,
        secret: bytes,
        *,
        tls: TlsFiles | None = None,
        clock: Callable[[], float] = time.monotonic,
        limits: FetchLimits | None = None,
    ) -> None:
        limits = limits or FetchLimits()
        dialer = Dialer(name, secret, Tls(tls) if tls else None, clock, limits.stall)
        self._memory = memoryview(arena.memory.data)
        self._door = door
        self._book = Book(lambda node: Peer(node.host, node.door, dialer, most=limits.links, clock=clock))
        self._fetcher = Fetcher(limits, clock)
        self._idle = threading.Condition()
        """Guards what follows."""
        self._calls = 0
        self._closed = False

    def found(self, keys: Sequence[bytes], replicas: Sequence[tuple[Replica, ...]], nodes: Mapping[int, Node]) -> None:
        """Remember where these blocks are; the newest are kept.

        Args:
            keys: 34-byte addresses.
            replicas: of each, as the index has them.
            nodes: the other hosts by number; those that are dead, live anew or have no door are no way.
        """
        with self._use():
            self._book.note(keys, replicas, nodes)

    def read(self, keys: Sequence[bytes], slots: Slots) -> list[bool]:
        with self._use():
            wants = self._wants(keys, slots)
            whole = self._fetcher(wants)
            self._book.forget(want.key for want in wants if want.place not in whole)
        return [place in whole for place in range(len(keys))]

    def offer(self, node: Node, keys: Sequence[bytes], nbytes: NDArray[np.int64], until: float) -> int:
        """Ask another host to fetch these blocks from here, by itself and later.

        Args:
            node: the other host.
            keys: 34-byte addresses; what is beyond `wire.ITEMS_LIMIT` is not offered.
            nbytes: of their payloads.
            until: when to have given up, by the clock.

        Returns:
            How many it will fetch; 0 also where it cannot be reached.
        """
        with self._use():
            if not node.door or not self._door or not keys:
                return 0
            peer, most = self._book.peer(node), wire.ITEMS_LIMIT
            if not peer.admits():
                return 0
            try:
                taken = _offer(peer, wire.offer(self._door, wire.items(keys[:most], nbytes[:most])), until)
            except KVTierError as exc:
                self._fetcher.failed(peer, exc)
                return 0
            return min(taken, len(keys))

    def write(self, keys: Sequence[bytes], slots: Slots) -> list[bool]:
        with self._use():
            return [False] * len(slots)

    def remove(self, keys: Sequence[bytes]) -> None:
        with self._use():
            self._book.forget(keys)

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Whether there is a way to each block, and its host is not being avoided."""
        asks: dict[Peer, bool] = {}
        with self._use():
            known = self._book.routes(keys)
            for peer in {route.peer for routes in known for route in routes}:
                asks[peer] = peer.asks()
            return [any(asks[route.peer] for route in routes) for routes in known]

    def inventory(self) -> Inventory:
        with self._use():
            return Inventory([], np.empty(0, STORED))

    def dropped(self) -> list[bytes]:
        with self._use():
            return []

    def usage(self) -> TierUsage:
        with self._use():
            return TierUsage(0, 0, len(self._book), self._fetcher.fault, self._fetcher.counters)

    def status(self) -> list[PeerStatus]:
        """How each host fares that was asked, or may be."""
        with self._use():
            return [peer.status() for peer in self._book.peers()]

    def close(self) -> None:
        with self._idle:
            self._closed = True
            self._idle.wait_for(lambda: not self._calls)
        self._fetcher.close()
        self._book.close()

    @contextmanager
    def _use(self) -> Iterator[None]:
        """Hold it open."""
        with self._idle:
            if self._closed:
                raise ClosedError("the peer tier was closed")
            self._calls += 1
        try:
            yield
        finally:
            with self._idle:
                self._calls -= 1
                self._idle.notify_all()

    def _wants(self, keys: Sequence[bytes], slots: Slots) -> list[Want]:
        """What can be fetched: there is a way to it, in this size, and its slot is one."""
        wants = []
        places = zip(keys, slots.offsets.tolist(), slots.nbytes.tolist(), self._book.routes(keys), strict=True)
        for place, (key, offset, nbytes, known) in enumerate(places):
            routes = tuple(route for route in known if route.nbytes == nbytes)
            if routes and len(key) == ADDRESS_NBYTES and self._is_slot(offset, nbytes):
                wants.append(Want(place, key, self._memory[offset : offset + nbytes], routes))
        return wants

    def _is_slot(self, offset: int, nbytes: int) -> bool:
        return offset % PAGE == 0 and 0 <= offset < offset + slot_nbytes(nbytes) <= len(self._memory)


def _offer(peer: Peer, body: bytes, until: float) -> int:
    with peer.link(until) as link:
        link.send(Kind.OFFER, body, until)
        kind, answer = link.receive(until)
        if kind is not Kind.TAKEN:
            raise ProtocolMismatch(f"another host answered an offer with a frame of kind {kind.name}")
    peer.succeeded()
    return wire.read_number(answer)
