"""What hosts say to each other, byte for byte. Pure functions.

A connection begins with messages of fixed size (see `handshake`). Then everything is frames, little-endian:

    0  1  kind          1 welcome   2 fetch   3 blocks   4 offer   5 taken
    1  3  zero
    4  4  bytes of the body, at most `BODY_LIMIT`
    8  n  body
       16 MAC of the frame's number in its direction, its first 8 bytes and its body

    welcome  u8 0 for yes, 1 for no (too many connections)
    fetch    u32 milliseconds until nobody waits any more, u32 milliseconds for which blocks may be brought up,
             then ITEM for each block
    blocks   u32 place of its first block in the request, then u8 a block (`Status`); behind its MAC come the payloads
             of all blocks that are SENT, with nothing between them; as many frames as it takes
    offer    u8 length, an address and port, then ITEM for each block
    taken    u32 how many

Payloads have no MAC: they carry checksums against accidents, and who must fear that they are changed on their way uses
TLS.
"""

from __future__ import annotations

import hmac
import struct
from collections.abc import Sequence
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from kvtier.block import ADDRESS_NBYTES
from kvtier.errors import ProtocolMismatch

HEAD = struct.Struct("<B3xI")
TIMES = struct.Struct("<II")
NUMBER = struct.Struct("<I")
MAC_NBYTES = 16
ITEM = np.dtype([("key", f"V{ADDRESS_NBYTES}"), ("nbytes", "<u4")])
"""One block of a request."""
ITEMS_LIMIT = 4096
"""Blocks of one request."""
BODY_LIMIT = 256 + ITEMS_LIMIT * ITEM.itemsize


class Kind(IntEnum):
    """What a frame is."""

    WELCOME = 1
    FETCH = 2
    BLOCKS = 3
    OFFER = 4
    TAKEN = 5


class Status(IntEnum):
    """What became of one block of a request."""

    SENT = 0
    ABSENT = 1


def head(kind: Kind, nbytes: int) -> bytes:
    """First bytes of a frame."""
    return HEAD.pack(kind, nbytes)


def read_head(data: bytes) -> tuple[Kind, int]:
    """Kind of a frame and bytes of its body.

    Raises:
        ProtocolMismatch: no frame begins like this.
    """
    kind, nbytes = HEAD.unpack(data)
    if data[1:4] != b"\0\0\0" or not Kind.WELCOME <= kind <= Kind.TAKEN or nbytes > BODY_LIMIT:
        raise ProtocolMismatch(f"another host sent what is no frame: kind {kind}, {nbytes} bytes")
    return Kind(kind), nbytes


def mac(key: bytes, number: int, frame: bytes) -> bytes:
    """Authenticate the frame with this number in its direction, head and body."""
    return hmac.digest(key, number.to_bytes(8, "little") + frame, "sha256")[:MAC_NBYTES]


def items(keys: Sequence[bytes], nbytes: NDArray[np.int64]) -> bytes:
    """Blocks of a request: at most `ITEMS_LIMIT`, each below 4 GiB."""
    packed = np.empty(len(keys), ITEM)
    packed["key"] = np.frombuffer(b"".join(keys), f"V{ADDRESS_NBYTES}")
    packed["nbytes"] = nbytes
    return packed.tobytes()


def read_items(data: bytes) -> tuple[list[bytes], NDArray[np.int64]]:
    """Keys and sizes.

    Raises:
        ProtocolMismatch: there are none, too many, or parts of one.
    """
    if len(data) % ITEM.itemsize or not 0 < len(data) <= ITEMS_LIMIT * ITEM.itemsize:
        raise ProtocolMismatch(f"another host named blocks in {len(data)} bytes; {ITEM.itemsize} are one")
    packed = np.frombuffer(data, ITEM)
    return [key.tobytes() for key in packed["key"]], packed["nbytes"].astype(np.int64)


def fetch(seconds: float, wait: float, blocks: bytes) -> bytes:
    """Body of a request for blocks; `blocks` as `items` has them."""
    return TIMES.pack(_milliseconds(seconds), _milliseconds(wait)) + blocks


def read_fetch(body: bytes) -> tuple[float, float, list[bytes], NDArray[np.int64]]:
    """Seconds until nobody waits any more, seconds for bringing blocks up, keys and sizes.

    Raises:
        ProtocolMismatch: it is no such body.
    """
    if len(body) < TIMES.size:
        raise ProtocolMismatch(f"a request for blocks has {len(body)} bytes")
    seconds, wait = TIMES.unpack_from(body)
    return seconds / 1000, wait / 1000, *read_items(body[TIMES.size :])


def blocks(first: int, statuses: bytes) -> bytes:
    """Body of an answer to a request for blocks."""
    return NUMBER.pack(first) + statuses


def read_blocks(body: bytes, first: int, most: int) -> bytes:
    """What became of the next blocks of a request, a byte (`Status`) each.

    Args:
        body: of the frame.
        first: place of the block that is next.
        most: blocks that are not answered yet.

    Raises:
        ProtocolMismatch: it answers no, or other, or more blocks, or with what is no status.
    """
    count = len(body) - NUMBER.size
    if not 0 < count <= most or NUMBER.unpack_from(body)[0] != first or max(body[NUMBER.size :]) > Status.ABSENT:
        raise ProtocolMismatch(
            f"another host answered {count} blocks where {most} from the {first}th on were asked for"
        )
    return body[NUMBER.size :]


def offer(door: str, blocks: bytes) -> bytes:
    """Body of an offer; `door` of at most 255 bytes."""
    where = door.encode()
    return bytes([len(where)]) + where + blocks


def read_offer(body: bytes) -> tuple[str, list[bytes], NDArray[np.int64]]:
    """Who offers, keys and sizes.

    Raises:
        ProtocolMismatch: it is no such body.
    """
    end = 1 + body[0] if body else 1
    try:
        door = body[1:end].decode("ascii")
    except UnicodeDecodeError as exc:
        raise ProtocolMismatch("an offer's address is not ASCII") from exc
    return door, *read_items(body[end:])


def read_number(body: bytes) -> int:
    """What a `taken` says.

    Raises:
        ProtocolMismatch: it is no such body.
    """
    if len(body) != NUMBER.size:
        raise ProtocolMismatch(f"a number has {NUMBER.size} bytes, not {len(body)}")
    return int(NUMBER.unpack(body)[0])


def _milliseconds(seconds: float) -> int:
    return min(max(int(seconds * 1000), 0), 2**32 - 1)
