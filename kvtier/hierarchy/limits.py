"""How much one session may hold, when old blocks move down, and which."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one host.

    Attributes:
        session_leased: bytes that one session may have leased.
        session_reserved: bytes that one session may have reserved.
        staging_reserve: part of the CPU tier that saves leave to blocks that come up from other tiers.
        high, low: watermarks of the CPU tier, as parts of its capacity.
        pinned: part of the CPU tier that `pin` may keep from eviction.
        lent: part of the CPU tier that other hosts may be reading at once, in more than one request.
    """

    session_leased: int
    session_reserved: int
    staging_reserve: float = 0.05
    high: float = 0.9
    low: float = 0.8
    pinned: float = 0.25
    lent: float = 0.25

    @classmethod
    def of(cls, capacity: int, *, high: float = 0.9, low: float = 0.8, pinned: float = 0.25) -> Limits:
        """The defaults for a CPU tier of this size."""
        return cls(capacity // 10 * 9, capacity // 2, high=high, low=low, pinned=pinned)


@dataclass(frozen=True, slots=True)
class Rules:
    """What leaves the CPU tier first, and what of it is written to NVMe.

    Attributes:
        policy: name of the CPU tier's eviction policy.
        admission: rule of `kvtier.eviction.admission.Admission`.
        endurance: bytes that NVMe may write a day; 0 for no limit.
        replicate: hits a minute from which on a block is offered to a second host; 0 for never.
    """

    policy: str = "lru"
    admission: str = "auto"
    endurance: int = 0
    replicate: int = 0
