"""What the peer transport needs of the host that it serves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvtier.index.base import Node, Replica
from kvtier.tiers.base import Slots, Tier


@dataclass(frozen=True, slots=True)
class Lent:
    """Blocks that are held in the arena for another host.

    Attributes:
        lease: the lender's own number for it; 0 when nothing is held.
        slots: in the order of the keys that were asked for; offset -1 where a block is not there.
    """

    lease: int
    slots: Slots

    @classmethod
    def nothing(cls, count: int) -> Lent:
        """None of so many blocks is there."""
        return cls(0, Slots(np.full(count, -1, np.int64), np.zeros(count, np.int64)))


class Lender(Protocol):
    """A host's blocks, for other hosts of its fleet. Thread-safe; nothing here raises."""

    def lend(self, peer: str, keys: Sequence[bytes], nbytes: NDArray[np.int64], wait: float) -> Lent:
        """Hold in the arena what is there of these blocks, until it is given back.

        Nobody changes or moves a slot that is lent, and who lends is the process that grants slots: what was sent out
        of one needs no look at its generation.

        Args:
            peer: name of the host that asks.
            keys: 34-byte addresses.
            nbytes: of their payloads; a block of another size is not there.
            wait: seconds for which blocks of other tiers may be brought up; what has not come then is not there.
        """
        ...

    def give_back(self, lent: Lent) -> None:
        """Hold these no longer; each `lend` is followed by one, however its connection ended."""
        ...

    def offered(self, peer: str, keys: Sequence[bytes], nbytes: NDArray[np.int64], door: str) -> int:
        """Hear that the host behind `door` has these and wants this one to keep a copy. Answers at once.

        Returns:
            How many will be fetched, by a background thread; 0 where there is no room, or no interest.
        """
        ...


@dataclass(frozen=True, slots=True)
class PeerStatus:
    """How another host fares.

    Attributes:
        host: its name.
        door: where it is reached.
        blocks: payloads that came from it.
        bytes: of these.
        under_way: bytes that are being fetched.
        bytes_per_second: on one link, of late; 0 when nothing came.
        links: that are open.
        avoided: seconds for which it is not asked; 0 when it is.
        fault: what failed last, while nothing has succeeded since; empty when it is well.
    """

    host: str
    door: str
    blocks: int
    bytes: int
    under_way: int
    bytes_per_second: float
    links: int
    avoided: float
    fault: str


class OtherHosts(Tier, Protocol):
    """All other hosts as a tier, which is only read; it `contains` what was found and can be asked for now."""

    def found(self, keys: Sequence[bytes], replicas: Sequence[tuple[Replica, ...]], nodes: Mapping[int, Node]) -> None:
        """Remember, for `read`, where these are; `nodes`: the other hosts, by number."""
        ...

    def offer(self, node: Node, keys: Sequence[bytes], nbytes: NDArray[np.int64], until: float) -> int:
        """Ask another host to fetch blocks from here by itself; how many it will."""
        ...

    def status(self) -> list[PeerStatus]:
        """How each host fares that was asked, or may be."""
        ...
