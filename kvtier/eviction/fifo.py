"""First in, first out."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from kvtier.eviction.order import Order


class FIFO:
    """`Rule`: the block that came in longest ago leaves first, however often it was used since.

    Prefix order keeps a parent as long as any child, and so as long as a conversation goes on.
    """

    def __init__(self) -> None:
        self._clock = 0
        self._order = Order()

    def came(self, row: int, nbytes: int, parent: int | None) -> None:
        del nbytes, parent
        self._clock += 1
        self._order.put(row, self._clock)

    def used(self, rows: NDArray[np.int64]) -> None:
        pass

    def left(self, row: int, *, chosen: bool) -> None:
        del chosen
        self._order.discard(row)

    def forget(self, row: int) -> None:
        pass

    def walk(self) -> Iterator[list[int]]:
        return self._order.walk()
