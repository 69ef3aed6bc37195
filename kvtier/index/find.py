"""Which servers are the masters now. Asked in the background only."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any, Protocol

from redis import Redis, RedisError
from redis.crc import key_slot
from redis.sentinel import Sentinel

from kvtier.errors import ConfigError
from kvtier.index.address import RedisAddress, Where

SLOTS = 16384
NOBODY = 0xFFFF
"""In the place of a master's number: nobody has the slot."""
BELIEVED = 8
"""Times in a row that one server of a Cluster is asked: it may be cut off from the others."""
FAULTS = (RedisError, OSError, ConfigError)


@dataclass(frozen=True, slots=True)
class Layout:
    """Who has the index's keys.

    Attributes:
        masters: where each master is.
        slots: number of the master of each of a Cluster's slots; None where the only master has all.
    """

    masters: tuple[Where, ...]
    slots: tuple[int, ...] | None = None

    def of(self, key: bytes) -> int:
        """Number of the master that has a key, or `NOBODY`."""
        return 0 if self.slots is None else self.slots[key_slot(key)]


ALONE = Layout((("", 0),))
"""The one server of the URL."""
UNKNOWN = Layout(())
"""Nobody has said yet who the master is."""


class Finder(Protocol):
    """Says who the masters are."""

    def find(self) -> Layout:
        """Ask.

        Raises:
            redis.RedisError: nobody answers, or there is no master now.
        """
        ...

    def close(self) -> None:
        """Drop connections."""
        ...


def finder(address: RedisAddress, timeout: float) -> Finder:
    """The finder for this kind of address; each server that it asks has `timeout` seconds."""
    kinds: dict[str, type[BySentinel | ByCluster]] = {"sentinel": BySentinel, "cluster": ByCluster}
    return kinds[address.kind](address, timeout) if address.kind else Fixed()


class Fixed:
    """One server, always the same."""

    def find(self) -> Layout:
        return ALONE

    def close(self) -> None:
        return


class BySentinel:
    """The master that Sentinels name."""

    def __init__(self, address: RedisAddress, timeout: float) -> None:
        self._service = address.service
        self._sentinels = Sentinel([])  # type: ignore[no-untyped-call]
        self._sentinels.sentinels = [address.sentinel(timeout, where) for where in address.seeds]

    def find(self) -> Layout:
        host, port = self._sentinels.discover_master(self._service)  # type: ignore[no-untyped-call]
        return Layout(((str(host), int(port)),))

    def close(self) -> None:
        for client in self._sentinels.sentinels:
            client.close()


class ByCluster:
    """All masters of a Cluster, as one of its servers tells; another one when it does not answer, and now and then."""

    def __init__(self, address: RedisAddress, timeout: float) -> None:
        self._address = address
        self._timeout = timeout
        self._seeds = address.seeds
        self._clients: dict[Where, Redis] = {}
        self._turn: deque[Where] = deque(self._seeds)
        self._asked = 0

    def find(self) -> Layout:
        fault: Exception = RedisError("no server of the Cluster answers")
        self._asked += 1
        if self._asked % BELIEVED == 0:
            self._turn.rotate(-1)
        for _ in range(len(self._turn)):
            where = self._turn[0]
            try:
                answer = self._client(where).execute_command("CLUSTER SLOTS")  # type: ignore[no-untyped-call]
                layout = _layout(answer, where[0])
            except FAULTS as exc:
                fault = exc
            else:
                if layout.masters:
                    self._remember(layout)
                    return layout
            self._turn.rotate(-1)
        raise RedisError(f"no server of the Cluster tells who has its slots: {fault}") from fault

    def close(self) -> None:
        for client in self._clients.values():
            client.close()
        self._clients.clear()

    def _client(self, where: Where) -> Redis:
        if where not in self._clients:
            self._clients[where] = self._address.client(self._timeout, where)
        return self._clients[where]

    def _remember(self, layout: Layout) -> None:
        known = dict.fromkeys([self._turn[0], *layout.masters, *self._seeds])
        if known.keys() != set(self._turn):
            self._turn = deque(known)
        for gone in self._clients.keys() - known.keys():
            self._clients.pop(gone).close()


def _layout(answer: Any, asked: str) -> Layout:
    """From CLUSTER SLOTS: [first, last, [host, port, ...], replicas...]; an empty host is the one that was asked."""
    if isinstance(answer, dict):  # some releases of redis-py parse it
        ranges = [(first, last, said["primary"][0], said["primary"][1]) for (first, last), said in answer.items()]
    else:
        ranges = [(first, last, master[0], master[1]) for first, last, master, *_ in answer]
    numbers: dict[Where, int] = {}
    slots = [NOBODY] * SLOTS
    for first, last, host, port in ranges:
        name = host.decode() if isinstance(host, bytes) else str(host or "")
        number = numbers.setdefault((asked if name in ("", "?") else name, int(port)), len(numbers))
        slots[int(first) : int(last) + 1] = [number] * (int(last) - int(first) + 1)
    return Layout(tuple(numbers), tuple(slots))
