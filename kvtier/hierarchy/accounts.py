"""How much of each tier each keyspace takes."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
from numpy.typing import NDArray

from kvtier.block import PAGE
from kvtier.tiers.base import TierNumber

GROWTH = 64


Share = tuple[frozenset[int], int]
"""Keyspace numbers, and bytes that they may take together."""


class Accounts:
    """Bytes in slots, by tier and keyspace number, and blocks by tier. Not thread-safe.

    Attributes:
        blocks: of this host in each tier, by its number.
        shares: tells which keyspaces may take how much of a tier; all others may take what they get.
    """

    def __init__(self) -> None:
        self.shares: Callable[[TierNumber], Iterable[Share]] = lambda _: ()
        self.blocks = [0] * (max(TierNumber) + 1)
        self._held = np.zeros((max(TierNumber) + 1, GROWTH), np.int64)

    def enter(self, tier: TierNumber, spaces: NDArray[np.uint32], nbytes: NDArray[np.int64]) -> None:
        """Payloads of these sizes came into a tier."""
        most = int(spaces.max(initial=0))
        if most >= self._held.shape[1]:
            self._held = np.pad(self._held, ((0, 0), (0, 2 * most)))
        self.blocks[tier] += len(nbytes)
        np.add.at(self._held[tier], spaces, -(-nbytes // PAGE) * PAGE)

    def leave(self, tier: TierNumber, spaces: NDArray[np.uint32], nbytes: NDArray[np.int64]) -> None:
        """Payloads of these sizes left a tier."""
        self.blocks[tier] -= len(nbytes)
        np.subtract.at(self._held[tier], spaces, -(-nbytes // PAGE) * PAGE)

    def within(self, tier: TierNumber, spaces: NDArray[np.uint32], nbytes: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which of these payloads, taken one after the other, leave each keyspace within its share of a tier."""
        fit = np.ones(len(spaces), np.bool_)
        for several, most in self.shares(tier):
            ours = np.flatnonzero(np.isin(spaces, list(several)))
            taken = self.held(tier, several) + np.cumsum(-(-nbytes[ours] // PAGE) * PAGE)
            fit[ours[taken > most]] = False
        return fit

    def held(self, tier: TierNumber, spaces: Iterable[int]) -> int:
        """Bytes that keyspaces take in a tier; those that it never had take none."""
        known = [space for space in spaces if 0 <= space < self._held.shape[1]]
        return int(self._held[tier, known].sum())
