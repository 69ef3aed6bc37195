"""One connection between two hosts that have proved themselves."""

from __future__ import annotations

import hmac
import socket
import ssl
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

from kvtier.errors import DeadlineExceeded, ProtocolMismatch, SessionUnavailable, Unauthenticated
from kvtier.peers import wire
from kvtier.peers.wire import HEAD, MAC_NBYTES, Kind

VECTORS = 512
"""Buffers that go out in one call; Linux takes 1,024."""


class Link:
    """Frames and payloads over a socket, plain or TLS; used by one thread at a time.

    Every call has a deadline, `until`, by the link's clock, and fails before it when nothing at all moves for `stall`
    seconds. After any failure the link is out of step: close it.

    Args:
        sock: connected.
        clock: monotonic.
        stall: seconds.

    Attributes:
        peer: name of the other host, once it has proved itself.
        used: when it was last put aside, by the clock.
    """

    def __init__(self, sock: socket.socket, clock: Callable[[], float], stall: float) -> None:
        self.peer = ""
        self.used = clock()
        self._sock = sock
        self._clock = clock
        self._stall = stall
        self._keys = b"", b""
        self._numbers = [0, 0]
        self._limited: float | None = None

    def agree(self, peer: str, sends: bytes, receives: bytes) -> Link:
        """Take the keys of both directions' frames, and the other host's name."""
        self.peer = peer
        self._keys = sends, receives
        return self

    def fileno(self) -> int:
        """For selectors."""
        return self._sock.fileno()

    def send(self, kind: Kind, body: bytes, until: float, payloads: Sequence[memoryview] = ()) -> None:
        """Send a frame, and payloads right out of their memory.

        Raises:
            DeadlineExceeded: the other host does not take it in time.
            SessionUnavailable: the connection is gone.
        """
        frame = wire.head(kind, len(body)) + body
        frame += wire.mac(self._keys[0], self._next(0), frame)
        self.say([memoryview(frame), *payloads], until)

    def receive(self, until: float, wait: float = 0.0) -> tuple[Kind, bytes]:
        """Read a frame; its first byte may come `wait` seconds later than the stall allows.

        Raises:
            DeadlineExceeded: it does not come in time.
            SessionUnavailable: the connection is gone.
            ProtocolMismatch: it is no frame, or the other host did not send it like this.
        """
        head = bytearray(HEAD.size)
        self.fill(memoryview(head), until, wait)
        kind, nbytes = wire.read_head(bytes(head))
        rest = bytearray(nbytes + MAC_NBYTES)
        self.fill(memoryview(rest), until)
        body = bytes(rest[:nbytes])
        mac = wire.mac(self._keys[1], self._next(1), bytes(head) + body)
        if not hmac.compare_digest(mac, rest[nbytes:]):
            raise ProtocolMismatch("a frame was changed on its way")
        return kind, body

    def say(self, views: Sequence[memoryview], until: float) -> None:
        """Send these bytes as they are. Raises like `send`."""
        vectored = not isinstance(self._sock, ssl.SSLSocket)
        waiting = [view for view in views if len(view)]
        at = 0
        with translated():
            while at < len(waiting):
                self._limit(self._left(until))
                sent = self._sock.sendmsg(waiting[at : at + VECTORS]) if vectored else self._sock.send(waiting[at])
                while at < len(waiting) and sent >= len(waiting[at]):
                    sent -= len(waiting[at])
                    at += 1
                if sent:
                    waiting[at] = waiting[at][sent:]

    def fill(self, into: memoryview, until: float, wait: float = 0.0) -> None:
        """Read exactly as many bytes as there is room, right into it. Raises like `receive`."""
        at = 0
        with translated():
            while at < len(into):
                self._limit(self._left(until, wait))
                got = self._sock.recv_into(into[at:])
                if not got:
                    raise SessionUnavailable("the other host closed the connection")
                at += got
                wait = 0.0

    def pending(self) -> bool:
        """Whether bytes have come that no selector tells of: TLS has them already."""
        return isinstance(self._sock, ssl.SSLSocket) and self._sock.pending() > 0

    def quiet(self) -> bool:
        """Whether it is still connected and nothing came that nobody asked for."""
        try:
            self._limit(0.0)
            if isinstance(self._sock, ssl.SSLSocket):
                self._sock.read(1)
            else:
                self._sock.recv(1, socket.MSG_PEEK)
        except (BlockingIOError, ssl.SSLWantReadError):
            return True
        except OSError:
            return False
        return False

    def cut(self) -> None:
        """End whatever another thread does on it."""
        with suppress(OSError):
            # Not the TLS socket's own, which would let its reader go on without TLS.
            socket.socket.shutdown(self._sock, socket.SHUT_RDWR)

    def close(self) -> None:
        """Close it; idempotent."""
        self._sock.close()

    def _next(self, direction: int) -> int:
        number = self._numbers[direction]
        self._numbers[direction] = number + 1
        return number

    def _limit(self, seconds: float) -> None:
        """Set the socket's own limit; mostly it is the stall, and stands already."""
        if seconds != self._limited:
            self._sock.settimeout(seconds)
            self._limited = seconds

    def _left(self, until: float, wait: float = 0.0) -> float:
        left = until - self._clock()
        if left <= 0:
            raise DeadlineExceeded("the other host did not answer in time")
        return min(left, self._stall + wait)


@contextmanager
def translated() -> Iterator[None]:
    """What sockets raise, in our own words."""
    try:
        yield
    except (TimeoutError, ssl.SSLWantReadError, ssl.SSLWantWriteError) as exc:
        raise DeadlineExceeded("the other host did not answer in time") from exc
    except (ssl.SSLEOFError, ssl.SSLZeroReturnError) as exc:
        raise SessionUnavailable("the other host closed the connection") from exc
    except ssl.SSLError as exc:
        raise Unauthenticated(f"TLS with the other host failed: {exc}") from exc
    except (OSError, ValueError) as exc:
        raise SessionUnavailable(f"the other host cannot be reached: {exc}") from exc
