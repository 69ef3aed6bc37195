"""Plain counters of one host, which the exporter and the status read."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kvtier.tiers.base import OWN

MATCH_BUCKETS = (50e-6, 1e-4, 2.5e-4, 5e-4, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)
SECONDS_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
AGE_BUCKETS = (1.0, 10.0, 60.0, 300.0, 900.0, 3600.0, 14_400.0, 43_200.0, 86_400.0, 259_200.0, 604_800.0, 2_592_000.0)
"""Upper bounds of the histograms: of matches, of other seconds, and of ages, from a second to a month."""
WAYS = (("cpu", "nvme"), ("cpu", "gpu"), ("gpu", "cpu"), ("nvme", "cpu"), ("peer", "cpu"))
"""Between which tiers blocks are copied."""
LONGEST_SAVED = 3600.0
"""Seconds of computing that one answer saves at most: a client may say of itself anything."""
MOST_RAW = 256
"""Times its stored bytes that a block's KV takes at most, as a client says."""


@dataclass(slots=True)
class Histogram:
    """Counts of observed values by bucket.

    Attributes:
        bounds: the upper bound of each bucket but the last, which has none.
        buckets: how many were in each and in none before.
        total: sum of the values.
    """

    bounds: tuple[float, ...] = SECONDS_BUCKETS
    buckets: list[int] = field(default_factory=list)
    total: float = 0.0

    def __post_init__(self) -> None:
        self.buckets = self.buckets or [0] * (len(self.bounds) + 1)

    def observe(self, value: float) -> None:
        """Count one observation."""
        self.buckets[bisect_left(self.bounds, value)] += 1
        self.total += value

    def as_dict(self) -> dict[str, Any]:
        """For the status."""
        return {
            "count": sum(self.buckets),
            "sum": self.total,
            "buckets": list(self.buckets),
            "bounds": list(self.bounds),
        }


@dataclass(slots=True)
class Stats:
    """Counters since the hierarchy was made. Written under its lock; a reader may see them a moment apart.

    blocks asked = sum of hits + sum of misses

    Attributes:
        hits: blocks leased, by the tier that had them.
        misses: blocks asked for and not leased, by reason (`absent`, `staging`, `quota`, `no_room`, ...).
        tokens: tokens leased, by tier.
        lookups: `match` calls by result (`full`, `partial`, `miss`).
        stored: blocks committed.
        stored_nbytes: bytes committed.
        refused: blocks that a reservation did not get, by reason.
        lent: blocks that other hosts were lent.
        lent_nbytes: bytes of their slots.
        offers: blocks of offers between hosts: those that others took or declined, and what was done with theirs.
        dropped: blocks that left the last tier that had them, by reason.
        moves: blocks moved, by (from, to).
        moved_nbytes: bytes moved, by (from, to).
        faults: what went wrong, by reason.
        seconds: time of `match` calls here, without what they wait for, and of loads and saves as clients report it.
        transfers: time of copies between two tiers, a batch each.
        evicted: seconds since their last use of blocks that left a tier to make room, by tier.
        saved_seconds: that engines would have computed for what they were given, by their own word.
        codecs: of stored blocks of which the client said so, by codec: bytes as they are stored, and of the KV as its
            model has it.
        condemned: blocks that readers found not to be what was stored.
    """

    hits: Counter[str] = field(default_factory=Counter)
    misses: Counter[str] = field(default_factory=Counter)
    tokens: Counter[str] = field(default_factory=Counter)
    lookups: Counter[str] = field(default_factory=Counter)
    stored: int = 0
    stored_nbytes: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    lent: int = 0
    lent_nbytes: int = 0
    offers: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)
    moves: Counter[tuple[str, str]] = field(default_factory=Counter)
    moved_nbytes: Counter[tuple[str, str]] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    seconds: dict[str, Histogram] = field(
        default_factory=lambda: {"match": Histogram(MATCH_BUCKETS), "load": Histogram(), "save": Histogram()}
    )
    transfers: dict[tuple[str, str], Histogram] = field(default_factory=lambda: {way: Histogram() for way in WAYS})
    evicted: dict[str, Histogram] = field(
        default_factory=lambda: {tier.name.lower(): Histogram(AGE_BUCKETS) for tier in OWN}
    )
    saved_seconds: float = 0.0
    codecs: dict[str, list[int]] = field(default_factory=dict)
    condemned: int = 0

    def save_computing(self, tokens: int, rate: float) -> None:
        """An engine that computes so many tokens a second was given some; with a rate of 0 it did not say."""
        if 0 < rate < math.inf:
            self.saved_seconds += min(tokens / rate, LONGEST_SAVED)

    def encoded(self, codec: str, stored: Sequence[int], raw: int) -> None:
        """Blocks were stored in so many bytes each; a client says that the KV of each has `raw`."""
        if stored and max(stored) // MOST_RAW <= raw <= MOST_RAW * min(stored) and raw:
            both = self.codecs.setdefault(codec, [0, 0])
            both[0] += sum(stored)
            both[1] += raw * len(stored)

    def as_dict(self) -> dict[str, Any]:
        """For the status: plain values; moves are named "from>to"."""
        asked = self.hits.total() + self.misses.total()
        return {
            "hits": dict(self.hits),
            "misses": dict(self.misses),
            "tokens": dict(self.tokens),
            "hit_ratio": self.hits.total() / asked if asked else 0.0,
            "lookups": dict(self.lookups),
            "stored": self.stored,
            "stored_nbytes": self.stored_nbytes,
            "refused": dict(self.refused),
            "lent": self.lent,
            "lent_nbytes": self.lent_nbytes,
            "offers": dict(self.offers),
            "dropped": dict(self.dropped),
            "moves": {">".join(way): count for way, count in self.moves.items()},
            "moved_nbytes": {">".join(way): count for way, count in self.moved_nbytes.items()},
            "faults": dict(self.faults),
            "seconds": {what: histogram.as_dict() for what, histogram in self.seconds.items()},
            "transfers": {">".join(way): histogram.as_dict() for way, histogram in self.transfers.items()},
            "evicted": {tier: histogram.as_dict() for tier, histogram in self.evicted.items()},
            "saved_seconds": self.saved_seconds,
            "codecs": {
                codec: {"stored_nbytes": stored, "raw_nbytes": raw} for codec, (stored, raw) in self.codecs.items()
            },
        }
