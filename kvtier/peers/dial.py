"""How a host reaches another."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Callable

from kvtier.errors import DeadlineExceeded, OverQuota, ProtocolMismatch, SessionUnavailable
from kvtier.peers import handshake
from kvtier.peers.link import Link, translated
from kvtier.peers.tls import Tls
from kvtier.peers.wire import Kind


class Dialer:
    """Opens links to doors. Thread-safe.

    Args:
        name: of this host.
        secret: the fleet's.
        tls: None for plain connections.
        clock: monotonic.
        stall: seconds; see `Link`.
    """

    def __init__(self, name: str, secret: bytes, tls: Tls | None, clock: Callable[[], float], stall: float) -> None:
        self._name = name
        self._secret = handshake.check(secret)
        self._tls = tls
        self._clock = clock
        self._stall = stall

    def dial(self, door: str, until: float) -> Link:
        """Open a link to a door, "ADDRESS:PORT".

        Raises:
            SessionUnavailable: nobody answers there.
            DeadlineExceeded: not in time.
            Unauthenticated: it does not know the secret, or its certificate is of another authority.
            ProtocolMismatch: it is no kvtier host, or one of another version.
            OverQuota: it takes no more connections.
        """
        address = parse_door(door)
        with translated():
            sock = socket.create_connection(address, timeout=self._left(until))
        link = Link(sock, self._clock, self._stall)
        try:
            with translated():
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                sock.settimeout(self._left(until))
                if self._tls is not None:
                    link = Link(self._tls.client().wrap_socket(sock), self._clock, self._stall)
            return self._introduce(link, door, until)
        except BaseException:
            link.close()
            raise

    def _introduce(self, link: Link, door: str, until: float) -> Link:
        said = handshake.hello(self._name, os.urandom(handshake.NONCE_NBYTES))
        link.say([memoryview(said)], until)
        challenged = bytearray(handshake.CHALLENGE.size)
        link.fill(memoryview(challenged), until)
        proof, keys = handshake.answer(self._secret, said, bytes(challenged))
        link.say([memoryview(proof)], until)
        link.agree(door, keys.client, keys.server)
        kind, body = link.receive(until)
        if kind is not Kind.WELCOME or len(body) != 1:
            raise ProtocolMismatch("the other host does not welcome anybody")
        if body[0]:
            raise OverQuota("the other host takes no more connections")
        return link

    def _left(self, until: float) -> float:
        left = until - self._clock()
        if left <= 0:
            raise DeadlineExceeded("there was no time left to connect")
        return min(left, self._stall)


def parse_door(door: str) -> tuple[str, int]:
    """Address and port of a door. Names are not looked up: that has no deadline.

    Raises:
        SessionUnavailable: it is none.
    """
    address, _, port = door.rpartition(":")
    try:
        return str(ipaddress.ip_address(address.strip("[]"))), int(port)
    except ValueError as exc:
        raise SessionUnavailable(f"{door!r} is no address and port that a host can be reached at") from exc
