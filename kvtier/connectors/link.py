"""The way to a host's kvtier, which need not be there."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from kvtier.client.cache import Cache
from kvtier.errors import ConfigError, KVTierError, SessionError

T = TypeVar("T")

FIRST, LONGEST = 0.5, 2.0
"""Seconds between two attempts to reach a host that did not answer at the start."""
SAYINGS = 100
"""Different things that people are told in all: some have numbers in them, and would be new each time."""


class Link:
    """A session with a host: opened when there is one, and never waited for. Thread-safe.

    Once it stands it attaches again by itself whenever the host comes back.

    Args:
        connect: opens a session; what it raises is said once.
        say: tells people, each thing once.
    """

    def __init__(self, connect: Callable[[], Cache], say: Callable[[str], None]) -> None:
        self._connect, self._tell = connect, say
        self._said: set[str] = set()
        self._cache: Cache | None = None
        self._closed = threading.Event()
        self._lock = threading.Lock()
        if not self._connected():
            threading.Thread(target=self._keep_trying, name="kvtier-connect", daemon=True).start()

    @property
    def cache(self) -> Cache | None:
        """The session; None while there is none."""
        return self._cache

    def say(self, what: str) -> None:
        """Tell people, unless they were told, or told too much."""
        if what not in self._said and len(self._said) < SAYINGS:
            self._said.add(what)
            self._tell(what)

    def close(self) -> None:
        """End the session; what is being saved ends first. Idempotent."""
        with self._lock:
            self._closed.set()
            cache, self._cache = self._cache, None
        if cache is not None:
            cache.close()

    def _connected(self) -> bool:
        try:
            cache = self._connect()
        except KVTierError as exc:
            self.say(f"{exc}; requests are computed meanwhile")
            return False
        with self._lock:
            if not self._closed.is_set():
                self._cache = cache
                return True
        cache.close()
        return True

    def _keep_trying(self) -> None:
        pause = FIRST
        while not self._closed.wait(pause) and not self._connected():
            pause = min(LONGEST, 2 * pause)


class Opened(Generic[T]):
    """What an engine opens on a session once there is one. Thread-safe; nobody waits for another one's opening.

    Args:
        link: the session.
        opening: opens it; what it raises for the host's sake is said, and tried again at the next call.
    """

    def __init__(self, link: Link, opening: Callable[[Cache], T]) -> None:
        self._link, self._opening = link, opening
        self._opened: T | None = None
        self._lock = threading.Lock()

    def get(self) -> T | None:
        """It; None while the host is not there, or refuses it."""
        cache = self._link.cache
        if cache is None:
            return None
        if self._opened is None:
            try:
                opened = self._opening(cache)
            except (ConfigError, SessionError) as exc:
                self._link.say(f"{exc}")
                return None
            with self._lock:
                if self._opened is None:
                    self._opened = opened
        return self._opened
