"""Least recently used, in prefix order."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

ABSENT = np.iinfo(np.int64).max
"""Stamp of a row that is not in the tier: younger than all."""


class PrefixLRU:
    """`EvictionPolicy`: the block that was used longest ago leaves first, children before parents.

    Stamps are in one array, so that touching a chain of thousands is one assignment; victims are found by partition,
    not by keeping a list sorted.
    """

    def __init__(self) -> None:
        self._clock = 0
        self._stamps = np.full(1024, ABSENT, np.int64)
        self._nbytes = np.zeros(1024, np.int64)
        self._parent: dict[int, int | None] = {}
        self._children: dict[int, set[int]] = {}

    def insert(self, row: int, nbytes: int, parent: int | None) -> None:
        """See `EvictionPolicy`."""
        self._leave(row)
        if row >= len(self._stamps):
            size = max(row + 1, 2 * len(self._stamps))
            more = np.full(size - len(self._stamps), ABSENT, np.int64)
            self._stamps, self._nbytes = np.concatenate((self._stamps, more)), np.resize(self._nbytes, size)
        self._clock += 1
        self._stamps[row] = self._clock
        self._nbytes[row] = nbytes
        self._parent[row] = None
        if parent is not None:
            self.adopt(row, parent)

    def adopt(self, row: int, parent: int) -> None:
        """See `EvictionPolicy`."""
        if row in self._parent:
            self._orphan(row)
            self._parent[row] = parent
            self._children.setdefault(parent, set()).add(row)

    def touch(self, chain: Sequence[int]) -> None:
        """See `EvictionPolicy`; every row must be present."""
        count = len(chain)
        if count:
            self._stamps[np.asarray(chain, np.int64)] = np.arange(self._clock + count, self._clock, -1)
            self._clock += count

    def remove(self, row: int) -> None:
        """See `EvictionPolicy`."""
        self._leave(row)

    def forget(self, row: int) -> None:
        """See `EvictionPolicy`."""
        self._leave(row)
        for child in self._children.pop(row, ()):
            self._parent[child] = None

    def victims(self, need: int, pinned: Callable[[int], bool]) -> list[int]:
        """See `EvictionPolicy`."""
        chosen: list[int] = []
        passed: set[int] = set()
        kept: dict[int, int] = {}
        """How many children of a block are not chosen; missing: all of them."""
        freed, begin, last = 0, 0, len(self._parent)
        while need > 0 and begin < last:
            end = min(max(64, 8 * begin), last)
            oldest = np.argpartition(self._stamps, end - 1)[:end]
            for row in oldest[np.argsort(self._stamps[oldest])][begin:].tolist():
                passed.add(row)
                free: int | None = row
                # When the last child of an older block is chosen, that block is next.
                while free in passed and not kept.get(free, free in self._children) and not pinned(free):
                    chosen.append(free)
                    freed += int(self._nbytes[free])
                    if freed >= need:
                        return chosen
                    free = self._parent[free]
                    if free is not None:
                        kept[free] = kept.get(free, len(self._children[free])) - 1
            begin = end
        return []

    def with_descendants(self, rows: Sequence[int]) -> list[int]:
        """See `EvictionPolicy`."""
        order: dict[int, None] = {}
        seen: set[int] = set()
        for root in rows:
            stack = [root] if root in self._parent and root not in seen else []
            while stack:
                row = stack[-1]
                if row in seen:
                    order[stack.pop()] = None
                else:
                    seen.add(row)
                    stack.extend(child for child in self._children.get(row, ()) if child not in seen)
        return list(order)

    def is_leaf(self, row: int) -> bool:
        """See `EvictionPolicy`."""
        return row not in self._children

    def __len__(self) -> int:
        """See `EvictionPolicy`."""
        return len(self._parent)

    def _leave(self, row: int) -> None:
        self._orphan(row)
        self._parent.pop(row, None)
        if row < len(self._stamps):
            self._stamps[row] = ABSENT

    def _orphan(self, row: int) -> None:
        parent = self._parent.get(row)
        if parent is not None:
            siblings = self._children[parent]
            siblings.discard(row)
            if not siblings:
                del self._children[parent]
