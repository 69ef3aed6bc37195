"""What changed in the tiers, for those who follow a host from outside."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from kvtier.hierarchy.table import BlockTable
from kvtier.tiers.base import OWN, TierNumber

WAITING = 1 << 17
"""Blocks whose changes may wait to be taken: some 10 MB."""


@dataclass(frozen=True, slots=True)
class Run:
    """Blocks of one chain, each the parent of the next.

    Attributes:
        keys: their addresses.
        parent: address of the block before the first; None at the beginning of a chain, and where it is not known.
        tokens: in each of them; 0 when not known.
    """

    keys: list[bytes]
    parent: bytes | None
    tokens: int


@dataclass(frozen=True, slots=True)
class Entered:
    """A tier has these blocks now."""

    tier: TierNumber
    runs: list[Run]


@dataclass(frozen=True, slots=True)
class Left:
    """A tier has these blocks no more."""

    tier: TierNumber
    keys: list[bytes]


Change = Entered | Left


class News:
    """Changes in the order in which they happened, until somebody takes them; bounded.

    Of this host's own tiers: what another host has, that one tells.

    `entered`, `left` and `part` are called under the lock of the table; `take` is not.
    """

    def __init__(self, table: BlockTable, *, waiting: int = WAITING) -> None:
        self._table = table
        self._most = waiting
        self._lock = threading.Lock()
        self._changes: list[Change] = []
        self._blocks = 0
        self._lost = False

    @property
    def waiting(self) -> int:
        """Blocks whose changes were not taken yet."""
        return self._blocks

    def entered(self, rows: NDArray[np.int64], tier: TierNumber) -> None:
        """A tier has the blocks of these rows now."""
        if tier in OWN and len(rows) and not self._lost:
            self._add(Entered(tier, _runs(self._table, rows)), len(rows))

    def left(self, rows: NDArray[np.int64], tier: TierNumber) -> None:
        """A tier has the blocks of these rows no more."""
        if tier in OWN and len(rows) and not self._lost:
            self._add(Left(tier, _keys(self._table, rows)), len(rows))

    def take(self) -> tuple[list[Change], bool]:
        """What happened since the last call, and whether more happened than had room: then nothing of it is there."""
        with self._lock:
            taken, self._changes = self._changes, []
            lost, self._lost = self._lost, False
            self._blocks = 0
        return taken, lost

    def part(self, start: int, blocks: int) -> tuple[list[Entered], int]:
        """What the tiers have, some rows of the table at a time.

        Args:
            start: where the last part ended; 0 for the first.
            blocks: rows to look at.

        Returns:
            The blocks, and where the next part begins; -1 after the last.
        """
        table = self._table
        stop = min(start + blocks, len(table.keys))
        rows = np.arange(start, stop)
        masks = table.tiers[start:stop]
        found = [
            Entered(tier, _runs(table, here)) for tier in OWN if len(here := rows[(masks >> np.uint8(tier) & 1) > 0])
        ]
        return found, stop if stop < len(table.keys) else -1

    def _add(self, change: Change, blocks: int) -> None:
        with self._lock:
            self._changes.append(change)
            self._blocks += blocks
            if self._blocks > self._most:
                self._changes, self._blocks, self._lost = [], 0, True


def _keys(table: BlockTable, rows: NDArray[np.int64]) -> list[bytes]:
    return [table.keys[row] for row in rows.tolist()]


def _runs(table: BlockTable, rows: NDArray[np.int64]) -> list[Run]:
    """Blocks of these rows, cut where one is not the parent of the next or has not as many tokens."""
    parents, tokens = table.parent[rows], table.tokens[rows]
    parents[(parents >= 0) & (table.life[parents] != table.parent_life[rows])] = -1
    heads = np.flatnonzero((parents[1:] != rows[:-1]) | (tokens[1:] != tokens[:-1])) + 1
    keys = _keys(table, rows)
    ends = [0, *heads.tolist(), len(keys)]
    runs = []
    for start, stop in pairwise(ends):
        parent = int(parents[start])
        runs.append(Run(keys[start:stop], table.keys[parent] if parent >= 0 else None, int(tokens[start])))
    return runs
