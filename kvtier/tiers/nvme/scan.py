"""What a file holds, as far as it can be trusted."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import Executor, ThreadPoolExecutor

import numpy as np

from kvtier.block import ADDRESS_NBYTES, PAGE, slot_nbytes
from kvtier.tiers.nvme.frames import FRAME_NBYTES, REMOVAL, ROW, Begin, Frame, Row
from kvtier.tiers.nvme.io import RegionFile, pages
from kvtier.tiers.nvme.life import Life
from kvtier.tiers.nvme.record import Record, wrong
from kvtier.tiers.nvme.regions import Geometry
from kvtier.tiers.nvme.table import Table, nbytes_of


class Scan:
    """One pass over all regions: of each its begin, its table, and the frames behind that.

    Args:
        file: the file.
        store: its id.
        geometry: how it is cut.
        notes: gets what a person should know.
    """

    def __init__(self, file: RegionFile, store: bytes, geometry: Geometry, notes: list[str]) -> None:
        self._file = file
        self._store = store
        self._geometry = geometry
        self._notes = notes

    def lives(self, threads: int) -> list[Life | None]:
        """What can be trusted of each region."""
        with ThreadPoolExecutor(threads, "nvme-scan") as pool:
            lives = list(pool.map(self._life, range(self._geometry.count)))
            often = Counter(life.begin.sequence for life in lives if life is not None)
            twice = {sequence for sequence, count in often.items() if count > 1}
            self._notes.extend(f"two regions say that they are life {sequence}: neither is used" for sequence in twice)
            lives = [None if life is None or life.begin.sequence in twice else life for life in lives]
            known = [life for life in lives if life is not None]
            ends = {life.begin.former: life.begin.former_tail for life in known}
            for life in known:
                _cut(life, ends.get(life.begin.sequence))
            if known:
                self._cut_torn(max(known, key=lambda life: life.begin.sequence), pool)
            list(pool.map(self._find_removed, known))
        return lives

    def _life(self, region: int) -> Life | None:
        start, page = self._geometry.start(region), pages(1)
        found = Begin.unpack(self._store, page) if self._fill(start, page) else None
        if found is None or found[0].offset != start or not found[0].sequence:
            return None
        begin, root = found
        life = Life(begin, self._table(region, root) or Table(root, PAGE, root, bytearray()), [])
        at, last = life.table.tail, life.table.last
        while at < self._geometry.region_nbytes and self._fill(start + at, page):
            following = Frame.unpack(self._store, page)
            if following is None or not self._continues(following[0], begin, start, at, last):
                break
            life.frames.append(following)
            at, last = at + following[0].row.span, following[1]
        return life

    def _table(self, region: int, root: int) -> Table | None:
        """The table of this life, if it is there and whole."""
        end, page = self._geometry.start(region + 1), pages(1)
        nbytes = nbytes_of(self._store, root, page) if self._fill(end - PAGE, page) else 0
        if not nbytes:
            return None
        table = page if nbytes == PAGE else pages(nbytes // PAGE)
        return Table.unpack(table) if nbytes == PAGE or self._fill(end - nbytes, table) else None

    def _continues(self, frame: Frame, begin: Begin, start: int, at: int, last: int) -> bool:
        """Whether a whole frame found at `at` in its region is the next one of this life."""
        row = frame.row
        return (
            (frame.sequence, frame.offset, frame.previous) == (begin.sequence, start + at, last)
            and row.page * PAGE == at
            and 0 < (row.packed or row.nbytes) <= row.span <= self._geometry.region_nbytes - at
        )

    def _cut_torn(self, newest: Life, pool: Executor) -> None:
        """Verify what was being written when the last process ended, and cut the newest life behind what is whole."""
        settled = max((frame.settled for frame, _ in newest.frames), default=0)
        doubtful = [frame for frame, _ in newest.frames if frame.row.page * PAGE >= settled]
        torn = [frame for frame, whole in zip(doubtful, pool.map(self._is_whole, doubtful), strict=True) if not whole]
        while torn and torn[-1] is newest.frames[-1][0]:
            torn.pop()
            newest.frames.pop()
        newest.torn.extend(frame.row.key for frame in torn if frame.row.kind != REMOVAL)

    def _is_whole(self, frame: Frame) -> bool:
        row = frame.row
        if row.kind == REMOVAL:
            return self._removed(frame.offset, row) is not None
        slot = pages(slot_nbytes(row.nbytes) // PAGE)
        record = Record(frame.offset, row.key, row.nbytes, slot, row.packed)
        content = pages(record.length // PAGE) if record.packed else slot
        return self._fill(frame.offset + PAGE, content) and wrong(record, content) is None

    def _find_removed(self, life: Life) -> None:
        """Read the addresses that the removals of a life name."""
        tabled = len(life.table.rows) // ROW.itemsize
        kinds = np.frombuffer(life.table.rows, ROW)["kind"]
        removals = [(number, Row.at(life.table.rows, number)) for number in np.flatnonzero(kinds == REMOVAL).tolist()]
        removals += [(number, f.row) for number, (f, _) in enumerate(life.frames, tabled) if f.row.kind == REMOVAL]
        for number, row in removals:
            addresses = self._removed(life.begin.offset + row.page * PAGE, row)
            if addresses is None:
                self._notes.append(
                    f"a record of {row.nbytes // ADDRESS_NBYTES} removed blocks is corrupt: some may be back"
                )
            else:
                life.removed[number] = addresses

    def _removed(self, offset: int, row: Row) -> bytes | None:
        """The addresses of a removal; None when they are not whole."""
        content = pages(row.span // PAGE)
        if not self._fill(offset, content):
            return None
        addresses = bytes(content[FRAME_NBYTES : FRAME_NBYTES + row.nbytes])
        return addresses if row.removes(addresses) else None

    def _fill(self, offset: int, buffer: memoryview) -> bool:
        """Read; whether that was possible."""
        try:
            self._file.read(offset, [buffer])
        except OSError as exc:
            region = (offset - self._geometry.start(0)) // self._geometry.region_nbytes
            self._notes.append(f"region {region} could not be read at {offset}: {exc}")
            return False
        return True


def _cut(life: Life, end: int | None) -> None:
    """Forget what lies at `end` of its region and behind: it was never acknowledged."""
    if end is not None:
        life.frames[:] = [one for one in life.frames if one[0].row.page * PAGE < end]
