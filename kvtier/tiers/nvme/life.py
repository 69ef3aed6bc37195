"""Regions and their lives, in memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvtier.block import PAGE
from kvtier.tiers.base import STORED, Inventory
from kvtier.tiers.nvme.frames import REMOVAL, ROW, Begin, Frame, Row, split
from kvtier.tiers.nvme.table import Table, table_nbytes

ROW_BITS = 32
"""Bits of a place that number the row; those above number the life."""
ROW_MASK = (1 << ROW_BITS) - 1


@dataclass(slots=True, eq=False)
class Region:
    """One region and its present life.

    Attributes:
        index: its place in the file.
        sequence: number of this life; 0 before the first.
        root: checksum of its begin.
        tail: bytes of it, from its start, that hold its begin and whole records.
        last: checksum of its last frame; the root while it has none.
        rows: what was appended in this life, in order, as `ROW`s.
        tabled: rows that its table on the disk has.
        reads: rows that were read since they were appended and are still stored, with the time of their last read.
        warm: bytes of these records.
        carried: bytes of the records in it that were carried over from another region.
        readers: reads of it that are under way.
    """

    index: int
    sequence: int = 0
    root: int = 0
    tail: int = 0
    last: int = 0
    rows: bytearray = field(default_factory=bytearray)
    tabled: int = 0
    reads: dict[int, int] = field(default_factory=dict)
    warm: int = 0
    carried: int = 0
    readers: int = 0

    @property
    def count(self) -> int:
        """Rows of this life."""
        return len(self.rows) // ROW.itemsize

    def keys(self) -> list[bytes]:
        """The key of every row."""
        keys: list[bytes] = np.frombuffer(self.rows, ROW)["key"].tolist()
        return keys

    def stored(self, numbers: NDArray[np.int64]) -> NDArray[Any]:
        """The `STORED` record of each of these rows."""
        return np.frombuffer(self.rows, ROW)["stored"][numbers]

    def extend(self, frame: Frame, last: int) -> None:
        """A record follows that is whole on disk; `last` is the checksum of its frame."""
        self.rows += frame.row.pack()
        self.tail, self.last = frame.row.page * PAGE + frame.row.span, last

    def warmed(self, number: int, time: int) -> None:
        """A row was read."""
        if number not in self.reads:
            self.warm += Row.at(self.rows, number).span
        self.reads[number] = time

    def warmest(self, nbytes: int) -> list[int]:
        """Rows that were read and have room in so many bytes, the last read ones first; in the order of the rows."""
        chosen = []
        for number in sorted(self.reads, key=self.reads.__getitem__, reverse=True):
            size = Row.at(self.rows, number).span
            if size <= nbytes:
                chosen.append(number)
                nbytes -= size
        return sorted(chosen)

    def cooled(self, number: int) -> None:
        """A row is not to be carried over."""
        if self.reads.pop(number, 0):
            self.warm -= Row.at(self.rows, number).span

    @property
    def used(self) -> int:
        """Bytes that its begin, its records and their table take."""
        return self.tail + table_nbytes(self.count) if self.sequence else 0


@dataclass(frozen=True, slots=True)
class Life:
    """What recovery found of a region's present life.

    Attributes:
        begin: its first page.
        table: its table, or an empty one.
        frames: those behind the table, with their checksums.
        removed: the addresses that its removals name, by the number of their row.
        torn: keys of payloads that are not whole, though others behind them are.
    """

    begin: Begin
    table: Table
    frames: list[tuple[Frame, int]]
    removed: dict[int, bytes] = field(default_factory=dict)
    torn: list[bytes] = field(default_factory=list)


class Entry(NamedTuple):
    """Where a payload lies.

    Attributes:
        place: number of its life and row; never given again, and higher than that of whatever was appended before.
        region: in this region's present life.
        offset: where its frame lies in the file.
        row: what its frame says.
    """

    place: int
    region: Region
    offset: int
    row: Row


def replay(entries: dict[bytes, int], region: Region, removed: Mapping[int, bytes]) -> None:
    """Note the places of what a region's rows say, in their order: the last word on a key counts.

    Args:
        entries: place of every key, after all regions whose lives began before.
        region: the next.
        removed: the addresses that its removals name, by the number of their row.
    """
    keys, first, at = region.keys(), region.sequence << ROW_BITS, 0
    removals = np.flatnonzero(np.frombuffer(region.rows, ROW)["kind"] == REMOVAL).tolist()
    for number in (*removals, len(keys)):
        entries.update(zip(keys[at:number], range(first + at, first + number), strict=True))
        for key in split(removed.get(number, b"")):
            entries.pop(key, None)
        at = number + 1


def inventory(entries: Mapping[bytes, int], lives: Mapping[int, Region]) -> Inventory:
    """What lies at these places, oldest first; lives by their numbers."""
    places = np.fromiter(entries.values(), np.int64, len(entries))
    order = np.argsort(places)
    sequences, numbers = places[order] >> ROW_BITS, places[order] & ROW_MASK
    records = np.empty(len(places), STORED)
    for sequence, region in lives.items():
        first, end = np.searchsorted(sequences, (sequence, sequence + 1))
        records[first:end] = region.stored(numbers[first:end])
    keys = list(entries)
    return Inventory([keys[at] for at in order.tolist()], records)
