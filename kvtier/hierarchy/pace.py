"""How fast blocks come from each tier, and whether loading them is worth it."""

from __future__ import annotations

import statistics
from collections import deque

import numpy as np
from numpy.typing import NDArray

from kvtier.tiers.base import TierNumber

TRANSFERS, ENOUGH = 9, 3
"""Transfers that count, and without how many nothing is said."""
FRESH = 60.0
"""Seconds for which a transfer counts. A tier that is never asked because it was slow would stay slow for ever."""
LEAST_NBYTES = 1 << 20
"""Smaller transfers say more about calls than about bandwidth."""


class Pace:
    """Seconds a byte by tier: the middle one of the last transfers, so that one that hung counts for nothing.

    Not thread-safe: used under the hierarchy's lock.
    """

    def __init__(self) -> None:
        self._last: dict[int, deque[tuple[float, float]]] = {}

    def observe(self, tier: TierNumber, nbytes: int, seconds: float, now: float) -> None:
        """So many bytes came from a tier in this time; from the CPU tier they were decoded in it."""
        if nbytes >= LEAST_NBYTES and seconds > 0:
            self._last.setdefault(tier, deque(maxlen=TRANSFERS)).append((now, seconds / nbytes))

    def slowness(self, tier: int, now: float) -> float:
        """Seconds a byte; 0 when too little came from there of late."""
        late = [each for seen, each in self._last.get(tier, ()) if 0 <= now - seen <= FRESH]
        return statistics.median_low(late) if len(late) >= ENOUGH else 0.0


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
