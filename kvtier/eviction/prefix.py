"""Any order of blocks, held to prefix order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvtier.eviction.order import grown


class Rule(Protocol):
    """Which blocks would leave first, were it not for their children."""

    def came(self, row: int, nbytes: int, parent: int | None) -> None:
        """A block came in."""
        ...

    def used(self, rows: NDArray[np.int64]) -> None:
        """A chain of present blocks was used, head first."""
        ...

    def left(self, row: int, *, chosen: bool) -> None:
        """A present block left; `chosen`: as a victim of the last answer."""
        ...

    def forget(self, row: int) -> None:
        """A block, present or not, left for good: another may get its row."""
        ...

    def walk(self) -> Iterator[list[int]]:
        """All present blocks, those that leave first in front, a few at a time; a block may come twice."""
        ...


class PrefixPolicy:
    """`EvictionPolicy`: a rule orders the blocks; children leave before their parents all the same.

    Args:
        rule: a fresh one.
    """

    def __init__(self, rule: Rule) -> None:
        self._rule = rule
        self._nbytes: NDArray[np.int64] = np.zeros(1024, np.int64)
        self._parent: dict[int, int | None] = {}
        self._children: dict[int, set[int]] = {}
        self._chosen: frozenset[int] = frozenset()

    def insert(self, row: int, nbytes: int, parent: int | None) -> None:
        self.remove(row)
        self._nbytes = grown(self._nbytes, row, 0)
        self._nbytes[row] = nbytes
        self._parent[row] = None
        if parent is not None:
            self.adopt(row, parent)
        self._rule.came(row, nbytes, parent)

    def adopt(self, row: int, parent: int) -> None:
        if row in self._parent:
            self._orphan(row)
            self._parent[row] = parent
            self._children.setdefault(parent, set()).add(row)

    def touch(self, chain: Sequence[int]) -> None:
        if len(chain):
            self._rule.used(np.asarray(chain, np.int64))

    def remove(self, row: int) -> None:
        if row in self._parent:
            self._orphan(row)
            del self._parent[row]
            self._rule.left(row, chosen=row in self._chosen)

    def forget(self, row: int) -> None:
        self.remove(row)
        self._rule.forget(row)
        for child in self._children.pop(row, ()):
            self._parent[child] = None

    def victims(self, need: int, pinned: Callable[[int], bool]) -> list[int]:
        chosen: list[int] = []
        passed: set[int] = set()
        kept: dict[int, int] = {}
        """How many children of a block are not chosen; missing: all of them."""
        freed = 0
        for rows in self._rule.walk() if need > 0 else ():
            for row in rows:
                if row in passed:
                    continue
                passed.add(row)
                free: int | None = row
                # When the last child of a block that was passed over is chosen, that block is next.
                while free in passed and not kept.get(free, free in self._children) and not pinned(free):
                    chosen.append(free)
                    freed += int(self._nbytes[free])
                    if freed >= need:
                        self._chosen = frozenset(chosen)
                        return chosen
                    free = self._parent[free]
                    if free is not None:
                        kept[free] = kept.get(free, len(self._children[free])) - 1
        return []

    def with_descendants(self, rows: Sequence[int], most: int | None = None) -> list[int]:
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
                    if most is not None and len(seen) > most:
                        return []
                    stack.extend(child for child in self._children.get(row, ()) if child not in seen)
        return list(order)

    def is_leaf(self, row: int) -> bool:
        return row not in self._children

    def __len__(self) -> int:
        return len(self._parent)

    def _orphan(self, row: int) -> None:
        parent = self._parent.get(row)
        if parent is not None:
            siblings = self._children[parent]
            siblings.discard(row)
            if not siblings:
                del self._children[parent]
