"""One other host, as this one knows it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvtier.errors import OverQuota
from kvtier.index.breaker import Breaker
from kvtier.peers.dial import Dialer
from kvtier.peers.link import Link

IDLE = 60.0
"""Seconds after which a link at rest is not used again; the other side closes it after some minutes."""
FRESH = 60.0
"""Seconds for which a measured pace counts: who was slow is tried again."""
LEAST_NBYTES = 1 << 20
"""Smaller transfers say more about calls than about bandwidth."""
PAUSE, LONGEST_PAUSE = 1.0, 60.0
"""Seconds for which a host that failed is avoided, at first and at most."""


class Peer:
    """Links to another host in one of its lives, and how it fares. Thread-safe.

    Args:
        door: where it is reached.
        dialer: opens links.
        most: links at a time.
        clock: monotonic.

    Attributes:
        door: where it is reached.
        breaker: closed while it is worth asking.
        under_way: bytes that are being fetched.
    """

    def __init__(self, door: str, dialer: Dialer, *, most: int, clock: Callable[[], float]) -> None:
        self.door = door
        self.breaker = Breaker(clock, failures=1, pause=PAUSE, longest=LONGEST_PAUSE)
        self.under_way = 0
        self._dialer = dialer
        self._clock = clock
        self._lock = threading.Lock()
        self._free = threading.Semaphore(most)
        self._idle: list[Link] = []
        """Used last at the end."""
        self._pace = 0.0, 0.0
        self._closed = False

    def asks(self) -> bool:
        """Whether it is worth asking now: it fares well, or a pause is over and the next request is a probe."""
        return self.breaker.closed or self.breaker.due()

    def slowness(self) -> float:
        """Seconds a byte; 0 when nothing came from there of late."""
        seen, pace = self._pace
        return pace if self._clock() - seen <= FRESH else 0.0

    @contextmanager
    def carrying(self, nbytes: int) -> Iterator[None]:
        """Count so many bytes as under way."""
        with self._lock:
            self.under_way += nbytes
        try:
            yield
        finally:
            with self._lock:
                self.under_way -= nbytes

    def moved(self, nbytes: int, seconds: float) -> None:
        """Note how long so many bytes took on one link; the last few transfers count."""
        if nbytes < LEAST_NBYTES or seconds <= 0:
            return
        known, each = self.slowness(), seconds / nbytes
        self._pace = self._clock(), 0.7 * known + 0.3 * each if known else each

    @contextmanager
    def link(self, until: float) -> Iterator[Link]:
        """Lend a link, of before or a new one; closed afterwards if something is raised, as it is out of step then.

        Raises:
            OverQuota: all links are in use, or the other host takes no more.
            DeadlineExceeded, SessionUnavailable, Unauthenticated, ProtocolMismatch: see `Dialer`.
        """
        if not self._free.acquire(timeout=max(0.0, until - self._clock())):
            raise OverQuota(f"all links to {self.door} are in use")
        try:
            link = self._take() or self._dialer.dial(self.door, until)
            try:
                yield link
            except BaseException:
                link.close()
                raise
            self._put(link)
        finally:
            self._free.release()

    def close(self) -> None:
        """Close the links at rest; those in use when they come back. Idempotent."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for link in idle:
            link.close()

    def _take(self) -> Link | None:
        """A link at rest that is as it was; the others are closed."""
        while True:
            with self._lock:
                link = self._idle.pop() if self._idle else None
            if link is None or (self._clock() - link.used < IDLE and link.quiet()):
                return link
            link.close()

    def _put(self, link: Link) -> None:
        link.used = self._clock()
        with self._lock:
            if not self._closed:
                self._idle.append(link)
                return
        link.close()
