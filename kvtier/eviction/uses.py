"""How often blocks were used."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvtier.eviction.order import grown

SHARE = 64
"""Uses of a block are one while less than this part of the tier has come in between."""


class Uses:
    """Counts the uses of each row.

    One request may touch a chain several times: when it asks for it, when it saves beyond it, when the save is done.
    Such correlated uses are one (LRU-K's correlated reference period; O'Neil et al., SIGMOD 1993). Time is what has
    come in.
    """

    def __init__(self) -> None:
        self.clock = 0
        self._present = 0
        self._count: NDArray[np.int64] = np.zeros(1024, np.int64)
        self._last: NDArray[np.int64] = np.zeros(1024, np.int64)

    def came(self, row: int) -> None:
        """A block came in; coming is no use."""
        self._count, self._last = grown(self._count, row, 0), grown(self._last, row, 0)
        self.clock += 1
        self._present += 1
        self._count[row] = 0
        self._last[row] = self.clock

    def left(self) -> None:
        """A block left."""
        self._present -= 1

    def used(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Blocks were used; how often each of them was since it came."""
        again = rows[self.clock - self._last[rows] > max(len(rows), self._present // SHARE)]
        self._count[again] += 1
        self._last[again] = self.clock
        return self._count[rows]
