"""Plain counters of one host, which the exporter and the status read."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

SECONDS_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
"""Upper bounds of the histograms of seconds."""


@dataclass(slots=True)
class Histogram:
    """Counts of observed seconds by bucket."""

    buckets: list[int] = field(default_factory=lambda: [0] * (len(SECONDS_BUCKETS) + 1))
    total: float = 0.0

    def observe(self, seconds: float) -> None:
        """Count one observation."""
        place = next((i for i, bound in enumerate(SECONDS_BUCKETS) if seconds <= bound), len(SECONDS_BUCKETS))
        self.buckets[place] += 1
        self.total += seconds

    def as_dict(self) -> dict[str, object]:
        """For the status."""
        return {"count": sum(self.buckets), "sum": self.total, "buckets": list(self.buckets)}


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
        seconds: time of client calls as the clients report it, and of moves.
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
    seconds: dict[str, Histogram] = field(default_factory=dict)

    def observe(self, what: str, seconds: float) -> None:
        """Count how long something took."""
        self.seconds.setdefault(what, Histogram()).observe(seconds)

    def as_dict(self) -> dict[str, object]:
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
        }
