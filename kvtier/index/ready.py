"""Connections to one server that were opened before anybody needs them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from redis import RedisError
from redis import TimeoutError as RedisTimeoutError
from redis.connection import DefaultParser

from kvtier.index.find import FAULTS

LIMIT = 32
LEAST = 1e-4
"""Seconds: a socket's time-out of 0 would mean something else."""


class Punctual(DefaultParser):  # type: ignore[misc, valid-type]
    """Reads one answer in its time, however many pieces it comes in: redis-py gives each piece all of it."""

    _until = 0.0

    def read_response(self, **how: Any) -> Any:
        timeout = how.get("timeout")
        if isinstance(timeout, float):
            self._until = time.monotonic() + timeout
        return super().read_response(**how)

    def read_from_socket(self, **how: Any) -> Any:
        if isinstance(how.get("timeout"), float):
            how["timeout"] = max(LEAST, self._until - time.monotonic())
        return super().read_from_socket(**how)


class Line(Protocol):
    """What is used of a connection of redis-py."""

    def connect(self) -> None:
        """Open it, and prove oneself."""
        ...

    def disconnect(self) -> None:
        """Close it."""
        ...

    def send_packed_command(self, command: Iterable[bytes]) -> None:
        """Write."""
        ...

    def read_response(self, *, timeout: float = ...) -> Any:
        """One answer; errors of the server are raised, and a time-out or a broken connection closes it."""
        ...

    def update_current_socket_timeout(self, relaxed_timeout: float) -> None:
        """Seconds of each read and write from now on."""
        ...


class Ready:
    """Lends connections; opening them, which may take long, is the background's. Thread-safe.

    Whoever finds none waits, within his time, until one is given back or opened; so many are kept as were ever wanted
    at the same time.

    Attributes:
        wanted: how many there should be.
    """

    def __init__(self, make: Callable[[], Line], wake: Callable[[], None], timeout: float, limit: int = LIMIT) -> None:
        """Take what makes a connection to be opened, what wakes the background, and seconds of each read and write."""
        self.wanted = 1
        self._make = make
        self._timeout = timeout
        self._wake = wake
        self._limit = limit
        self._idle: list[Line] = []
        self._lent = self._waiting = 0
        self._closed = False
        self._changed = threading.Condition()

    def borrow(self, seconds: float) -> Line:
        """Lend one; it comes back by `give` or `drop`.

        Raises:
            redis.TimeoutError: there is none in time.
        """
        with self._changed:
            if not self._idle:
                self._waiting += 1
                self.wanted = min(max(self.wanted, self._lent + self._waiting), self._limit)
                self._wake()
                self._changed.wait_for(lambda: self._idle or self._closed, seconds)
                self._waiting -= 1
            if not self._idle:
                raise RedisTimeoutError("no connection to Redis was there in time")
            self._lent += 1
            return self._idle.pop()

    def give(self, connection: Line) -> None:
        """Take one back that has no answer outstanding."""
        with self._changed:
            self._lent -= 1
            if not self._closed:
                self._idle.append(connection)
                self._changed.notify()
                return
        connection.disconnect()

    def drop(self, connection: Line, *, all_of_them: bool = False) -> None:
        """Take one back that is broken or out of step, and perhaps its fellows with it."""
        with self._changed:
            self._lent -= 1
            idle = self._idle if all_of_them else []
            if all_of_them:
                self._idle = []
        for broken in (connection, *idle):
            broken.disconnect()
        self._wake()

    def open(self) -> None:
        """Open what is wanted and not there; in the background.

        Raises:
            redis.RedisError: the server takes none.
        """
        while not self._closed and len(self._idle) + self._lent < self.wanted:
            connection = self._make()
            try:
                connection.connect()
                connection.update_current_socket_timeout(self._timeout)  # connecting may take longer
            except FAULTS as exc:
                raise exc if isinstance(exc, RedisError) else RedisError(str(exc)) from exc
            with self._changed:
                self._lent += 1
            self.give(connection)

    def close(self) -> None:
        """Drop all; those that are lent when they come back."""
        with self._changed:
            self._closed = True
            idle, self._idle = self._idle, []
            self._changed.notify_all()
        for connection in idle:
            connection.disconnect()
