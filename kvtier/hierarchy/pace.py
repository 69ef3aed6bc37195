"""How fast blocks come from each tier, and whether loading them is worth it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvtier.tiers.base import TierNumber

WEIGHT = 0.2
"""Of one observation in the average."""
FRESH = 60.0
"""Seconds for which an average counts. A tier that is never asked because it was slow once would stay slow for ever."""
LEAST_NBYTES = 1 << 20
"""Smaller transfers say more about calls than about bandwidth."""


class Pace:
    """Seconds a byte by tier, averaged over the last transfers. Not thread-safe: used under the hierarchy's lock."""

    def __init__(self) -> None:
        self._slowness: dict[int, tuple[float, float]] = {}

    def observe(self, tier: TierNumber, nbytes: int, seconds: float, now: float) -> None:
        """So many bytes came from a tier in this time; from the CPU tier they were decoded in it."""
        if nbytes < LEAST_NBYTES or seconds <= 0:
            return
        known, seen = self.slowness(tier, now), seconds / nbytes
        self._slowness[tier] = (known + WEIGHT * (seen - known) if known else seen), now

    def slowness(self, tier: int, now: float) -> float:
        """Seconds a byte; 0 when nothing came from there of late."""
        seconds, seen = self._slowness.get(tier, (0.0, 0.0))
        return seconds if now - seen <= FRESH else 0.0


def worth(tokens: NDArray[np.int64], seconds: NDArray[np.float64], prefill: float) -> int:
    """How many blocks of a chain, from the first on, an engine should load rather than compute.

    Loading the first n and computing the rest takes the least time for the n that is returned, the largest of equals.

    Args:
        tokens: of each block.
        seconds: that each takes to load.
        prefill: tokens a second that the engine computes.
    """
    gained = np.concatenate(([0.0], np.cumsum(tokens / prefill - seconds)))
    return int(len(gained) - 1 - np.argmax(gained[::-1]))
