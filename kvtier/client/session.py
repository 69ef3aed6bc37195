"""What a connector's client needs from a host, whatever lies between them."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

SLOT = np.dtype([("offset", "<u8"), ("generation", "<u4"), ("nbytes", "<u4")])
"""One leased slot, packed as it travels: 16 bytes."""

GRANT = np.dtype([("offset", "<u8"), ("generation", "<u4"), ("state", "<u4")])
"""One answer to a reservation, packed as it travels: 16 bytes."""


class GrantState(IntEnum):
    """What became of one key of a reservation."""

    GRANTED = 0
    STORED = 1
    BUSY = 2
    REFUSED = 3


class TierNumber(IntEnum):
    """Tiers as they travel and as the index stores them."""

    GPU = 1
    CPU = 2
    NVME = 3


@dataclass(frozen=True, slots=True)
class Matched:
    """Answer to `match`.

    Attributes:
        lease: number to release; 0 when nothing is leased.
        slots: `SLOT` array of the leased blocks, in the order of the keys.
        staging: blocks beyond these that are being brought up and will be there on a later match.
        tiers: u8 array, the `TierNumber` that served each leased block (where it was when it was asked for).
    """

    lease: int
    slots: NDArray[Any]
    staging: int
    tiers: NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Reserved:
    """Answer to `reserve`.

    Attributes:
        ticket: number to commit or abort; 0 when nothing was granted.
        grants: `GRANT` array, as many as keys were asked for, in their order; after a refusal all are refused.
        reason: why it was refused; empty when it was not.
    """

    ticket: int
    grants: NDArray[Any]
    reason: str = ""


class Session(Protocol):
    """One client's connection to a host. Thread-safe. Keys are 34-byte block addresses, in chain order.

    Every call may raise `SessionUnavailable` or `DeadlineExceeded`; the client counts that as a miss or a refusal.

    Attributes:
        epoch: changes when the host restarted; what was leased or reserved before is void.
    """

    epoch: int

    def readable(self) -> NDArray[np.uint8]:
        """The arena, read-only."""
        ...

    def writable(self) -> NDArray[np.uint8]:
        """The arena, for writing into reserved slots only."""
        ...

    def generations(self) -> NDArray[np.uint32]:
        """Generation of the slot at each 4 KiB page of the arena (`offset // 4096`), read-only, live."""
        ...

    def match(self, keys: Sequence[bytes], wait: float) -> Matched:
        """Lease the longest prefix of `keys` that is in the arena, staging what lies in other tiers.

        Args:
            keys: addresses of a chain from its first block.
            wait: seconds to wait for blocks that must be staged first.
        """
        ...

    def release(self, lease: int) -> None:
        """Give a lease back; returns at once, never raises, idempotent."""
        ...

    def reserve(self, keys: Sequence[bytes], nbytes: Sequence[int], start: int) -> Reserved:
        """Reserve slots for the payloads of `keys[start:]`; `keys[:start]` are their ancestors, which are touched.

        Args:
            keys: addresses of a chain from its first block.
            nbytes: payload bytes of each key of `keys[start:]`.
            start: how many of the keys are ancestors.
        """
        ...

    def commit(self, ticket: int, written: Sequence[int]) -> list[bool]:
        """Make reserved blocks visible; what is not written is given back.

        Args:
            ticket: of `reserve`.
            written: positions (in the reservation's grants) whose slot holds a whole payload, header included.

        Returns:
            For each of `written`, whether it is now visible.
        """
        ...

    def move(self, keys: Sequence[bytes], tier: TierNumber, wait: float) -> int:
        """Move a chain's blocks to one tier and out of the faster ones; how many are there at the end."""
        ...

    def prefetch(self, keys: Sequence[bytes], tier: TierNumber) -> Future[int]:
        """Bring a chain's blocks up to `tier` in the background; how many are there at the end."""
        ...

    def inspect(self, keys: Sequence[bytes]) -> list[dict[str, Any] | None]:
        """For each key what the host knows of it, or None: tiers, nbytes, codec, created, last_access, hits."""
        ...

    def status(self) -> dict[str, Any]:
        """The host's status; see `kvtier.hierarchy.stats`."""
        ...

    def close(self) -> None:
        """End the session: leases are released, reservations given back; idempotent."""
        ...
