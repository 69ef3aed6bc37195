"""The one writer of the log."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from kvtier.block import slot_nbytes
from kvtier.errors import ConfigError
from kvtier.lossless.method import Method
from kvtier.tiers.base import stored
from kvtier.tiers.nvme.frames import Frame, Row
from kvtier.tiers.nvme.io import Disk
from kvtier.tiers.nvme.life import Entry
from kvtier.tiers.nvme.packing import Room, groups
from kvtier.tiers.nvme.record import Record
from kvtier.tiers.nvme.recovery import Opened
from kvtier.tiers.nvme.seal import checksum
from kvtier.tiers.nvme.state import State
from kvtier.tiers.nvme.transfer import RECORDS, Transfer
from kvtier.tiers.nvme.trial import trial

CARRY = 8 << 20
"""Bytes that are carried over at a time: they wait in memory of this size, or of one record."""
UNTABLED = 512
"""Records (or a quarter of a region's, if that is more) after which a region gets a table before it is full: without
one it takes 60 microseconds a record to open."""


class Writer:
    """Appends to the log, and makes room in it. Used by one thread at a time; takes the state's lock by itself.

    Args:
        state: whose store it writes.
        reopen: makes a store anew that somebody deleted.
        transfer: moves the records.
        disk: the operating system's calls.
        clock: monotonic seconds.
        method: how payloads are packed; None: as a trial says with what is written first.
    """

    def __init__(
        self,
        state: State,
        reopen: Callable[[], Opened],
        transfer: Transfer,
        *,
        disk: Disk,
        clock: Callable[[], float],
        method: Method | None,
    ) -> None:
        self._state = state
        self._reopen = reopen
        self._transfer = transfer
        self._disk = disk
        self._clock = clock
        self.method = method
        self._room = Room()

    def ready(self) -> bool:
        """Whether the device is worth a try now. A store that somebody deleted is made anew."""
        state = self._state
        with state.lock:
            if state.write_health.resting:
                return False
            if not state.opened.file.is_deleted():
                return True
            log = state.log
            for key in list(log.entries):
                log.drop(key)
            state.read_done.wait_for(lambda: not log.readers())
        state.opened.close()
        try:
            opened = self._reopen()
        except ConfigError as exc:
            with state.lock:
                state.account_write(f"the files were deleted, and could not be made again: {exc}", final=True)
            return False
        with state.lock:
            opened.log.inherit(log)
            state.opened = opened
        return True

    def write(self, records: Sequence[Record]) -> None:
        """Append records, until the device fails; what was removed before is appended first."""
        with self._accounted():
            self._forget()
            if self.method is Method.STORED:
                self._append(records)
                return
            for group in groups(records):
                self._append(self._transfer.pack(group, self.method) if self.method else group)
                if self.method is None:
                    self.method = trial(self._transfer, self._state.opened.file, self._written(group), self._clock)

    def remove(self) -> None:
        """Append what was removed, or leave it to the next write."""
        if self.ready():
            with self._accounted():
                self._forget()
        else:
            with self._state.lock:
                self._state.counters["removal_error"] += 1

    def finish(self) -> None:
        """Leave nothing to be done at the next opening, as far as the device takes it."""
        with self._state.lock:
            resting = self._state.write_health.resting
        if not resting:
            with self._accounted():
                self._forget()
                self._seal()

    @contextmanager
    def _accounted(self) -> Iterator[None]:
        """A failing device ends what is under way; one failure is counted, however much had to be done."""
        state = self._state
        try:
            yield
        except OSError as exc:
            with state.lock:
                state.account_write(f"writing to {state.opened.file.path} failed: {exc}")

    def _append(self, records: Sequence[Record]) -> None:
        rows = [Row(r.key, stored(r.slot, r.nbytes).tobytes(), 0, r.packed) for r in records]
        state, done = self._state, 0
        while done < len(records):
            with state.lock:
                laid = state.log.lay_out(state.opened.store, rows[done : done + RECORDS])
            if not laid:
                self._make_room()
                continue
            whole, error = self._move(laid, records[done : done + len(laid)])
            with state.lock:
                for frame, sealed in laid[:whole]:
                    state.log.append(frame, sealed)
                    state.counters["written_nbytes"] += frame.row.span
                    state.counters["payload_nbytes"] += frame.row.nbytes
                state.log.doubt([frame.row.key for frame, _ in laid[whole:]])
                region = state.log.newest
            if error:
                raise error
            if region.count - region.tabled >= max(UNTABLED, region.count // 4):
                self._seal()
            done += whole

    def _forget(self) -> None:
        """Append what was removed, so that it stays so."""
        state = self._state
        try:
            while True:
                with state.lock:
                    if not state.log.removed:
                        return
                    laid = state.log.lay_out_removal(state.opened.store)
                if laid is None:
                    self._make_room()
                    continue
                frame, content = laid
                self._put(frame.offset, content)
                with state.lock:
                    state.log.append_removal(frame, content)
        except OSError:
            with state.lock:
                state.counters["removal_error"] += 1
            raise

    def _make_room(self) -> None:
        """Make some room behind the newest region's records or in a new one."""
        with self._state.lock:
            moving = self._state.log.to_carry(CARRY, RECORDS)
        if not (moving and self._carry(moving)):
            self._begin()

    def _carry(self, moving: Sequence[Entry]) -> int:
        """Append blocks of the oldest region that were read there; how many."""
        state = self._state
        records = self._slots(moving)
        wrongs = self._transfer.read(state.opened.file, records)
        with state.lock:
            found: list[tuple[Entry, Record]] = []
            for entry, record, wrong in zip(moving, records, wrongs, strict=True):
                if wrong is not None:
                    state.account_read(entry, wrong)
                elif state.log.entries.get(record.key) == entry.place:
                    found.append((entry, record))
            laid = state.log.lay_out(state.opened.store, [entry.row for entry, _ in found], carried=True)
        whole, error = self._move(laid, [record for _, record in found[: len(laid)]])
        with state.lock:
            for (frame, sealed), (entry, _) in zip(laid[:whole], found, strict=False):
                state.log.append(frame, sealed, moved=entry)
                state.counters["carried"] += 1
                state.counters["carried_nbytes"] += frame.row.span
        if error:
            raise error
        return whole

    def _slots(self, entries: Sequence[Entry]) -> list[Record]:
        """Memory to read them into: as they lie there, and the payload too where it is packed there."""
        sizes = [(slot_nbytes(entry.row.nbytes), slot_nbytes(entry.row.packed)) for entry in entries]
        room, records = self._room.get(sum(map(sum, sizes))), []
        for entry, (plain, packed) in zip(entries, sizes, strict=True):
            slot, content, room = room[:plain], room[plain : plain + packed], room[plain + packed :]
            row = entry.row
            records.append(Record(entry.offset, row.key, row.nbytes, slot, row.packed, content if packed else None))
        return records

    def _begin(self) -> None:
        """Seal the newest region, and give the oldest a new life."""
        self._seal()
        state = self._state
        with state.lock:
            begin = state.log.next_life(int.from_bytes(self._disk.random(8), "little"))
            sealed = begin.pack(state.opened.store)
        self._put(begin.offset, sealed)
        with state.lock:
            log = state.log
            state.counters["evicted"] += log.empty_oldest()
            state.read_done.wait_for(lambda: not log.oldest.readers)
            log.begin(checksum(sealed))

    def _seal(self) -> None:
        """Write the newest region's table. A region without one is as good, but takes longer to open."""
        state = self._state
        with state.lock:
            log = state.log
            region, table = log.newest, log.table()
            content = table.pack(state.opened.store) if table is not None else b""
        if not content:
            return
        try:
            self._put(log.geometry.start(region.index + 1) - len(content), content)
        except OSError:
            with state.lock:
                state.counters["table_error"] += 1
        else:
            region.tabled = region.count

    def _written(self, records: Sequence[Record]) -> list[Record]:
        """Those that are stored, with their places; these stay until the next write."""
        with self._state.lock:
            found = [(record, self._state.log.find(record.key)) for record in records]
        return [replace(record, offset=entry.offset) for record, entry in found if entry is not None]

    def _move(self, laid: Sequence[tuple[Frame, bytes]], records: Sequence[Record]) -> tuple[int, OSError | None]:
        """Write records where they are laid out; how many from the first on are whole, and what went wrong."""
        state = self._state
        placed = [replace(record, offset=frame.offset) for record, (frame, _) in zip(records, laid, strict=True)]
        whole, error = self._transfer.write(state.opened.file, [sealed for _, sealed in laid], placed)
        with state.lock:
            self._succeeded(sum(frame.row.span for frame, _ in laid[:whole]))
        return whole, error

    def _put(self, offset: int, content: bytes) -> None:
        """Write what is no payload, in whole pages."""
        buffer = self._room.get(slot_nbytes(len(content)))
        buffer[:] = content.ljust(len(buffer), b"\0")
        self._state.opened.file.write(offset, [buffer])
        with self._state.lock:
            self._succeeded(len(buffer))

    def _succeeded(self, nbytes: int) -> None:
        if nbytes:
            self._state.counters["device_nbytes"] += nbytes
            self._state.account_write("")
