"""What the hierarchy answers, in process and over the door."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

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


@dataclass(frozen=True, slots=True)
class Matched:
    """Answer to `match`.

    Attributes:
        lease: number to release; 0 when nothing is leased.
        slots: `SLOT` array of the leased blocks, in the order of the keys.
        staging: blocks beyond these that are being brought up and will be there on a later match.
        tiers: u8 array, the `TierNumber` that served each leased block (where it was when it was asked for).
        inside: for each slot whether it is one of the GPU tier's memory, and not of the arena.
        device: epoch of the GPU tier's memory that can be attached now; 0 for none.
    """

    lease: int
    slots: NDArray[Any]
    staging: int
    tiers: NDArray[np.uint8]
    inside: NDArray[np.bool_]
    device: int = 0

    @classmethod
    def nothing(cls) -> Matched:
        """No block of it is there."""
        return cls(0, np.empty(0, SLOT), 0, np.empty(0, np.uint8), np.empty(0, np.bool_))


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


@dataclass(frozen=True, slots=True)
class Place:
    """What one host has of a chain.

    Attributes:
        host: its name.
        here: whether it is the host that was asked.
        blocks: of the chain that it has, from the first on.
        tiers: how many of these are best in each tier, by the tier's name.
    """

    host: str
    here: bool
    blocks: int
    tiers: dict[str, int]


@dataclass(frozen=True, slots=True)
class Placement:
    """Answer to `where`.

    Attributes:
        places: hosts that have something of it, the longest prefix first.
        complete: whether other hosts were looked up; False when the index did not answer.
    """

    places: tuple[Place, ...]
    complete: bool = True
