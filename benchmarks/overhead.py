"""What does it cost to be watched?

* `overhead.scrape_ms`: one GET of /metrics from a host that knows a million blocks, over HTTP, once the index has been
  told of them; and `overhead.locked_ms`, for how long that holds the hierarchy's lock, in all. The blocks are what a
  tier says that it has: rows in the table, in chains of 64, of which one in eight was hit.
* `overhead.match.N`: how much longer a match of N blocks takes because it is counted: 1 + the numbers that are added to
  in a full hit x the measured cost of one / the time of the match as an engine sees it, through the door. `all_in` is
  the same with all that is done for the figures: finding out what to add, and reading the note that a match leaves,
  which the keeper does later. None of it is measured as a difference, which would be lost in the noise.
"""

from __future__ import annotations

import hashlib
import statistics
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing

import numpy as np
from prometheus_client import CollectorRegistry, generate_latest

from benchmarks._harness import Figure, emit, options
from benchmarks._host import host as door
from benchmarks.match import BLOCK_TOKENS, addresses_of, store
from kvtier.client.door import DoorSession
from kvtier.client.local import LocalSession
from kvtier.hierarchy import loading
from kvtier.hierarchy.cache import Hierarchy
from kvtier.hierarchy.demand import Asked, Demand
from kvtier.hierarchy.loading import Wish
from kvtier.hierarchy.stats import Histogram
from kvtier.index.local import LocalIndex, LocalStore
from kvtier.memory.arena import Arena
from kvtier.testing.memory_tier import MemoryTier
from kvtier.tiers.base import STORED, Inventory, TierNumber, TierUsage
from kvtier_services.monitor.metrics import Exporter, HostCollector

NBYTES = 1 << 20
CHAIN = 64
INCREMENTS = 6
"""Of a full hit in one tier: blocks, tokens, lookups, seconds saved, the histogram of matches, and a note."""
MATCHED = (32, 2048)
NOTES = 16
"""Matches between two looks of the keeper: 320 a second."""


class Shelf(MemoryTier):
    """A tier that says that it has blocks."""

    def __init__(self, arena: Arena, blocks: int) -> None:
        super().__init__(arena, 1)
        self._blocks = blocks

    def inventory(self) -> Inventory:
        keys = [hashlib.sha256(number.to_bytes(8, "little")).digest() + bytes(2) for number in range(self._blocks)]
        records = np.zeros(self._blocks, STORED)
        records["nbytes"], records["tokens"] = NBYTES, 64
        return Inventory(keys, records)

    def usage(self) -> TierUsage:
        return TierUsage(2 * self._blocks * NBYTES, self._blocks * NBYTES, self._blocks)


class Watched:
    """A lock, and for how long it was held by this thread."""

    def __init__(self, lock: threading.RLock) -> None:
        self._lock, self._me, self._depth, self._since = lock, threading.get_ident(), 0, 0.0
        self.held = 0.0

    def __enter__(self) -> None:
        self._lock.acquire()
        if threading.get_ident() == self._me:
            self._since = self._since if self._depth else time.perf_counter()
            self._depth += 1

    def __exit__(self, *_: object) -> None:
        if threading.get_ident() == self._me:
            self._depth -= 1
            self.held += 0.0 if self._depth else time.perf_counter() - self._since
        self._lock.release()


def host(tiers: Callable[[Arena], dict[TierNumber, MemoryTier]], capacity: int = 1 << 20) -> Hierarchy:
    arena, nodes = Arena.private(capacity), LocalStore()
    return Hierarchy(arena, tiers(arena), LocalIndex(nodes, nodes.register("bench")))


def scrape(blocks: int, rounds: int) -> Iterator[Figure]:
    hierarchy = host(lambda arena: {TierNumber.NVME: Shelf(arena, blocks)})
    table, random = hierarchy.state.table, np.random.default_rng(0)
    rows = np.arange(blocks)
    table.parent[:blocks] = np.where(rows % CHAIN, rows - 1, -1)
    table.parent_life[:blocks] = table.life[np.maximum(rows - 1, 0)]
    table.hits[:blocks] = np.repeat(random.zipf(1.5, -(-blocks // CHAIN)), CHAIN)[:blocks] * (
        random.random(blocks) < 1 / 8
    )
    while hierarchy.state.index.needs_publish():
        time.sleep(0.1)
    exporter = Exporter(hierarchy.status, name="bench", host="127.0.0.1", port=0)
    try:
        times = []
        for _ in range(rounds):
            began = time.perf_counter()
            size = len(urllib.request.urlopen(exporter.url, timeout=60).read())
            times.append(1e3 * (time.perf_counter() - began))
        registry = CollectorRegistry()
        registry.register(HostCollector(hierarchy.status))
        watched = hierarchy.state.lock = Watched(hierarchy.state.lock)
        held = []
        for _ in range(rounds):
            watched.held = 0.0
            generate_latest(registry)
            held.append(1e3 * watched.held)
    finally:
        exporter.close()
        hierarchy.close()
    extra = {"blocks": blocks, "rounds": rounds}
    yield Figure(
        "overhead.scrape_ms",
        round(statistics.median(times), 2),
        "ms",
        "lower",
        {**spread(times), **extra, "bytes": size, "limit": 50},
    )
    yield Figure("overhead.locked_ms", round(statistics.median(held), 3), "ms", "lower", {**spread(held), **extra})


def add(counter: Counter[str]) -> None:
    counter["cpu"] += 1


def spread(values: list[float]) -> dict[str, float]:
    low, _, high = statistics.quantiles(values, n=4)
    return {"low": round(low, 3), "high": round(high, 3)}


def each(work: Callable[[], object], times: int) -> float:
    """Seconds that it takes, the least of nine rounds: what disturbs only adds."""
    best = float("inf")
    for _ in range(9):
        began = time.perf_counter()
        for _ in range(times):
            work()
        best = min(best, time.perf_counter() - began)
    return best / times


def match(blocks: int, times: int) -> Iterator[Figure]:
    keys = addresses_of(blocks * BLOCK_TOKENS)
    with door(max(16 << 20, blocks * 4096 * 4)) as socket, closing(DoorSession(socket)) as session:
        store(session, keys)
        asked = each(lambda: session.release(session.match(keys, 0.0, prefill=1000.0).lease), max(20, times // 50))
    hierarchy = host(lambda arena: {}, max(16 << 20, blocks * 4096 * 4))
    state = hierarchy.state
    try:
        with closing(LocalSession(hierarchy)) as near:
            store(near, keys)
            wish = Wish(next(iter(state.ledger.sessions)), keys, 1000.0)
            look = hierarchy.look(wish)
            if len(look.rows) != blocks:
                raise RuntimeError("the host lost a block")
            # The keeper reads the notes meanwhile; what it takes is measured apart.
            state.demand.asked = lambda _: None
            counted = each(lambda: loading.count(state, look), times)
            hierarchy.release(look.matched.lease)
    finally:
        hierarchy.close()
    note, demand = Asked(0.0, keys, blocks, {"cpu": blocks}), Demand(0.0)

    def later() -> None:
        for _ in range(NOTES):
            demand.asked(note)
        demand.read()

    read = each(later, max(1, times // NOTES)) / NOTES
    counter, histogram = Counter({"cpu": 0}), Histogram()
    one = max(each(lambda: add(counter), times), each(lambda: histogram.observe(0.001), times))
    yield Figure(
        f"overhead.match.{blocks}",
        round(1 + INCREMENTS * one / asked, 5),
        "ratio",
        "lower",
        {
            "all_in": round(1 + (counted + read) / asked, 4),
            "match_us": round(1e6 * asked, 2),
            "increments": INCREMENTS,
            "one_us": round(1e6 * one, 3),
            "counted_us": round(1e6 * counted, 2),
            "read_us": round(1e6 * read, 2),
            "limit": 1.01,
        },
    )


if __name__ == "__main__":
    args = options(__doc__)
    blocks, rounds, times = (20_000, 5, 100) if args.smoke else (1_000_000, 41, 5000)
    figures = [*scrape(blocks, rounds), *(figure for asked in MATCHED for figure in match(asked, times))]
    emit(figures, as_json=args.json)
