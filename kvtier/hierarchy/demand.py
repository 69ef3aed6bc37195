"""What is asked for, of what there was before: the window, and regrets.

Whoever asks or drops only leaves a note, under the hierarchy's lock: one append. Notes are read later, in their order,
by the keeper or by whoever wants the figures; nobody who reads them holds the hierarchy's lock, but for one who leaves
a note when very many wait.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from kvtier.eviction.ghosts import Ghosts, numbers_of
from kvtier.hierarchy.window import Window, part_of
from kvtier.tiers.base import TierNumber

WAITING = 1 << 16
"""Blocks in notes, and notes, that may wait to be read: some 10 MB."""
TIERS = tuple(tier.name.lower() for tier in TierNumber)


@dataclass(frozen=True, slots=True)
class Asked:
    """An answer that was given.

    Attributes:
        when: seconds since the epoch.
        keys: asked for; none in the later calls of a stream.
        blocks: that it was counted for, hits and misses.
        hits: blocks by the tier that had them.
        absent: so many of the keys, the last ones, nobody had.
    """

    when: float
    keys: Sequence[bytes]
    blocks: int
    hits: Mapping[str, int] = field(default_factory=dict)
    absent: int = 0


@dataclass(frozen=True, slots=True)
class Dropped:
    """Blocks that no tier has any more; `evicted` when they had to make room, and not on request."""

    keys: Sequence[bytes]
    evicted: bool


class Demand:
    """Reads notes of what is asked for and dropped. `asked` and `dropped` are called under the hierarchy's lock.

    Memory is bounded: of blocks that were evicted about a million are remembered, 8 bytes each.
    """

    def __init__(self, now: float) -> None:
        """Begin at this time, in seconds since the epoch."""
        self._reading = threading.Lock()
        self._notes: deque[Asked | Dropped] = deque()
        self._left = self._read = 0
        self._window = Window(now)
        self._evicted = Ghosts()
        self._regrets = 0

    def asked(self, note: Asked) -> None:
        """An answer was given."""
        self._leave(note)

    def dropped(self, keys: Sequence[bytes], *, evicted: bool) -> None:
        """Blocks left the last tier that had them."""
        self._leave(Dropped(keys, evicted))

    def read(self) -> None:
        """Read what waits."""
        with self._reading:
            notes = [self._notes.popleft() for _ in range(len(self._notes))]
            self._read += sum(1 + len(note.keys) for note in notes)
            self._see([note for note in notes if isinstance(note, Asked)])
            for note in notes:
                self._remember(note)

    def status(self, now: float) -> dict[str, Any]:
        """The window, and how many blocks were asked for and missed after they were evicted, once for each eviction."""
        self.read()
        with self._reading:
            return {"window": self._window.status(now, TIERS), "asked_again": self._regrets}

    def _leave(self, note: Asked | Dropped) -> None:
        self._notes.append(note)
        self._left += 1 + len(note.keys)  # notes of streams have no keys
        if self._left - self._read > WAITING:
            self.read()

    def _see(self, notes: Sequence[Asked]) -> None:
        """Many at once: a small array costs as much as a large one."""
        for part, some in groupby(notes, lambda note: part_of(note.when)):
            keys: list[bytes] = []
            for note in some:
                self._window.note(part, note.blocks, note.hits)
                keys += note.keys
            self._window.see(part, numbers_of(keys))

    def _remember(self, note: Asked | Dropped) -> None:
        if isinstance(note, Asked):
            if note.absent:
                self._regrets += self._evicted.forget(numbers_of(note.keys[len(note.keys) - note.absent :]))
        elif note.evicted:
            self._evicted.remember(numbers_of(note.keys))
        else:
            self._evicted.forget(numbers_of(note.keys))
