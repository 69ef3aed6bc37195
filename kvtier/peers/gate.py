"""Who comes in, and who waits: one thread for all connections that are silent."""

from __future__ import annotations

import selectors
import socket
import ssl
import threading
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from kvtier.errors import ConfigError, KVTierError
from kvtier.peers import handshake
from kvtier.peers.guest import Guest
from kvtier.peers.link import Link
from kvtier.peers.tls import Tls
from kvtier.peers.wire import Kind

BREATH = 0.1
"""Seconds for which nobody is let in after the process ran out of descriptors."""


@dataclass(frozen=True, slots=True)
class GateLimits:
    """How much others may take.

    Attributes:
        guests: connections that have not proved themselves; the oldest leaves for the next one.
        links: connections that have; for the next one the longest at rest leaves, if one is.
        links_each: of them, by one host.
        hello: seconds for a guest to prove itself.
        idle: seconds for which a connection may be silent.
        stall: seconds; see `Link`.
    """

    guests: int = 256
    links: int = 256
    links_each: int = 16
    hello: float = 5.0
    idle: float = 300.0
    stall: float = 2.0


class Gate:
    """Takes connections in, and hands over those that have something to say. Its thread starts at once.

    Args:
        listen: address and port; port 0 for any.
        secret: the fleet's.
        tls: None for plain connections.
        serve: is handed a link that has something to say; gives it back by `rest`, or drops it. Must not block.
        clock: monotonic.
        limits: what others may take.

    Attributes:
        address: where it listens.
        counters: events since it was opened.

    Raises:
        ConfigError: it cannot listen there.
    """

    def __init__(
        self,
        listen: tuple[str, int],
        secret: bytes,
        *,
        tls: Tls | None,
        serve: Callable[[Link], None],
        clock: Callable[[], float],
        limits: GateLimits,
    ) -> None:
        self._secret = handshake.check(secret)
        self._listener = _listen(listen)
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self.counters: Counter[str] = Counter()
        self._tls = tls
        self._serve = serve
        self._clock = clock
        self._limits = limits
        self._selector = selectors.DefaultSelector()
        self._bell, self._wakes = socket.socketpair()
        self._guests: dict[Guest, None] = {}
        """Oldest first."""
        self._resting: dict[Link, None] = {}
        """Longest at rest first."""
        self._links: set[Link] = set()
        self._each: Counter[str] = Counter()
        self._back: deque[Link] = deque()
        self._lock = threading.Lock()
        """Guards what workers change too: `_links`, `_each`, and that nothing comes back once it is closed."""
        self._shut_until = 0.0
        self._closed = False
        for sock in (self._listener, self._wakes):
            sock.settimeout(0)
            self._selector.register(sock, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="kvtier-peers", daemon=True)
        self._thread.start()

    def rest(self, link: Link) -> None:
        """Watch it again. Thread-safe."""
        with self._lock:
            if not self._closed:
                self._back.append(link)
                self._ring()
                return
        self.drop(link)

    def drop(self, link: Link) -> None:
        """Close it. Thread-safe."""
        with self._lock:
            if link in self._links:
                self._links.discard(link)
                self._each[link.peer] -= 1
                self._each += Counter()
        link.close()

    @property
    def connections(self) -> tuple[int, int]:
        """How many guests and how many links there are."""
        return len(self._guests), len(self._links)

    def close(self) -> None:
        """Let nobody in any more and cut who is in; idempotent. Links in use are the user's to drop."""
        with self._lock:
            self._closed = True
            self._ring()
        self._thread.join()
        with self._lock:
            for link in self._links:
                link.cut()

    def _ring(self) -> None:
        with suppress(OSError):
            self._bell.send(b"\0")

    def _run(self) -> None:
        while not self._closed:
            for key, _ in self._selector.select(BREATH if self._shut_until else 1.0):
                if key.fileobj is self._listener:
                    self._admit()
                elif key.fileobj is self._wakes:
                    self._take_back()
                elif isinstance(key.data, Guest):
                    self._step(key.data)
                else:
                    self._wake(key.data)
            self._sweep()
        self._end()

    def _admit(self) -> None:
        """Let some in; a flood pushes out its own."""
        for _ in range(64):
            try:
                sock, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError:
                self.counters["no_descriptors"] += 1
                self._selector.unregister(self._listener)
                self._shut_until = self._clock() + BREATH
                return
            if len(self._guests) >= self._limits.guests:
                self.counters["guests_pushed_out"] += 1
                self._dismiss(next(iter(self._guests)))
            self._meet(sock)

    def _meet(self, sock: socket.socket) -> None:
        try:
            sock.settimeout(0)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._tls is not None:
                sock = self._tls.server().wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
        except OSError:
            sock.close()
            return
        guest = Guest(sock, self._secret, self._clock())
        self._guests[guest] = None
        self._selector.register(sock, selectors.EVENT_READ, guest)

    def _step(self, guest: Guest) -> None:
        if guest not in self._guests:
            return
        try:
            known = guest.step()
        except (BlockingIOError, ssl.SSLWantReadError):
            return
        except (OSError, KVTierError) as exc:
            self.counters["strangers"] += not isinstance(exc, ConnectionResetError)
            self._dismiss(guest)
            return
        if known is not None:
            self._welcome(guest, *known)

    def _dismiss(self, guest: Guest) -> None:
        self._forget(guest)
        guest.sock.close()

    def _forget(self, guest: Guest) -> None:
        self._selector.unregister(guest.sock)
        del self._guests[guest]

    def _welcome(self, guest: Guest, name: str, keys: handshake.Keys) -> None:
        self._forget(guest)
        link = Link(guest.sock, self._clock, self._limits.stall).agree(name, keys.server, keys.client)
        if len(self._links) >= self._limits.links and self._resting:
            self.counters["links_pushed_out"] += 1
            self._part(next(iter(self._resting)))
        with self._lock:
            full = len(self._links) >= self._limits.links or self._each[name] >= self._limits.links_each
            if not full:
                self._links.add(link)
                self._each[name] += 1
        self.counters["turned_away"] += full
        try:
            # A few bytes on a connection that has carried next to nothing: they go out at once.
            link.send(Kind.WELCOME, bytes([full]), self._clock() + BREATH)
        except KVTierError:
            self.drop(link)
            return
        if full:
            link.close()
        else:
            self._watch(link)

    def _watch(self, link: Link) -> None:
        link.used = self._clock()
        if link.pending():
            self._serve(link)
            return
        try:
            self._selector.register(link, selectors.EVENT_READ, link)
        except (ValueError, OSError):
            self.drop(link)
            return
        self._resting[link] = None

    def _wake(self, link: Link) -> None:
        if link not in self._resting:  # pushed out a moment ago
            return
        self._unwatch(link)
        self._serve(link)

    def _unwatch(self, link: Link) -> None:
        self._selector.unregister(link)
        del self._resting[link]

    def _part(self, link: Link) -> None:
        """Close one that rests."""
        self._unwatch(link)
        self.drop(link)

    def _take_back(self) -> None:
        with suppress(BlockingIOError):
            self._wakes.recv(4096)
        while self._back:
            self._watch(self._back.popleft())

    def _sweep(self) -> None:
        now = self._clock()
        if self._shut_until and now >= self._shut_until:
            self._shut_until = 0.0
            self._selector.register(self._listener, selectors.EVENT_READ)
        while self._guests and now - (guest := next(iter(self._guests))).since > self._limits.hello:
            self.counters["guests_too_slow"] += 1
            self._dismiss(guest)
        while self._resting and now - (link := next(iter(self._resting))).used > self._limits.idle:
            self._part(link)

    def _end(self) -> None:
        for guest in list(self._guests):
            self._dismiss(guest)
        for link in list(self._resting):
            self._part(link)
        while self._back:
            self.drop(self._back.popleft())
        self._selector.close()
        for sock in (self._listener, self._bell, self._wakes):
            sock.close()


def _listen(listen: tuple[str, int]) -> socket.socket:
    family = socket.AF_INET6 if ":" in listen[0] else socket.AF_INET
    try:
        return socket.create_server(listen, family=family, backlog=1024)
    except (OSError, OverflowError) as exc:
        raise ConfigError(
            f"other hosts cannot be served at {listen[0]}:{listen[1]}: {exc}; set an address of this host and a free "
            "port"
        ) from exc
