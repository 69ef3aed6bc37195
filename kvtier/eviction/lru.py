"""Least recently used."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from kvtier.eviction.order import Order


class LRU:
    """`Rule`: the block that was used longest ago leaves first. A chain is used from its tail to its head."""

    def __init__(self) -> None:
        self._clock = 0
        self._order = Order()

    def came(self, row: int, nbytes: int, parent: int | None) -> None:
        del nbytes, parent
        self._clock += 1
        self._order.put(row, self._clock)

    def used(self, rows: NDArray[np.int64]) -> None:
        count = len(rows)
        self._order.put_all(rows, self._clock + np.arange(count, 0.0, -1.0))
        self._clock += count

    def left(self, row: int, *, chosen: bool) -> None:
        del chosen
        self._order.discard(row)

    def forget(self, row: int) -> None:
        pass

    def walk(self) -> Iterator[list[int]]:
        return self._order.walk()
