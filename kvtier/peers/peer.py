"""One other host, as this one knows it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvtier.errors import OverQuota
from kvtier.index.breaker import Breaker
from kvtier.peers.base import PeerStatus
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
TRIAL = 1.0
"""Seconds for which one fetch tries out whether it is well again, before another may."""


class Peer:
    """Links to another host in one of its lives, and how it fares. Thread-safe.

    Args:
        host: its name.
        door: where it is reached.
        dialer: opens links.
        most: links at a time.
        clock: monotonic.

    Attributes:
        host, door: as above.
        breaker: closed while it is worth asking.
        under_way: bytes that are being fetched.
    """

    def __init__(self, host: str, door: str, dialer: Dialer, *, most: int, clock: Callable[[], float]) -> None:
        self.host = host
        self.door = door
        self.breaker = Breaker(clock, failures=1, pause=PAUSE, longest=LONGEST_PAUSE)
        self.under_way = 0
        self._dialer = dialer
        self._clock = clock
        self._lock = threading.Lock()
        self._free = threading.Semaphore(most)
        self._idle: list[Link] = []
        """Used last at the end."""
        self._open = 0
        self._pace = 0.0, 0.0
        self._came = 0, 0
        self._fault = ""
        self._tried = clock() - TRIAL
        self._closed = False

    def asks(self) -> bool:
        """Whether it is worth asking now: it fares well, or a pause is over and somebody may try it out."""
        return self.breaker.closed or self.breaker.due()

    def admits(self) -> bool:
        """Whether who calls this may ask it now; of those who would try it out, one at a time."""
        with self._lock:
            if self.breaker.closed or not self.breaker.due():
                return self.breaker.closed
            now = self._clock()
            if now - self._tried < TRIAL:
                return False
            self._tried = now
            return True

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

    def came(self, blocks: int, nbytes: int, seconds: float = 0.0) -> None:
        """Note what one link has carried, and in how many seconds if that tells its pace; the last few times count."""
        with self._lock:
            self._came = self._came[0] + blocks, self._came[1] + nbytes
            if nbytes >= LEAST_NBYTES and seconds > 0:
                known, each = self.slowness(), seconds / nbytes
                self._pace = self._clock(), 0.7 * known + 0.3 * each if known else each

    def succeeded(self) -> None:
        """Note that it answered as it should."""
        self._fault = ""
        self.breaker.succeeded()

    def failed(self, why: str, *, avoid: bool = True) -> None:
        """Note that it did not; avoid it for a while, longer each time."""
        self._fault = why
        if avoid:
            self.breaker.failed()

    def status(self) -> PeerStatus:
        """How it fares."""
        slowness = self.slowness()
        pause = 0.0 if self.breaker.closed else max(0.0, self.breaker.wait())
        pace = round(1 / slowness, 1) if slowness else 0.0
        return PeerStatus(self.host, self.door, *self._came, self.under_way, pace, self._open, pause, self._fault)

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
            link = self._take() or self._dial(until)
            try:
                yield link
            except BaseException:
                self._drop(link)
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
            self._drop(link)

    def _dial(self, until: float) -> Link:
        link = self._dialer.dial(self.door, until)
        with self._lock:
            self._open += 1
        return link

    def _drop(self, link: Link) -> None:
        link.close()
        with self._lock:
            self._open -= 1

    def _take(self) -> Link | None:
        """A link at rest that is as it was; the others are closed."""
        while True:
            with self._lock:
                link = self._idle.pop() if self._idle else None
            if link is None or (self._clock() - link.used < IDLE and link.quiet()):
                return link
            self._drop(link)

    def _put(self, link: Link) -> None:
        link.used = self._clock()
        with self._lock:
            if not self._closed:
                self._idle.append(link)
                return
        self._drop(link)
