"""Tiers that keep books and no bytes.

What decides is real: slot pools and their size classes, the region log and its one writer. What would move bytes does
nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from kvtier.block import BlockHeader
from kvtier.errors import CorruptPayload
from kvtier.lossless.method import Method
from kvtier.memory.lock import FileLock
from kvtier.memory.pool import SlotPool
from kvtier.tiers.base import Inventory, Slots, TierUsage, stored
from kvtier.tiers.cpu import CpuTier
from kvtier.tiers.nvme.io import Disk, RegionFile
from kvtier.tiers.nvme.log import RegionLog
from kvtier.tiers.nvme.record import Record
from kvtier.tiers.nvme.recovery import Opened
from kvtier.tiers.nvme.regions import REGION_NBYTES, STORE_ID_NBYTES, Geometry
from kvtier.tiers.nvme.state import State
from kvtier.tiers.nvme.transfer import Transfer
from kvtier.tiers.nvme.writer import Writer


class SimulatedCpu(CpuTier):
    """The CPU tier without an arena.

    Args:
        capacity: bytes.
        header: what every block says of itself.
    """

    def __init__(self, capacity: int, header: BlockHeader) -> None:
        self.pool = SlotPool(capacity)
        self.quarantined = {}
        self._said = stored(header.pack(), 0)

    def grow(self) -> None:
        """All of it is there."""

    def grant(self, nbytes: int, writer: int = 0) -> tuple[int, int] | None:
        del writer
        offset = self.pool.allocate(nbytes)
        return None if offset is None else (offset, 0)

    def headers(
        self, keys: Sequence[bytes], offsets: Sequence[int], nbytes: Sequence[int]
    ) -> tuple[NDArray[np.bool_], NDArray[Any]]:
        del offsets
        said = np.full(len(keys), self._said)
        said["nbytes"] = nbytes
        return np.ones(len(keys), np.bool_), said

    def written(self, offset: int, nbytes: int) -> None:
        """Nobody wrote."""


class SimulatedGpu:
    """A `Tier`: the GPU tier's pool and its keys."""

    name = "gpu"

    def __init__(self, capacity: int) -> None:
        self._pool = SlotPool(capacity)
        self._blocks: dict[bytes, tuple[int, int]] = {}

    def write(self, keys: Sequence[bytes], slots: Slots) -> list[bool]:
        for key, nbytes in zip(keys, slots.nbytes.tolist(), strict=True):
            if key not in self._blocks and (offset := self._pool.allocate(nbytes)) is not None:
                self._blocks[key] = offset, nbytes
        return self.contains(keys)

    def read(self, keys: Sequence[bytes], slots: Slots) -> list[bool]:
        del slots
        return self.contains(keys)

    def remove(self, keys: Sequence[bytes]) -> None:
        offsets = [self._blocks.pop(key)[0] for key in keys if key in self._blocks]
        self._pool.release(Slots.of(offsets, offsets).offsets)

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        return [key in self._blocks for key in keys]

    def inventory(self) -> Inventory:
        return Inventory.of([], [])

    def dropped(self) -> list[bytes]:
        return []

    def usage(self) -> TierUsage:
        return TierUsage(self._pool.capacity, self._pool.used, len(self._blocks))

    def close(self) -> None:
        pass


class SimulatedNvme:
    """A `Tier`: the NVMe tier's log and writer, over a file that is not there.

    Args:
        capacity: bytes.
        header: what every block says of itself.
        clock: seconds.
    """

    name = "nvme"

    def __init__(self, capacity: int, header: BlockHeader, clock: Callable[[], float]) -> None:
        self._capacity = capacity
        geometry = Geometry.fit(capacity, REGION_NBYTES)
        store, disk, transfer = bytes(STORE_ID_NBYTES), _NoDisk(), _NoTransfer()
        opened = Opened(_NoFile(), store, RegionLog(geometry), (), cast("FileLock", None))
        self._state = State(opened, clock)
        self._writer = Writer(self._state, lambda: opened, transfer, disk=disk, clock=clock, method=Method.STORED)
        self._slot = memoryview(header.pack())

    def write(self, keys: Sequence[bytes], slots: Slots) -> list[bool]:
        log = self._state.log
        records = [
            Record(0, key, nbytes, self._slot)
            for key, nbytes in zip(keys, slots.nbytes.tolist(), strict=True)
            if not log.is_sound(key) and log.holds(nbytes)
        ]
        if records:
            self._writer.write(records)
        return [log.is_sound(key) for key in keys]

    def read(self, keys: Sequence[bytes], slots: Slots) -> list[bool]:
        del slots
        found = [self._state.log.find(key) for key in keys]
        for entry in found:
            if entry is not None:
                self._state.account_read(entry, None)
        return [entry is not None for entry in found]

    def remove(self, keys: Sequence[bytes]) -> None:
        if self._state.log.forget(keys):
            self._writer.remove()

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        return [key in self._state.log.entries for key in keys]

    def inventory(self) -> Inventory:
        return self._state.log.inventory()

    def dropped(self) -> list[bytes]:
        return self._state.log.dropped()

    def usage(self) -> TierUsage:
        # A log that has wrapped stays full, but for the region that it writes: no need to add up all of them each time.
        counters = dict(self._state.counters)
        used = min(counters.get("device_nbytes", 0), self._state.log.geometry.file_nbytes)
        return TierUsage(self._capacity, used, len(self._state.log.entries), counters=counters)

    def close(self) -> None:
        pass


class _NoDisk(Disk):
    def random(self, nbytes: int) -> bytes:
        return bytes(nbytes)


class _NoFile(RegionFile):
    def __init__(self) -> None:
        self.path = Path()

    def write(self, offset: int, buffers: Sequence[memoryview]) -> None:
        pass

    def is_deleted(self) -> bool:
        return False


class _NoTransfer(Transfer):
    def __init__(self) -> None:
        pass

    def read(self, file: RegionFile, records: Sequence[Record]) -> list[OSError | CorruptPayload | None]:
        del file
        return [None] * len(records)

    def write(self, file: RegionFile, frames: Sequence[bytes], records: Sequence[Record]) -> tuple[int, OSError | None]:
        del file, frames
        return len(records), None
