"""The NVMe tier."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from kvtier.block import ADDRESS_NBYTES, PAGE, slot_nbytes
from kvtier.errors import ClosedError, ConfigError, CorruptPayload
from kvtier.lossless.method import Method
from kvtier.memory.arena import Arena
from kvtier.tiers.base import STORED, Inventory, Slots, TierUsage
from kvtier.tiers.nvme.health import Health
from kvtier.tiers.nvme.io import Disk
from kvtier.tiers.nvme.log import Entry
from kvtier.tiers.nvme.packing import groups, load_libraries
from kvtier.tiers.nvme.record import Record
from kvtier.tiers.nvme.recovery import Opened, open_store
from kvtier.tiers.nvme.regions import REGION_NBYTES, RESERVE, Frame, Geometry, span
from kvtier.tiers.nvme.transfer import RECORDS, Transfer
from kvtier.tiers.nvme.trial import trial


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
        self._geometry = Geometry.fit(capacity, region_nbytes)
        self._memory = arena.payload(0, arena.capacity)
        self._disk = disk or Disk()
        self._open: Callable[[], Opened] = lambda: open_store(
            folder, self._geometry, self._disk, direct=direct, threads=threads
        )
        self._store = self._open()
        self._transfer = Transfer(threads)
        self._method = lossless
        if lossless is not Method.STORED:
            load_libraries()
        self._clock = clock
        self._writing = threading.Lock()
        """Held by the one batch that is being written; taken before `_lock`."""
        self._lock = threading.Lock()
        """Guards all that follows; never held during I/O."""
        self._read_done = threading.Condition(self._lock)
        self._counters: Counter[str] = Counter()
        self._write_health, self._read_health = Health(clock), Health(clock)
        self._closed = False

    @property
    def direct(self) -> bool:
        """Whether the page cache is bypassed."""
        return self._store.file.direct

    @property
    def notes(self) -> tuple[str, ...]:
        """What a person should know about its opening."""
        return self._store.notes

    def write(self, keys: Sequence[bytes], slots: Slots) -> list[bool]:
        with self._writing:
            with self._lock:
                self._check_open()
                records = self._unstored(keys, slots)
            if records and self._may_write():
                self._append(records)
            with self._lock:
                stored = self._store.log.entries
                return [(entry := stored.get(key)) is not None and not entry.suspect for key in keys]

    def read(self, keys: Sequence[bytes], slots: Slots) -> list[bool]:
        answers = [False] * len(keys)
        with self._lock:
            self._check_open()
            if self._read_health.resting:
                return answers
            wanted = self._pin(keys, slots)
            file = self._store.file
        records = [record for _, record, _ in wanted]
        try:
            wrongs = self._transfer.read(file, records)
        finally:
            with self._lock:
                for _, _, entry in wanted:
                    entry.region.readers -= 1
                self._read_done.notify_all()
        with self._lock:
            for (place, record, entry), wrong in zip(wanted, wrongs, strict=True):
                answers[place] = wrong is None
                self._account_read(record, entry, wrong)
            if error := next((wrong for wrong in wrongs if isinstance(wrong, OSError)), None):
                self._read_health.failed(f"reading in {self.folder} failed: {error}")
            elif any(answers):
                self._read_health.succeeded()
        return answers

    def remove(self, keys: Sequence[bytes]) -> None:
        with self._lock:
            self._check_open()
            for key in keys:
                self._store.log.entries.pop(key, None)

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        with self._lock:
            self._check_open()
            return [key in self._store.log.entries for key in keys]

    def inventory(self) -> Inventory:
        with self._lock:
            self._check_open()
            entries = self._store.log.entries
            records = np.zeros(len(entries), STORED)
            records["nbytes"] = [entry.nbytes for entry in entries.values()]
            return Inventory(list(entries), records)

    def dropped(self) -> list[bytes]:
        with self._lock:
            self._check_open()
            return self._store.log.dropped()

    def usage(self) -> TierUsage:
        with self._lock:
            self._check_open()
            log = self._store.log
            fault = self._write_health.fault or self._read_health.fault
            return TierUsage(self._capacity, RESERVE + log.used, len(log.entries), fault, dict(self._counters))

    def close(self) -> None:
        with self._writing:
            with self._lock:
                if self._closed:
                    return
                self._closed = True
                self._read_done.wait_for(lambda: not self._store.log.readers())
            self._transfer.close()
            self._store.close()

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
            entry = self._store.log.entries.get(key)
            slot = self._slot(key, offset, nbytes)
            if entry is not None and slot is not None and entry.nbytes == nbytes:
                entry.region.readers += 1
                wanted.append((place, Record(entry.offset, key, nbytes, slot, entry.packed), entry))
        return wanted

    def _account_read(self, record: Record, entry: Entry, wrong: OSError | CorruptPayload | None) -> None:
        log = self._store.log
        if wrong is None:
            self._counters["read_nbytes"] += record.nbytes
        elif isinstance(wrong, OSError):
            self._counters["read_error"] += 1
            log.suspect(record.key, entry)
        else:
            self._counters["corrupt"] += 1
            if log.entries.get(record.key) is entry:
                log.drop(record.key)

    def _unstored(self, keys: Sequence[bytes], slots: Slots) -> list[Record]:
        """What has to be written; its place in the file is not known yet."""
        records: dict[bytes, Record] = {}
        for key, offset, nbytes in _items(keys, slots):
            entry = self._store.log.entries.get(key)
            slot = self._slot(key, offset, nbytes)
            if slot is None or (entry is not None and not entry.suspect):
                continue
            if span(nbytes) > self._geometry.region_nbytes:
                self._counters["too_large"] += 1
            else:
                records.setdefault(key, Record(0, key, nbytes, slot))
        return list(records.values())

    def _may_write(self) -> bool:
        """Whether the device is worth a try now. A store that somebody deleted is made anew."""
        with self._lock:
            if self._write_health.resting:
                return False
            if not self._store.file.is_deleted():
                return True
            log = self._store.log
            for key in list(log.entries):
                log.drop(key)
            self._read_done.wait_for(lambda: not log.readers())
        self._store.close()
        try:
            opened = self._open()
        except ConfigError as exc:
            self._account_write(
                f"the files in {self.folder} were deleted, and could not be made again: {exc}", final=True
            )
            return False
        with self._lock:
            opened.log.inherit(log)
            self._store = opened
        return True

    def _append(self, records: list[Record]) -> None:
        """Write records to the end of the log, until one fails."""
        if self._method is Method.STORED:
            self._append_group(records)
            return
        for group in groups(records):
            ready = self._transfer.pack(group, self._method) if self._method else group
            if not self._append_group(ready):
                return
            if self._method is None:
                self._method = trial(self._transfer, self._store.file, self._written(group), self._clock)

    def _written(self, records: Sequence[Record]) -> list[Record]:
        """Those that are stored, with their places; these stay until the next write."""
        with self._lock:
            stored = self._store.log.entries
            return [replace(r, offset=entry.offset) for r in records if (entry := stored.get(r.key)) is not None]

    def _append_group(self, records: Sequence[Record]) -> bool:
        """Whether all of them were written."""
        done = 0
        while done < len(records):
            laid = self._lay_out(records[done : done + RECORDS])
            placed = [replace(r, offset=frame.offset) for r, (frame, _) in zip(records[done:], laid, strict=False)]
            whole, error = self._transfer.write(self._store.file, [sealed for _, sealed in laid], placed)
            with self._lock:
                for frame, sealed in laid[:whole]:
                    self._store.log.append(self._store.log.newest, frame, sealed)
                    self._counters["written_nbytes"] += frame.span
            self._account_write(f"writing in {self.folder} failed: {error}" if error else "")
            if error:
                return False
            done += whole
        return True

    def _lay_out(self, records: Sequence[Record]) -> list[tuple[Frame, bytes]]:
        """Frames for as many records as the newest region has room for; takes the oldest when it has none."""
        with self._lock:
            log = self._store.log
            if log.room() < PAGE + records[0].length:
                self._counters["evicted"] += log.empty_oldest()
                self._read_done.wait_for(lambda: not log.oldest.readers)
                log.begin(int.from_bytes(self._disk.random(8), "little"))
            return log.lay_out(self._store.store, [(record.key, record.nbytes, record.packed) for record in records])

    def _account_write(self, fault: str, *, final: bool = False) -> None:
        with self._lock:
            if fault:
                self._counters["write_error"] += 1
                self._write_health.failed(fault, final=final)
            else:
                self._write_health.succeeded()


def _items(keys: Sequence[bytes], slots: Slots) -> Iterator[tuple[bytes, int, int]]:
    return zip(keys, slots.offsets.tolist(), slots.nbytes.tolist(), strict=True)
