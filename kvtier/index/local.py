"""The index of a single process."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence

from kvtier.index.base import MAX_REPLICAS, Life, Node, Replica, Swept
from kvtier.index.entry import pack_body, pack_owner
from kvtier.index.nodes import preferred_number


class LocalStore:
    """What the local indexes of one process share; thread-safe. Entries of dead lives are removed at once."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.replicas: dict[bytes, tuple[Replica, ...]] = {}
        self.nodes: dict[int, Node] = {}

    def register(self, host: str, door: str = "") -> Life:
        """Give a host its number and a new incarnation; the same name gets the same number."""
        with self.lock:
            for node in self.nodes.values():
                if node.host == host:
                    return Life(node.node, node.incarnation + 1, host, door)
            number = preferred_number(host)
            while number in self.nodes:
                number = number % 65535 + 1
            self.nodes[number] = Node(number, 0, host, door, 0.0, alive=False)
            return Life(number, 1, host, door)

    def admit(self, node: Node) -> bool:
        """Enter a life into the node table; False when a later one, or another host, is there."""
        with self.lock:
            was = self.nodes.get(node.node)
            if was is not None and (was.host != node.host or was.incarnation > node.incarnation):
                return False
            self.nodes[node.node] = node
            if was is None or was.incarnation < node.incarnation:
                self._purge(node.node)
            return True

    def forget(self, number: int) -> None:
        """Drop a node and its entries."""
        with self.lock:
            self.nodes.pop(number, None)
            self._purge(number)

    def _purge(self, number: int) -> None:
        for key, replicas in list(self.replicas.items()):
            kept = tuple(replica for replica in replicas if replica.node != number)
            if kept:
                self.replicas[key] = kept
            else:
                del self.replicas[key]


class LocalIndex:
    """The index in a dictionary of this process: for `kvtier.open`, notebooks and tests.

    Attributes:
        node: number of this host.
        incarnation: its life.
    """

    def __init__(self, store: LocalStore, life: Life) -> None:
        """Speak for one life of one host in `store`."""
        pack_owner(life)
        self.node = life.node
        self.incarnation = life.incarnation
        self._store = store
        self._self = Node(life.node, life.incarnation, life.host, life.door, 0.0, alive=True)
        self._needs_publish = True
        self._lookups = self._told = 0
        self._closed = False
        self._said: set[bytes] | None = None
        store.admit(self._self)

    def match(self, keys: Sequence[bytes]) -> list[tuple[Replica, ...]] | None:
        self._lookups += 1
        get = self._store.replicas.get
        return [get(key, ()) for key in keys]

    def lacking(self, held: Sequence[tuple[bytes, int, int]]) -> list[bytes] | None:
        replicas = self._store.replicas
        return [
            key
            for key, tier, size in held
            if (mine := Replica(self.node, self.incarnation, tier, size)) not in (there := replicas.get(key, ()))
            and (len(there) < MAX_REPLICAS or any(replica.node == mine.node for replica in there))
        ]

    def claims(self) -> list[tuple[bytes, int, int]]:
        return []

    def sweep(self, *, trim: bool) -> Iterator[Swept]:
        with self._store.lock:
            entries = list(self._store.replicas.items())
        mine = [(key, one.tier, one.nbytes) for key, there in entries for one in there if one.node == self.node]
        yield Swept(len(entries), 0, 0, 0, tuple(mine))

    def others(self) -> bool:
        nodes = self._store.nodes
        return len(nodes) > (self.node in nodes)

    def nodes(self) -> list[Node]:
        return list(self._store.nodes.values())

    def add(self, keys: Sequence[bytes], tier: int, nbytes: Sequence[int]) -> None:
        for size in set(nbytes):
            pack_body(tier, size)
        if not self._speaks():
            return
        for key, size in zip(keys, nbytes, strict=True):
            with self._store.lock:
                self._put(key, Replica(self.node, self.incarnation, tier, size))
                if self._said is not None:
                    self._said.add(key)

    def discard(self, keys: Sequence[bytes]) -> None:
        if self._speaks():
            with self._store.lock:
                if self._said is not None:
                    self._said.update(keys)
                for key in keys:
                    others = self._others_of(key)
                    if others:
                        self._store.replicas[key] = others
                    else:
                        self._store.replicas.pop(key, None)

    def publish(self, inventory: Iterable[tuple[bytes, int, int]]) -> None:
        if not self._speaks():
            return
        said = self._said = set[bytes]()
        for key, tier, size in inventory:
            with self._store.lock:
                if key not in said:
                    self._put(key, Replica(self.node, self.incarnation, tier, size))
        self._said = None
        self._needs_publish = not self._speaks()

    def forget(self, node: int) -> None:
        self._store.forget(node)

    def needs_publish(self) -> bool:
        return self._needs_publish

    def flush(self, timeout: float) -> bool:
        return True

    def status(self) -> dict[str, object]:
        return {
            "kind": "local",
            "ok": self._speaks(),
            "reason": "" if self._speaks() else "closed, or the host has registered again",
            "node": self.node,
            "incarnation": self.incarnation,
            "nodes_alive": len(self._store.nodes),
            "lookups": self._lookups,
            "round_trips": 0,
            "breaker_open": False,
            "queued": 0,
            "lag": 0.0,
            "told": self._told,
            "needs_publish": self._needs_publish,
        }

    def close(self) -> None:
        self._closed = True

    def _put(self, key: bytes, replica: Replica) -> None:
        replicas = self._store.replicas
        known = replicas.get(key, ())
        alone = not known or (len(known) == 1 and known[0].node == self.node)
        replicas[key] = (replica,) if alone else (*self._others_of(key)[1 - MAX_REPLICAS :], replica)
        self._told += 1

    def _others_of(self, key: bytes) -> tuple[Replica, ...]:
        return tuple(replica for replica in self._store.replicas.get(key, ()) if replica.node != self.node)

    def _speaks(self) -> bool:
        """Whether this is still its host's current life; one that was forgotten is heard of again."""
        return not self._closed and self._store.admit(self._self)
