"""Least recently used, in prefix order."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np


class PrefixLRU:
    """`EvictionPolicy`: the block that was used longest ago leaves first, children before parents.

    Stamps are in one array, so that touching a chain of thousands is one assignment; victims are found by partition,
    not by keeping a list sorted.
    """

    def __init__(self) -> None:
        self._clock = 0
        self._stamps = np.zeros(1024, np.int64)
        self._nbytes = np.zeros(1024, np.int64)
        self._parent: dict[int, int | None] = {}
        self._children: dict[int, set[int]] = {}

    def insert(self, row: int, nbytes: int, parent: int | None) -> None:
        """See `EvictionPolicy`."""
        self._leave(row)
        if row >= len(self._stamps):
            size = max(row + 1, 2 * len(self._stamps))
            self._stamps = np.resize(self._stamps, size)
            self._nbytes = np.resize(self._nbytes, size)
        self._clock += 1
        self._stamps[row] = self._clock
        self._nbytes[row] = nbytes
        self._parent[row] = parent
        if parent is not None:
            self._children.setdefault(parent, set()).add(row)

    def touch(self, chain: Sequence[int]) -> None:
        """See `EvictionPolicy`."""
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
        rows = np.fromiter(self._parent, np.int64, len(self._parent))
        stamps = self._stamps[rows]
        chosen: dict[int, None] = {}
        freed, count = 0, 64
        while rows.size:
            oldest = rows if count >= rows.size else rows[np.argpartition(stamps, count - 1)[:count]]
            for row in oldest[np.argsort(self._stamps[oldest])].tolist():
                if row in chosen or pinned(row) or not self._children_within(row, chosen):
                    continue
                chosen[row] = None
                freed += int(self._nbytes[row])
                if freed >= need:
                    return list(chosen)
            if count >= rows.size:
                break
            count *= 8
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
        if parent is not None:
            siblings = self._children[parent]
            siblings.discard(row)
            if not siblings:
                del self._children[parent]

    def _children_within(self, row: int, chosen: dict[int, None]) -> bool:
        children = self._children.get(row)
        return not children or all(child in chosen for child in children)
