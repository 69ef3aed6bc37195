"""Blocks by rank."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

T = TypeVar("T", bound=np.generic)

ABSENT = np.inf
"""Rank of a row that is not here: above all."""
RUN_AT_LEAST = 1024
STEP = 64


def grown(column: NDArray[T], row: int, fill: float) -> NDArray[T]:
    """A column with a place for this row: itself, or one at least twice as long, with `fill` in what is added."""
    if row < len(column):
        return column
    return np.concatenate((column, np.full(max(row + 1 - len(column), len(column)), fill, column.dtype)))


class Order:
    """Rows, walked from the lowest rank.

    Ranks are in one array, so that a chain of thousands is ranked in one assignment. Only the lowest rows are kept
    sorted, about an eighth of all, and what is said of them is compared with the array when they are walked:

        run       3 5 8 9 14 | horizon 14 | all others, in no order
        below     rows that were put below the horizon since

    Who always puts above all others (a clock) never adds to `below`. A row may be walked twice.
    """

    def __init__(self) -> None:
        self._rank: NDArray[np.float64] = np.full(RUN_AT_LEAST, ABSENT)
        self._rows: NDArray[np.int64] = np.empty(0, np.int64)
        self._ranks: NDArray[np.float64] = np.empty(0)
        self._horizon = -np.inf
        self._below: list[NDArray[np.int64]] = []
        self._waiting = 0

    def put(self, row: int, rank: float) -> None:
        """A row has this rank now."""
        self._rank = grown(self._rank, row, ABSENT)
        self._rank[row] = rank
        if rank <= self._horizon:
            self._put_below(np.array([row], np.int64))

    def put_all(self, rows: NDArray[np.int64], ranks: NDArray[np.float64]) -> None:
        """Rows that were put here before have these ranks now."""
        self._rank[rows] = ranks
        low = ranks <= self._horizon
        if low.any():
            self._put_below(rows[low])

    def rank(self, row: int) -> float:
        """Of a row; `ABSENT` when it is not here."""
        return float(self._rank[row]) if row < len(self._rank) else ABSENT

    def ranks(self, rows: NDArray[np.int64]) -> NDArray[np.float64]:
        """Of rows that were put here before."""
        return self._rank[rows]

    def discard(self, row: int) -> None:
        """A row is no longer here; unknown ones are ignored."""
        if row < len(self._rank):
            self._rank[row] = ABSENT

    def walk(self) -> Iterator[list[int]]:
        """All rows from the lowest rank on, a few at a time. Nothing may be put or discarded meanwhile."""
        self._merge()
        at, step = 0, STEP
        while at < len(self._rows) or self._extend():
            rows = self._rows[at : at + step]
            right = self._rank[rows] == self._ranks[at : at + step]
            if 2 * np.count_nonzero(right) < len(rows):
                self._compact(at)
                continue
            yield rows[right].tolist()
            at, step = at + len(rows), 2 * step

    def _put_below(self, rows: NDArray[np.int64]) -> None:
        self._below.append(rows)
        self._waiting += len(rows)
        if self._waiting > len(self._rank):  # nobody walks, as in a tier that never fills
            self._merge()

    def _merge(self) -> None:
        """Sort into the run what was put below the horizon."""
        if not self._below:
            return
        rows = np.unique(np.concatenate(self._below))
        self._below.clear()
        self._waiting = 0
        ranks = self._rank[rows]
        near = ranks <= self._horizon
        rows, ranks = rows[near], ranks[near]
        order = np.argsort(ranks)
        rows, ranks = rows[order], ranks[order]
        places = np.searchsorted(self._ranks, ranks)
        self._rows, self._ranks = np.insert(self._rows, places, rows), np.insert(self._ranks, places, ranks)
        if len(self._rows) > len(self._rank):
            self._rows, self._ranks, self._horizon = self._rows[:0], self._ranks[:0], -np.inf

    def _compact(self, begin: int) -> None:
        """Drop from a place of the run on what is no longer so."""
        rows, ranks = self._rows[begin:], self._ranks[begin:]
        right = self._rank[rows] == ranks
        self._rows = np.concatenate((self._rows[:begin], rows[right]))
        self._ranks = np.concatenate((self._ranks[:begin], ranks[right]))

    def _extend(self) -> bool:
        """Sort the next rows behind the run; False when there are none."""
        beyond = np.flatnonzero((self._rank > self._horizon) & (self._rank < ABSENT))
        if not len(beyond):
            return False
        ranks = self._rank[beyond]
        count = max(RUN_AT_LEAST, len(beyond) // 8)
        if count < len(beyond):
            near = ranks <= np.partition(ranks, count)[count]
            beyond, ranks = beyond[near], ranks[near]
        order = np.argsort(ranks)
        self._rows = np.concatenate((self._rows, beyond[order]))
        self._ranks = np.concatenate((self._ranks, ranks[order]))
        self._horizon = float(self._ranks[-1])
        return True
