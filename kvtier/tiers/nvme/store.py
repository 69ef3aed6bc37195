"""The NVMe tier."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from kvtier.block import ADDRESS_NBYTES, PAGE, slot_nbytes
from kvtier.errors import ClosedError
from kvtier.lossless.method import Method
from kvtier.memory.arena import Arena
from kvtier.tiers.base import Inventory, Slots, TierUsage
from kvtier.tiers.nvme.io import Disk
from kvtier.tiers.nvme.life import Entry
from kvtier.tiers.nvme.packing import load_libraries
from kvtier.tiers.nvme.record import Record
from kvtier.tiers.nvme.recovery import Opened, open_store
from kvtier.tiers.nvme.regions import REGION_NBYTES, RESERVE, Geometry
from kvtier.tiers.nvme.state import State
from kvtier.tiers.nvme.transfer import Transfer
from kvtier.tiers.nvme.writer import Writer


class NvmeTier:
    """Payloads in a log over fixed regions of one preallocated file; see the package's docstring.

    Args:
        folder: where its files are; made if missing; one process at a time.
        capacity: bytes that it may take on the disk, all told; what was set aside is not counted.
        arena: where the slots are.
        region_nbytes: size of a region, lowered to an eighth of the capacity; a payload must fit into one.
        threads: reads and writes under way at a time, each.
        direct: bypass the page cache where the file system can.
        lossless: how payloads that get smaller by it are packed; None: as a trial says with what is written first.
        disk: the operating system's calls.
        clock: monotonic seconds.

    Attributes:
        direct: whether the page cache is bypassed.
        notes: what a person should know about its opening.

    Raises:
        ConfigError: another process has the folder, it cannot be used, or it has no room.
    """

    name = "nvme"

    def __init__(
        self,
        folder: Path,
        capacity: int,
        arena: Arena,
        *,
        region_nbytes: int = REGION_NBYTES,
        threads: int = 2,
        direct: bool = True,
        lossless: Method | None = Method.STORED,
        disk: Disk | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.folder = folder
        self._capacity = capacity
        self._memory = arena.payload(0, arena.capacity)
        geometry, disk = Geometry.fit(capacity, region_nbytes), disk or Disk()

        def opened() -> Opened:
            return open_store(folder, geometry, disk, direct=direct, threads=threads)

        self._state = State(opened(), clock)
        self._transfer = Transfer(threads)
        if lossless is not Method.STORED:
            load_libraries()
        self._writer = Writer(self._state, opened, self._transfer, disk=disk, clock=clock, method=lossless)
        self._writing = threading.Lock()
        """Held by whoever uses the writer; taken before the state's lock."""
        self._closed = False
        if self._state.log.removed:
            self._writer.remove()

    @property
    def direct(self) -> bool:
        """Whether the page cache is bypassed."""
        return self._state.opened.file.direct

    @property
    def notes(self) -> tuple[str, ...]:
        """What a person should know about its opening."""
        return self._state.opened.notes

    def write(self, keys: Sequence[bytes], slots: Slots) -> list[bool]:
        state = self._state
        with self._writing:
            with state.lock:
                self._check_open()
                records = self._unstored(keys, slots)
            if records and self._writer.ready():
                self._writer.write(records)
            with state.lock:
                return [state.log.is_sound(key) for key in keys]

    def read(self, keys: Sequence[bytes], slots: Slots) -> list[bool]:
        answers, state = [False] * len(keys), self._state
        with state.lock:
            self._check_open()
            if state.read_health.resting:
                return answers
            wanted = self._pin(keys, slots)
            file = state.opened.file
        try:
            wrongs = self._transfer.read(file, [record for _, record, _ in wanted])
        finally:
            with state.lock:
                for _, _, entry in wanted:
                    entry.region.readers -= 1
                state.read_done.notify_all()
        with state.lock:
            for (place, _, entry), wrong in zip(wanted, wrongs, strict=True):
                answers[place] = wrong is None
                state.account_read(entry, wrong)
            if error := next((wrong for wrong in wrongs if isinstance(wrong, OSError)), None):
                state.read_health.failed(f"reading in {self.folder} failed: {error}")
            elif any(answers):
                state.read_health.succeeded()
        return answers

    def remove(self, keys: Sequence[bytes]) -> None:
        state = self._state
        with state.lock:
            self._check_open()
            if not state.log.forget(keys):
                return
        with self._writing:
            if not self._closed:
                self._writer.remove()

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        with self._state.lock:
            self._check_open()
            return [key in self._state.log.entries for key in keys]

    def inventory(self) -> Inventory:
        with self._state.lock:
            self._check_open()
            return self._state.log.inventory()

    def dropped(self) -> list[bytes]:
        with self._state.lock:
            self._check_open()
            return self._state.log.dropped()

    def usage(self) -> TierUsage:
        state = self._state
        with state.lock:
            self._check_open()
            fault = state.write_health.fault or state.read_health.fault
            used, blocks = RESERVE + state.log.used, len(state.log.entries)
            return TierUsage(self._capacity, used, blocks, fault, dict(state.counters))

    def close(self) -> None:
        state = self._state
        with self._writing:
            with state.lock:
                if self._closed:
                    return
                self._closed = True
                state.read_done.wait_for(lambda: not state.log.readers())
            try:
                self._writer.finish()
            finally:
                self._transfer.close()
                state.opened.close()

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(f"the NVMe tier in {self.folder} was closed")

    def _slot(self, key: bytes, offset: int, nbytes: int) -> memoryview | None:
        """The memory of a slot; None when key or slot are not what they should be."""
        end = offset + slot_nbytes(nbytes)
        if len(key) != ADDRESS_NBYTES or offset % PAGE or not 0 <= offset < end <= len(self._memory):
            return None
        return self._memory[offset:end]

    def _pin(self, keys: Sequence[bytes], slots: Slots) -> list[tuple[int, Record, Entry]]:
        """What can be read, by its place in the batch; each counts as a reader of its region from now on."""
        wanted = []
        for place, (key, offset, nbytes) in enumerate(_items(keys, slots)):
            entry, slot = self._state.log.find(key), self._slot(key, offset, nbytes)
            if entry is not None and slot is not None and entry.row.nbytes == nbytes:
                entry.region.readers += 1
                wanted.append((place, Record(entry.offset, key, nbytes, slot, entry.row.packed), entry))
        return wanted

    def _unstored(self, keys: Sequence[bytes], slots: Slots) -> list[Record]:
        """What has to be written; its place in the file is not known yet."""
        records: dict[bytes, Record] = {}
        state = self._state
        for key, offset, nbytes in _items(keys, slots):
            slot = self._slot(key, offset, nbytes)
            if slot is None or state.log.is_sound(key):
                continue
            if state.log.holds(nbytes):
                records.setdefault(key, Record(0, key, nbytes, slot))
            else:
                state.counters["too_large"] += 1
        return list(records.values())


def _items(keys: Sequence[bytes], slots: Slots) -> Iterator[tuple[bytes, int, int]]:
    return zip(keys, slots.offsets.tolist(), slots.nbytes.tolist(), strict=True)
