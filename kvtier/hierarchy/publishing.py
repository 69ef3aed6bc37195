"""What the index says of this host is what this host has: told anew when it was lost, compared all the time, mended."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from kvtier.hierarchy.state import State
from kvtier.tiers.base import TierNumber

PART = 1024
"""Rows of the table that are read under the lock at a time."""
TICK = 0.05
"""Seconds between looks at what is to be done."""
ROUND = 600.0
"""Seconds in which the whole table is compared with the index."""
SAMPLE, SAMPLES_EVERY = 64, 10.0
"""Blocks that are compared out of their turn, and seconds between two such looks."""
SUSPICIOUS, HASTE = 4, 20
"""So many wrong ones of a sample, and the rest of the round goes so much faster."""
ABROAD = np.uint8(1 << TierNumber.PEER)

Said = tuple[int, int]
"""Best tier and payload bytes of a block."""
Entry = tuple[bytes, int, int]
"""Its key, and these."""


def part(state: State, first: int, count: int) -> list[Entry]:
    """This host's blocks in some rows of the table; takes the lock."""
    with state.lock:
        table = state.table
        masks = table.tiers[first : min(first + count, len(table.keys))] & ~ABROAD
        rows = first + np.flatnonzero(masks)
        tiers, nbytes = table.best_of(rows).tolist(), table.nbytes[rows].tolist()
        return [(table.keys[row], tier, size) for row, tier, size in zip(rows.tolist(), tiers, nbytes, strict=True)]


def inventory(state: State) -> Iterator[Entry]:
    """All blocks, read some at a time. What comes meanwhile may be left out: the index is told of it anyway."""
    for first in range(0, len(state.table.keys), PART):
        yield from part(state, first, PART)


class Publisher:
    """Keeps the index right about this host, on a thread of its own; only it waits for the index.

    Attributes:
        counts: blocks compared, and what was mended: blocks that the index lacked (`missing`), had of another tier or
            size (`wrong`), or had although they are not here (`stale`).
    """

    def __init__(self, state: State, clock: Callable[[], float] = time.monotonic) -> None:
        """Take the host, and a monotonic clock."""
        self.counts: Counter[str] = Counter(compared=0, missing=0, wrong=0, stale=0)
        self._state = state
        self._clock = clock
        self._closing = threading.Event()
        self._row = 0
        self._due = clock() + TICK
        self._sample_due = clock() + SAMPLES_EVERY
        self._hasty = False
        self._random = random.Random()  # noqa: S311 - which blocks are looked at is no secret
        self._thread = threading.Thread(target=self._run, name="kvtier-publish", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """Stop it."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join()

    def step(self) -> None:
        """Do what is due: publish, correct what a sweep met, compare some blocks."""
        index = self._state.index
        if index.needs_publish():
            index.publish(self._until_closed(inventory(self._state)))
            self._row, self._hasty = 0, False
        self._correct(index.claims())
        now = self._clock()
        if now >= self._sample_due:
            self._sample_due = now + SAMPLES_EVERY
            self._look_at_a_sample()
        if now >= self._due:
            self._due = now + self._compare_a_part()

    def _run(self) -> None:
        while not self._closing.wait(TICK):
            try:
                self.step()
            except Exception:  # noqa: BLE001 - whatever it is, the next round may succeed
                self._state.stats.faults["publisher_error"] += 1

    def _until_closed(self, entries: Iterator[Entry]) -> Iterator[Entry]:
        for entry in entries:
            if self._closing.is_set():
                return
            yield entry

    def _compare_a_part(self) -> float:
        """Compare the next rows; seconds until the ones after them are due."""
        rows = len(self._state.table.keys)
        if self._compare(part(self._state, self._row, PART)) is None:
            return SAMPLES_EVERY
        self._row += PART
        if self._row >= rows:
            self._row, self._hasty = 0, False
        pause = ROUND * PART / max(rows, PART)
        return pause / HASTE if self._hasty else pause

    def _look_at_a_sample(self) -> None:
        rows = len(self._state.table.keys)
        places = self._random.sample(range(rows), min(SAMPLE, rows))
        wrong = self._compare([entry for row in places for entry in part(self._state, row, 1)])
        if wrong is not None and wrong >= SUSPICIOUS:
            self._hasty, self._due = True, self._clock()

    def _compare(self, held: Sequence[Entry]) -> int | None:
        """Tell the index of these blocks what it lacks; how many, or None when it does not answer."""
        lacking = self._state.index.lacking(held)
        if lacking is None:
            return None
        self.counts["compared"] += len(held)
        if lacking:
            self.counts.update(mend(self._state, lacking))
        return len(lacking)

    def _correct(self, claims: Sequence[Entry]) -> None:
        """A sweep met these entries of this host's; what they say must be so."""
        for first in range(0, len(claims), PART):
            doubtful = differing(self._state, claims[first : first + PART])
            if doubtful:
                self.counts.update(mend(self._state, doubtful))


def here(state: State, key: bytes) -> Said | None:
    """Best tier and bytes of a block of this host; with the lock held."""
    row = state.row(key)
    if row is None or key in state.abroad:
        return None
    tier = state.table.best(row)
    return (tier, int(state.table.nbytes[row])) if tier else None


def said_of(state: State, keys: Sequence[bytes]) -> dict[bytes, Said | None] | None:
    """What the index says that this host has of these; None when it does not answer."""
    index = state.index
    found = index.match(keys)
    if found is None:
        return None
    me = index.node, index.incarnation
    return {
        key: next(((one.tier, one.nbytes) for one in replicas if (one.node, one.incarnation) == me), None)
        for key, replicas in zip(keys, found, strict=True)
    }


def differing(state: State, claims: Sequence[Entry]) -> list[bytes]:
    """Of which of these entries of this host the table says otherwise now."""
    with state.lock:
        return [key for key, tier, nbytes in claims if here(state, key) != (tier, nbytes)]


def kind_of(said: Said | None, now: Said | None) -> str:
    """What is wrong with an entry."""
    return "stale" if now is None else "missing" if said is None else "wrong"


def mend(state: State, keys: Sequence[bytes]) -> Counter[str]:
    """Tell the index what is so of these blocks, where it says otherwise; how many there were of each kind."""
    said, mended = said_of(state, keys), Counter[str]()
    with state.lock:  # what is told after this is told in order
        for key, was in (said or {}).items():
            now = here(state, key)
            if was == now:
                continue
            mended[kind_of(was, now)] += 1
            if now is None:
                state.index.discard([key])
            else:
                state.index.add([key], now[0], [now[1]])
    return mended
