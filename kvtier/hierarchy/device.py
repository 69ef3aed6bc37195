"""Blocks that engines read in the GPU tier's own memory.

The tier's process grants the slots and frees one only when it is told to remove its key; it never evicts. So what this
host must know, to lease such a slot without asking that process, is little: where each block lies, which it hears after
each write, and who reads it. A block that leaves the GPU tier while somebody reads it leaves the table at once; only
telling the tier waits for the last reader. Until then the key is not written there anew, so that a key names one slot.

What was heard is good for one life of the tier's memory, its epoch: with another all of it is forgotten.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import cast

import numpy as np
from numpy.typing import NDArray

from kvtier.hierarchy.table import BlockTable
from kvtier.tiers.base import Tier, TierNumber
from kvtier.tiers.shared import Places, SharedTier


class DeviceSlots:
    """Where blocks lie in the GPU tier's memory, and who reads them there. Not thread-safe: under the hierarchy's lock.

    Args:
        table: of the host; the columns `inside` and `inside_generation` are kept here.
        tier: the GPU tier; None where there is none.

    Attributes:
        readers: how many read each block there.
        leaving: what the tier has only for its readers, and is to remove after the last.
    """

    def __init__(self, table: BlockTable, tier: Tier | None) -> None:
        self._table = table
        self._tier = cast("SharedTier | None", tier if hasattr(tier, "places") else None)
        self._epoch = 0
        self.readers: dict[bytes, int] = {}
        self.leaving: set[bytes] = set()

    @property
    def epoch(self) -> int:
        """Of the memory that can be attached now; 0 for none."""
        return self._tier.epoch if self._tier is not None else 0

    def handle(self) -> bytes:
        """What a client attaches it with; empty when there is none."""
        return self._tier.share() if self._tier is not None else b""

    def learn(self, keys: Sequence[bytes], places: Places | None) -> None:
        """These blocks are there, as the GPU tier says; with None it was not asked, or did not answer."""
        if places is None:
            return
        table = self._table
        if places.epoch == self.epoch != self._epoch:
            table.inside[:] = -1
            self._epoch = places.epoch
        if places.epoch != self._epoch:
            return
        known = [(i, row) for i, key in enumerate(keys) if (row := table.rows.get(key)) is not None]
        rows, slots = [row for _, row in known], places.slots[[i for i, _ in known]]
        table.inside[rows], table.inside_generation[rows] = slots["offset"], slots["generation"]

    def readable(self, rows: NDArray[np.int64], epoch: int) -> NDArray[np.bool_]:
        """Which of these blocks one who has attached the memory of this epoch can read there."""
        if not epoch or not epoch == self._epoch == self.epoch:
            return np.zeros(len(rows), np.bool_)
        here = (self._table.tiers[rows] >> TierNumber.GPU & 1) > 0
        found: NDArray[np.bool_] = here & (self._table.inside[rows] >= 0)
        return found

    def lease(self, keys: Iterable[bytes]) -> None:
        """One more reads these."""
        readers = self.readers
        for key in keys:
            readers[key] = readers.get(key, 0) + 1

    def release(self, keys: Iterable[bytes]) -> None:
        """One less reads these."""
        readers = self.readers
        for key in keys:
            left = readers[key] - 1
            if left:
                readers[key] = left
            else:
                del readers[key]

    def removable(self, keys: Sequence[bytes]) -> list[bytes]:
        """Those of these keys that nobody reads; the others are on their way out."""
        self.leaving.update(key for key in keys if key in self.readers)
        return [key for key in keys if key not in self.readers]

    def unread(self) -> list[bytes]:
        """What is on its way out and is read by nobody any more; until `removed`."""
        return [key for key in self.leaving if key not in self.readers]

    def removed(self, keys: Iterable[bytes]) -> None:
        """The tier was told to remove these."""
        self.leaving.difference_update(keys)
