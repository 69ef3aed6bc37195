"""Which blocks a host has, by its events."""

from __future__ import annotations

from collections.abc import Iterable

from kvtier.events.schema import AllBlocksCleared, BlockHash, BlockStored
from kvtier.events.subscriber import Batch


class View:
    """The blocks of one host, as far as its batches told; as large as what the host has. Not thread-safe."""

    def __init__(self) -> None:
        self._tiers: dict[BlockHash, tuple[str, ...]] = {}
        self._known: dict[tuple[str, ...], tuple[str, ...]] = {}

    def __len__(self) -> int:
        return len(self._tiers)

    def apply(self, batch: Batch) -> None:
        """Take note of what a batch says."""
        if batch.fresh:
            self._tiers.clear()
        for event in batch.events:
            if isinstance(event, AllBlocksCleared):
                self._tiers.clear()
                continue
            tier = event.tier or (event.medium or "gpu").lower()
            for block in event.block_hashes:
                others = tuple(other for other in self._tiers.get(block, ()) if other != tier)
                self._set(block, (*others, tier) if isinstance(event, BlockStored) else others)

    def tiers(self, block: BlockHash) -> tuple[str, ...]:
        """Names of the tiers that have a block."""
        return self._tiers.get(block, ())

    def prefix(self, blocks: Iterable[BlockHash]) -> int:
        """How many blocks of a chain, from the first on, the host has."""
        count = 0
        for block in blocks:
            if block not in self._tiers:
                break
            count += 1
        return count

    def _set(self, block: BlockHash, tiers: tuple[str, ...]) -> None:
        if tiers:
            self._tiers[block] = self._known.setdefault(tiers, tiers)
        else:
            self._tiers.pop(block, None)
