"""Who has come in and not proved itself yet."""

from __future__ import annotations

import os
import socket
import ssl

from kvtier.errors import ProtocolMismatch
from kvtier.peers import handshake


class Guest:
    """A connection that has not proved itself; never blocks.

    Attributes:
        since: when it came.
    """

    def __init__(self, sock: socket.socket, secret: bytes, since: float) -> None:
        self.since = since
        self.sock = sock
        self._secret = secret
        self._said = b""
        self._challenged = b""
        self._heard = bytearray()

    def step(self) -> tuple[str, handshake.Keys] | None:
        """Go on with what has come; name and keys once it has proved itself.

        Raises:
            OSError: it is gone.
            KVTierError: it is no host of this fleet.
        """
        if isinstance(self.sock, ssl.SSLSocket) and self.sock.version() is None:
            self.sock.do_handshake()
        while True:
            want = handshake.PROOF_NBYTES if self._said else handshake.HELLO.size
            data = self.sock.recv(want - len(self._heard))
            if not data:
                raise ConnectionResetError("a guest left")
            self._heard += data
            if len(self._heard) < want:
                continue
            heard, self._heard = bytes(self._heard), bytearray()
            if self._said:
                keys = handshake.accept(self._secret, self._said, self._challenged, heard)
                return handshake.read_hello(self._said), keys
            self._greet(heard)

    def _greet(self, heard: bytes) -> None:
        try:
            handshake.read_hello(heard)
        except ProtocolMismatch:
            if heard.startswith(handshake.MAGIC):
                self.sock.send(handshake.refusal())
            raise
        self._challenged = handshake.challenge(self._secret, heard, os.urandom(handshake.NONCE_NBYTES))
        self._said = heard
        if self.sock.send(self._challenged) != len(self._challenged):
            raise ConnectionResetError("a guest does not listen")
