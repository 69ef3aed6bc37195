"""Cost-aware eviction."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from kvtier.eviction.order import Order, grown
from kvtier.eviction.uses import Uses

DEEP = 2048
"""Depth, in blocks, at which a block is worth twice the first one. By floating-point operations it is less (attention
over 30,000 tokens costs an 8B model as much as all the rest), but then what is deep and dead stays too long."""
MIB = 1 << 20
TIE = 1e-9
"""Of two blocks that are worth the same, the one used longest ago leaves first."""


class Cost:
    """`Rule`: the block that costs least to compute again, for its bytes and its uses, leaves first.

        rank = age + uses * (1 + depth / DEEP) / MiB        age = rank of the last victim

    GreedyDual-Size with Frequency (Cherkasova, HPL-98-69), where cost grows with depth: attention reads all tokens
    before. It differs in that a block is worth no less than the blocks behind it in the chain that was used, which
    would be lost with it; that correlated uses are one (`Uses`); and that age is a victim's only when it leaves.
    """

    def __init__(self) -> None:
        self._uses = Uses()
        self._order = Order()
        self._depth: NDArray[np.int64] = np.zeros(1024, np.int64)
        self._cost: NDArray[np.float64] = np.zeros(1024)
        self._age = 0.0
        self._ties = 0.0

    def came(self, row: int, nbytes: int, parent: int | None) -> None:
        self._uses.came(row)
        self._depth, self._cost = grown(self._depth, row, 0), grown(self._cost, row, 0)
        self._depth[row] = 0 if parent is None or parent >= len(self._depth) else self._depth[parent] + 1
        self._cost[row] = MIB / nbytes
        self._ties += TIE
        self._order.put(row, self._age + self._ties + float(self._cost[row]) * (1 + int(self._depth[row]) / DEEP))

    def used(self, rows: NDArray[np.int64]) -> None:
        count = len(rows)
        depth = self._depth[rows] = np.maximum(self._depth[rows], self._depth[rows[0]] + np.arange(count))
        worth = (1 + self._uses.used(rows)) * self._cost[rows] * (1 + depth / DEEP)
        worth = np.maximum.accumulate(worth[::-1])[::-1]
        self._order.put_all(rows, self._age + worth + self._ties + TIE * np.arange(count, 0, -1))
        self._ties += TIE * count

    def left(self, row: int, *, chosen: bool) -> None:
        if chosen:
            self._age = max(self._age, self._order.rank(row) - self._ties)
        self._uses.left()
        self._order.discard(row)

    def forget(self, row: int) -> None:
        if row < len(self._depth):
            self._depth[row] = 0

    def walk(self) -> Iterator[list[int]]:
        return self._order.walk()
