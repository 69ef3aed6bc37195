"""What was asked for during the last hour, and how much of it could have been a hit at all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtier.hierarchy.sketch import Sketch

PART = 300.0
"""Seconds that are dropped together when they are too old."""
PARTS = 12


def part_of(when: float) -> int:
    """Number of the part of time that this belongs to, in seconds since the epoch."""
    return int(when // PART)


@dataclass(slots=True)
class _Part:
    asked: int = 0
    hits: Counter[str] = field(default_factory=Counter)
    seen: Sketch = field(default_factory=Sketch)


class Window:
    """Counts of an hour that moves on, in steps of some minutes; 200 KB. Not thread-safe."""

    def __init__(self, now: float) -> None:
        """Begin at this time, in seconds since the epoch."""
        self._began = now
        self._parts: dict[int, _Part] = {}

    def note(self, part: int, asked: int, hits: Mapping[str, int]) -> None:
        """So many blocks were asked for in a part of time, of which so many were hits, by tier."""
        here = self._parts.setdefault(part, _Part())
        here.asked += asked
        for tier, blocks in hits.items():
            here.hits[tier] += blocks

    def see(self, part: int, hashes: NDArray[np.uint64]) -> None:
        """These were."""
        self._parts.setdefault(part, _Part()).seen.add(hashes)

    def status(self, now: float, tiers: Iterable[str]) -> dict[str, Any]:
        """Blocks asked for, different ones among them, hits by tier, and the ceiling, as plain values.

        The ceiling is the hit ratio of a cache that keeps everything. What that had when the window began is not
        known: nothing, so that each block is a miss the first time; but it had what was a hit here.
        """
        latest = part_of(now)
        self._parts = {at: part for at, part in self._parts.items() if latest - PARTS < at <= latest}
        parts = list(self._parts.values())
        asked = sum(part.asked for part in parts)
        distinct = min(len(Sketch.union(part.seen for part in parts)), asked)
        hits = sum((part.hits for part in parts), Counter[str]())
        return {
            "seconds": max(0.0, min(now - self._began, now - (latest - PARTS + 1) * PART)),
            "asked": asked,
            "distinct": distinct,
            "hits": {tier: hits[tier] for tier in tiers},
            "ceiling": max(1 - distinct / asked, hits.total() / asked) if asked else 0.0,
        }
