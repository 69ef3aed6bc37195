"""S3-FIFO."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator

import numpy as np
from numpy.typing import NDArray

from kvtier.eviction.order import ABSENT, Order
from kvtier.eviction.uses import Uses

SMALL = 10
"""The small queue has this part of all blocks."""
PROMOTE = 1
"""Uses that a block of the small queue needs to stay. The paper asks for two; in a conversation it is one a turn."""
TURNS = 3
"""Uses that count, as in the paper: two bits."""


class S3FIFO:
    """`Rule`: blocks that were used since they came stay; the others leave soon.

    Yang et al., "FIFO queues are all you need for cache eviction" (SOSP 2023): what is seen first goes through a small
    queue, a tenth of all; what is used there moves to the main queue, where each use buys one more turn; what left the
    small queue and comes back while its ghost is remembered goes to the main queue at once.

    It differs in how queues are kept: a place in a queue is a rank, given when a block is used, and not when it is
    met at the queue's end. So asking for victims changes nothing, and a chain is moved in one step, its tail behind its
    head. Correlated uses are one (`Uses`).

    Args:
        identity: what tells a block that comes back from another one in the same row. Without it ghosts are rows, and
            are remembered while the row's block is known.
    """

    def __init__(self, identity: Callable[[int], Hashable] | None = None) -> None:
        self._identity = identity
        self._uses = Uses()
        self._small, self._main = Order(), Order()
        self._n_small = self._n_main = 0
        self._ghosts: dict[Hashable, None] = {}

    def came(self, row: int, nbytes: int, parent: int | None) -> None:
        del nbytes, parent
        self._uses.came(row)
        name = self._identity(row) if self._identity else row
        if name in self._ghosts:
            del self._ghosts[name]
            self._n_main += 1
            self._main.put(row, self._uses.clock)
            self._small.put(row, ABSENT)
        else:
            self._n_small += 1
            self._small.put(row, self._uses.clock)
            self._main.put(row, ABSENT)

    def used(self, rows: NDArray[np.int64]) -> None:
        uses = np.minimum(self._uses.used(rows), TURNS)
        places = self._uses.clock + np.arange(len(rows), 0, -1) / (len(rows) + 1)
        in_main = self._main.ranks(rows) < ABSENT
        stay = ~in_main & (uses < PROMOTE)
        self._small.put_all(rows[stay], places[stay])
        up = rows[~in_main & ~stay]
        self._small.put_all(up, np.full(len(up), ABSENT))
        self._n_small -= len(up)
        self._n_main += len(up)
        main = ~stay
        self._main.put_all(rows[main], (places + uses * self._n_main)[main])

    def left(self, row: int, *, chosen: bool) -> None:
        del chosen
        self._uses.left()
        if self._small.rank(row) < ABSENT:
            self._n_small -= 1
            self._small.discard(row)
            self._ghosts[self._identity(row) if self._identity else row] = None
            while len(self._ghosts) > max(self._n_main, 1):
                del self._ghosts[next(iter(self._ghosts))]
        else:
            self._n_main -= 1
            self._main.discard(row)

    def forget(self, row: int) -> None:
        if not self._identity:
            self._ghosts.pop(row, None)

    def walk(self) -> Iterator[list[int]]:
        excess = self._n_small - (self._n_small + self._n_main) // SMALL
        for rows in self._small.walk():
            if excess > 0:
                yield rows[:excess]
            excess -= len(rows)
        yield from self._main.walk()
        yield from self._small.walk()
