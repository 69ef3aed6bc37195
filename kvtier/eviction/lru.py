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
        self._parent[row] = parent
        if parent is not None:
            self._children.setdefault(parent, set()).add(row)

    def touch(self, chain: Sequence[int]) -> None:
        """See `EvictionPolicy`; every row must be present."""
        count = len(chain)
        if count:
            self._stamps[chain] = np.arange(self._clock + count, self._clock, -1)
            self._clock += count

    def remove(self, row: int) -> None:
        """See `EvictionPolicy`."""
        for child in self._children.pop(row, ()):
            self._parent[child] = None
        self._leave(row)

    def victims(self, need: int, pinned: Callable[[int], bool]) -> list[int]:
        """See `EvictionPolicy`."""
        chosen: dict[int, None] = {}
        freed, look_at, last = 0, 64, len(self._parent)
        while look_at < 8 * last:
            count = min(look_at, last)
            oldest = np.argpartition(self._stamps, count - 1)[:count]
            for row in oldest[np.argsort(self._stamps[oldest])].tolist():
                if row in chosen or pinned(row) or not self._children_within(row, chosen):
                    continue
                chosen[row] = None
                freed += int(self._nbytes[row])
                if freed >= need:
                    return list(chosen)
            look_at *= 8
        return []

    def with_descendants(self, rows: Sequence[int]) -> list[int]:
        """See `EvictionPolicy`."""
        order: dict[int, None] = {}
        stack = [row for row in rows if row in self._parent]
        while stack:
            row = stack.pop()
            order.pop(row, None)
            order[row] = None
            stack.extend(child for child in self._children.get(row, ()) if child in self._parent)
        return list(reversed(order))

    def __len__(self) -> int:
        """See `EvictionPolicy`."""
        return len(self._parent)

    def _leave(self, row: int) -> None:
        parent = self._parent.pop(row, None)
        if row < len(self._stamps):
            self._stamps[row] = ABSENT
        if parent is not None:
            siblings = self._children[parent]
            siblings.discard(row)
            if not siblings:
                del self._children[parent]

    def _children_within(self, row: int, chosen: dict[int, None]) -> bool:
        children = self._children.get(row)
        return not children or all(child in chosen for child in children)
