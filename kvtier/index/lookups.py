"""Values of many keys, from all masters at once, within a time."""

from __future__ import annotations

import time
from binascii import crc_hqx
from collections.abc import Callable, Sequence
from typing import Any

from redis import ConnectionError as RedisConnectionError
from redis import TimeoutError as RedisTimeoutError
from redis.crc import key_slot
from redis.exceptions import AskError, ClusterDownError, TryAgainError

from kvtier.index.address import Where
from kvtier.index.find import NOBODY, SLOTS, Layout
from kvtier.index.ready import LEAST, Line, Ready
from kvtier.index.shards import Shards

BRACE = ord("{")
ELSEWHERE = (AskError, TryAgainError, ClusterDownError)
"""Answers to a key that this server does not have now; a `MovedError` is an `AskError`."""

Ask = tuple[Ready, Sequence[bytes], int]
"""Whom to send what, and how many answers come."""


class Lookups:
    """Asks for values; `get` runs in any thread and ends in its time, whatever the servers do.

    A single master is asked by MGET. A Cluster refuses that across slots, so that its masters get their keys as GETs in
    one write each, all masters before the first answer is read.

    Attributes:
        wake: called when the background should open connections.
        misplaced: whether a key was not where the layout says: look who has it.
    """

    def __init__(
        self,
        make: Callable[[Where], Callable[[], Line]],
        layout: Layout,
        *,
        timeout: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Take what makes connections to a master, where the masters are, and what a call may take in seconds."""
        self.misplaced = False
        self._timeout = timeout
        self._clock = clock
        self.wake: Callable[[], None] = lambda: None
        self._ready = Shards(lambda where: Ready(make(where), self._open, timeout), layout)

    def take(self, layout: Layout) -> None:
        """From now on the masters are these."""
        self._ready.take(layout)

    def get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """Value of each key; None where there is none, or its server does not have it now.

        Raises:
            redis.RedisError: a server did not answer in time.
        """
        until = self._clock() + self._timeout
        layout, masters = self._ready.now
        if not masters:
            raise RedisConnectionError("nobody has said yet who the master is")
        if layout.slots is None:
            answer: list[bytes | None] = self._exchange([(masters[0], packed(b"MGET", keys), 1)], until)[0][0]
            return answer
        return self._gather(layout, masters, keys, until)

    def ping(self) -> None:
        """Open the connections that are wanted, and see that each master answers; in the background.

        Raises:
            redis.RedisError: one does not.
        """
        self.open()
        masters = self._ready.now[1]
        if not masters:
            raise RedisConnectionError("nobody has said yet who the master is")
        self._exchange([(master, packed(b"PING", ()), 1) for master in masters], self._clock() + self._timeout)

    def open(self) -> None:
        """Open the connections that are wanted; in the background.

        Raises:
            redis.RedisError: a master takes none.
        """
        for ready in self._ready.now[1]:
            ready.open()

    def close(self) -> None:
        """Drop all connections."""
        self._ready.close()

    def _open(self) -> None:
        self.wake()

    def _gather(
        self, layout: Layout, masters: Sequence[Ready], keys: Sequence[bytes], until: float
    ) -> list[bytes | None]:
        found: list[bytes | None] = [None] * len(keys)
        places = split(layout, keys)
        self.misplaced |= places.pop(NOBODY, None) is not None
        asks = [(masters[number], gets([keys[place] for place in here]), len(here)) for number, here in places.items()]
        for here, answers in zip(places.values(), self._exchange(asks, until), strict=True):
            for place, answer in zip(here, answers, strict=True):
                if isinstance(answer, ELSEWHERE):
                    self.misplaced = True
                elif isinstance(answer, Exception):
                    raise answer
                else:
                    found[place] = answer
        return found

    def _exchange(self, asks: Sequence[Ask], until: float) -> list[list[Any]]:
        """Send to all, then read from all; once more where a server had closed idle connections."""
        try:
            return self._try(asks, until)
        except RedisTimeoutError:
            raise
        except RedisConnectionError:
            return self._try(asks, until)

    def _try(self, asks: Sequence[Ask], until: float) -> list[list[Any]]:
        lent: list[tuple[Ready, Line]] = []
        try:
            for ready, request, _ in asks:
                connection = ready.borrow(until - self._clock())
                lent.append((ready, connection))
                connection.send_packed_command(request)
            answers = [
                [self._read(connection, until) for _ in range(count)]
                for (_, connection), (_, _, count) in zip(lent, asks, strict=True)
            ]
        except BaseException as exc:  # answers may be on their way: none of these can be used again
            closed = isinstance(exc, RedisConnectionError)
            for ready, connection in lent:
                ready.drop(connection, all_of_them=closed)
            raise
        for ready, connection in lent:
            ready.give(connection)
        return answers

    def _read(self, connection: Line, until: float) -> Any:
        try:
            return connection.read_response(timeout=max(LEAST, until - self._clock()))
        except ELSEWHERE as exc:
            return exc


def packed(name: bytes, arguments: Sequence[bytes]) -> list[bytes]:
    """One command as the server reads it, in pieces to be written."""
    head = b"*%d\r\n$%d\r\n%s\r\n" % (len(arguments) + 1, len(name), name)
    return [head + b"".join([b"$%d\r\n%s\r\n" % (len(argument), argument) for argument in arguments])]


def gets(keys: Sequence[bytes]) -> list[bytes]:
    """A GET for each key."""
    return [b"".join([b"*2\r\n$3\r\nGET\r\n$%d\r\n%s\r\n" % (len(key), key) for key in keys])]


def split(layout: Layout, keys: Sequence[bytes]) -> dict[int, list[int]]:
    """Places of the keys by the number of the master that has them; a tag in braces stands for the whole key."""
    slots = layout.slots or ()
    parts: dict[int, list[int]] = {}
    for place, key in enumerate(keys):
        slot = crc_hqx(key, 0) % SLOTS if BRACE not in key else key_slot(key)
        parts.setdefault(slots[slot], []).append(place)
    return parts
