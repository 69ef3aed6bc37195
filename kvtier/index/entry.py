"""How the index stores one block's replicas.

A value is one version byte and 11 bytes a replica, little-endian, so two replicas take 23 of the 44 bytes that Redis
keeps in the small kind of string object:

     0  1  version
     1  2  node              \
     3  4  incarnation        |  again for each replica
     7  1  tier               |
     8  4  payload bytes     /

The `owner` of an entry is its first 6 bytes, the `body` its last 5.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

from kvtier.errors import UsageError
from kvtier.index.base import Life, Replica

VERSION = 1
ENTRY = struct.Struct("<HIBI")
OWNER = struct.Struct("<HI")
BODY = struct.Struct("<BI")

DECODED_LIMIT = 8192


def pack_owner(life: Life) -> bytes:
    """First 6 bytes of the entries of one life of a host.

    Raises:
        UsageError: the numbers do not fit.
    """
    if not (0 < life.node < 1 << 16 and 0 < life.incarnation < 1 << 32):
        raise UsageError(f"node {life.node} must be 1 to 65535 and incarnation {life.incarnation} 1 to 4294967295")
    return OWNER.pack(life.node, life.incarnation)


def pack_body(tier: int, nbytes: int) -> bytes:
    """Last 5 bytes of an entry.

    Raises:
        UsageError: the numbers do not fit.
    """
    if not (0 <= tier < 1 << 8 and 0 <= nbytes < 1 << 32):
        raise UsageError(f"tier {tier} must be below 256 and a payload below 4 GiB; this one has {nbytes} bytes")
    return BODY.pack(tier, nbytes)


def unpack(value: bytes) -> list[Replica]:
    """Replicas in a value; none when it is not one that this version wrote."""
    if len(value) % ENTRY.size != 1 or value[0] != VERSION:
        return []
    return [Replica(*entry) for entry in ENTRY.iter_unpack(memoryview(value)[1:])]


class LiveReplicas(dict[bytes | None, tuple[Replica, ...]]):
    """Values of the index, decoded against one state of the node table and remembered.

    Blocks of one host and one size have equal values, so that most of a lookup's are found here. `None`, which Redis
    answers for an absent key, is an entry too.

    Attributes:
        live: incarnation of each live node.
    """

    def __init__(self, live: dict[int, int], newcomer: Callable[[int, int], None]) -> None:
        """Take the live incarnations, and whom to tell of a node's life that the table does not know yet."""
        super().__init__()
        self.live = live
        self._newcomer = newcomer

    def __missing__(self, value: bytes | None) -> tuple[Replica, ...]:
        if len(self) >= DECODED_LIMIT:
            self.clear()
        found = []
        for replica in unpack(value or b""):
            current = self.live.get(replica.node, 0)
            if replica.incarnation == current:
                found.append(replica)
            elif replica.incarnation > current:
                self._newcomer(replica.node, replica.incarnation)
        live = self[value] = tuple(found)
        return live
