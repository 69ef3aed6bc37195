"""How two hosts prove to each other that they know the fleet's secret, without telling it. Pure functions.

    client                                             server
      hello      magic, version, name, nonce   ->
                                               <-      challenge  magic, version, nonce, proof
      proof                                    ->
                                               <-      welcome, the first frame

    proof of X  = HMAC(secret, "kvtier peer X", hello, challenge without its proof)
    key of X    = HMAC(secret, "kvtier peer frames of X", the same)

Both nonces are fresh, so nothing can be played again, and the two proofs differ, so none can be thrown back. Who only
passes a handshake on has no keys, and so cannot send a frame. A server proves itself to whoever asks, which tells
nothing about a secret of 128 random bits or more.
"""

from __future__ import annotations

import hmac
import struct
from dataclasses import dataclass, field

from kvtier.errors import ConfigError, ProtocolMismatch, Unauthenticated

MAGIC = b"KVTPEERS"
VERSION = 1
HELLO = struct.Struct("<8sHxB4x32s64s")
CHALLENGE = struct.Struct("<8sH6x32s32s")
PROOF_NBYTES = 32
NONCE_NBYTES = 32
NAME_LIMIT = 64
SECRET_LEAST = 16


@dataclass(frozen=True, slots=True)
class Keys:
    """What the frames of one connection are authenticated with.

    Attributes:
        client: of frames that the client sends.
        server: of frames that the server sends.
    """

    client: bytes = field(repr=False)
    server: bytes = field(repr=False)


def check(secret: bytes) -> bytes:
    """Return the secret.

    Raises:
        ConfigError: it is too short to be one.
    """
    if len(secret) < SECRET_LEAST:
        raise ConfigError(f"the fleet's secret has {len(secret)} bytes; give at least {SECRET_LEAST} random ones")
    return secret


def hello(name: str, nonce: bytes) -> bytes:
    """A client's first message; of a long name the beginning is told."""
    told = name.encode()[:NAME_LIMIT].decode(errors="ignore").encode()
    return HELLO.pack(MAGIC, VERSION, len(told), nonce, told)


def read_hello(data: bytes) -> str:
    """Name of the client.

    Raises:
        ProtocolMismatch: it is no kvtier host, or one of another version.
    """
    magic, version, size, _, name = HELLO.unpack(data)
    _check(magic, version)
    try:
        return str(name[:size].decode()) or "unnamed"
    except UnicodeDecodeError as exc:
        raise ProtocolMismatch("the name of a host is not UTF-8") from exc


def challenge(secret: bytes, said: bytes, nonce: bytes) -> bytes:
    """A server's answer to this hello."""
    front = CHALLENGE.pack(MAGIC, VERSION, nonce, b"")[:-PROOF_NBYTES]
    return front + _proof(secret, b"server", said, front)


def refusal() -> bytes:
    """A server's answer to a hello of another version: it tells its own."""
    return CHALLENGE.pack(MAGIC, VERSION, b"", b"")


def answer(secret: bytes, said: bytes, challenged: bytes) -> tuple[bytes, Keys]:
    """A client's proof, once the server has given its own; and the keys.

    Raises:
        ProtocolMismatch: that is no kvtier host, or one of another version.
        Unauthenticated: it does not know the secret.
    """
    magic, version, _, proof = CHALLENGE.unpack(challenged)
    _check(magic, version)
    front = challenged[:-PROOF_NBYTES]
    if not hmac.compare_digest(proof, _proof(secret, b"server", said, front)):
        raise Unauthenticated("the other host has another fleet secret; give all hosts of a fleet the same")
    return _proof(secret, b"client", said, front), _keys(secret, said, front)


def accept(secret: bytes, said: bytes, challenged: bytes, proof: bytes) -> Keys:
    """Keys for the client that gave this proof.

    Raises:
        Unauthenticated: it does not know the secret.
    """
    front = challenged[:-PROOF_NBYTES]
    if not hmac.compare_digest(proof, _proof(secret, b"client", said, front)):
        raise Unauthenticated("the other host has another fleet secret; give all hosts of a fleet the same")
    return _keys(secret, said, front)


def _check(magic: bytes, version: int) -> None:
    if magic != MAGIC:
        raise ProtocolMismatch("who answers there is no kvtier host")
    if version != VERSION:
        raise ProtocolMismatch(
            f"the other host speaks version {version} between hosts, this one {VERSION}; run one kvtier release"
        )


def _proof(secret: bytes, who: bytes, said: bytes, front: bytes) -> bytes:
    return hmac.digest(secret, b"kvtier peer " + who + b"\0" + said + front, "sha256")


def _keys(secret: bytes, said: bytes, front: bytes) -> Keys:
    return Keys(_proof(secret, b"frames of client", said, front), _proof(secret, b"frames of server", said, front))
