"""Who the other hosts are, and where their blocks are. Both bounded, the newest are kept."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence

from kvtier.index.base import Node, Replica
from kvtier.peers.choose import Route
from kvtier.peers.peer import Peer
from kvtier.tiers.base import TierNumber

ROUTES = 1 << 16
PEERS = 1024


class Book:
    """Routes by key, and peers by node, life and door. Thread-safe.

    Args:
        meet: makes a peer of a host.
    """

    def __init__(self, meet: Callable[[Node], Peer]) -> None:
        self._meet = meet
        self._lock = threading.Lock()
        self._routes: OrderedDict[bytes, tuple[Route, ...]] = OrderedDict()
        self._peers: OrderedDict[tuple[int, int, str], Peer] = OrderedDict()

    def __len__(self) -> int:
        return len(self._routes)

    def note(self, keys: Sequence[bytes], replicas: Sequence[tuple[Replica, ...]], nodes: Mapping[int, Node]) -> None:
        """Remember where blocks are."""
        known: dict[tuple[Replica, ...], tuple[Route, ...]] = {}
        with self._lock:
            for key, each in zip(keys, replicas, strict=True):
                routes = known.get(each)
                if routes is None:
                    routes = known[each] = self._ways(each, nodes)
                if routes:
                    self._routes[key] = routes
                    self._routes.move_to_end(key)
            while len(self._routes) > ROUTES:
                self._routes.popitem(last=False)

    def routes(self, keys: Iterable[bytes]) -> list[tuple[Route, ...]]:
        """Ways to each block; none where it is not known."""
        with self._lock:
            return [self._routes.get(key, ()) for key in keys]

    def forget(self, keys: Iterable[bytes]) -> None:
        """Know no way to these any more."""
        with self._lock:
            for key in keys:
                self._routes.pop(key, None)

    def peer(self, node: Node) -> Peer:
        """The peer that this host is in this life."""
        with self._lock:
            return self._peer(node)

    def peers(self) -> list[Peer]:
        """All that are known."""
        with self._lock:
            return list(self._peers.values())

    def close(self) -> None:
        """Close all links."""
        with self._lock:
            peers = list(self._peers.values())
            self._peers.clear()
            self._routes.clear()
        for peer in peers:
            peer.close()

    def _ways(self, replicas: Iterable[Replica], nodes: Mapping[int, Node]) -> tuple[Route, ...]:
        routes = []
        for replica in replicas:
            node = nodes.get(replica.node)
            if node is not None and node.alive and node.door and node.incarnation == replica.incarnation:
                routes.append(Route(self._peer(node), replica.tier != TierNumber.CPU, replica.nbytes))
        return tuple(routes)

    def _peer(self, node: Node) -> Peer:
        name = node.node, node.incarnation, node.door
        peer = self._peers.get(name)
        if peer is None:
            peer = self._peers[name] = self._meet(node)
            for other in [each for each in self._peers if each[0] == node.node and each != name]:
                self._peers.pop(other).close()
            while len(self._peers) > PEERS:
                self._peers.popitem(last=False)[1].close()
        self._peers.move_to_end(name)
        return peer
