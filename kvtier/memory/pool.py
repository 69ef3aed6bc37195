"""Ref-counted, size-classed slots of a byte range."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvtier.block import PAGE, slot_nbytes
from kvtier.errors import ConfigError, UsageError

TARGET_SEGMENT = 64 << 20
SEGMENTS_AT_LEAST = 16
"""A segment is at most this part of the capacity, so that one class does not take everything at once."""
WASTE = 1 / 32
"""Part of a segment that may be too small for one more slot."""


@dataclass(slots=True, eq=False)
class Segment:
    """A run of units cut into slots of one size."""

    first_unit: int
    units: int
    size: int
    free: list[int] = field(default_factory=list)
    live: set[int] = field(default_factory=set)


class SlotPool:
    """Which byte ranges of `[0, capacity)` are slots. Not thread-safe: used under the hierarchy's lock.

        |<- unit ->|
        +----------+----------+----------+----------+----------+
        | segment: slots of 260 KiB      | free     | segment of another class ...
        +----------+----------+----------+----------+----------+

    A slot is granted with one reference and is free again when its last reference is released. A segment whose slots
    are all free goes back to the common stock, for any class.

    Args:
        capacity: bytes that may be granted, until `grow` says more.
        unit: bytes; segments are cut in whole ones.
        total: bytes that it may grow to; `capacity` unless it is given.
    """

    def __init__(self, capacity: int, *, unit: int | None = None, total: int | None = None) -> None:
        total = capacity if total is None else total
        self.unit = unit or max(PAGE, min(1 << 20, total // 1024 // PAGE * PAGE))
        if self.unit % PAGE or not self.unit <= capacity <= total:
            raise ConfigError(f"a pool of {capacity} bytes cannot be cut into units of {self.unit}; use at least 4 KiB")
        self.total = total // self.unit * self.unit
        self.capacity = capacity // self.unit * self.unit
        self.used = 0
        self.blocks = 0
        self._refs = np.zeros(self.total // PAGE, np.int32)
        self._segments: dict[int, Segment] = {}
        self._open: dict[int, dict[int, Segment]] = {}
        self._of_unit = np.full(self.total // self.unit, -1, np.int64)

    def grow(self, capacity: int) -> None:
        """From now on this many bytes may be granted, in whole units."""
        grown = capacity // self.unit * self.unit
        if not self.capacity <= grown <= self.total:
            raise UsageError(f"a pool of {self.capacity} of {self.total} bytes cannot grow to {grown}")
        self.capacity = grown

    def allocate(self, nbytes: int) -> int | None:
        """Grant a slot for a payload of `nbytes`; None when its class has no room."""
        if nbytes < 1:
            raise UsageError(f"a payload of {nbytes} bytes has no slot; ask for at least 1")
        size = slot_nbytes(nbytes)
        ready = self._open.setdefault(size, {})
        segment = next(iter(ready.values()), None) or self._new_segment(size)
        if segment is None:
            return None
        offset = segment.free.pop()
        segment.live.add(offset)
        if not segment.free:
            ready.pop(segment.first_unit, None)
        self._refs[offset // PAGE] = 1
        self.used += size
        self.blocks += 1
        return offset

    def claim(self, offset: int, nbytes: int, references: int) -> int:
        """Take the free units that hold this range out of the stock, as one slot; returns its offset.

        For ranges that were in use before this pool was made: the slot is free after `references` releases.
        """
        first, end = offset // self.unit, -(-(offset + nbytes) // self.unit)
        units, base = end - first, first * self.unit
        if end * self.unit > self.capacity or (self._of_unit[first:end] >= 0).any():
            raise UsageError(f"bytes {offset} to {offset + nbytes} are already in use, or beyond the capacity")
        self._occupy(Segment(first, units, units * self.unit, live={base}))
        self._refs[base // PAGE] = references
        self.used += units * self.unit
        self.blocks += 1
        return base

    def retain(self, offsets: NDArray[np.int64]) -> None:
        """Add one reference to each of these granted slots, as often as it is named."""
        np.add.at(self._refs, offsets // PAGE, 1)

    def release(self, offsets: NDArray[np.int64]) -> list[int]:
        """Drop one reference of each of these slots, as often as it is named; returns those that are free now."""
        pages = offsets // PAGE
        np.subtract.at(self._refs, pages, 1)
        left = self._refs[pages]
        if (left < 0).any():
            np.add.at(self._refs, pages, 1)
            raise UsageError("a slot was released more often than it was retained")
        freed = list(dict.fromkeys(offsets[left == 0].tolist()))
        for offset in freed:
            self._free(offset)
        return freed

    def references(self, offset: int) -> int:
        """References of a slot; 0 when it is free."""
        return int(self._refs[offset // PAGE])

    def room(self, nbytes: int) -> int:
        """How many more slots of this size could be granted now."""
        size = slot_nbytes(nbytes)
        wanted = self._segment_units(size)
        slots = sum(len(s.free) for s in self._open.get(size, {}).values())
        for _, length in self._runs():
            whole, rest = divmod(length, wanted)
            slots += whole * (wanted * self.unit // size) + rest * self.unit // size
        return slots

    def neighbours(self, offset: int) -> list[int]:
        """Granted slots of the segment that holds this one, itself included."""
        return list(self._segment_at(offset).live)

    def segment(self, offset: int) -> int:
        """Name of the segment that holds the granted slot at this offset."""
        return self._segment_at(offset).first_unit

    def size_class(self, offset: int) -> int:
        """Size of the granted slot at this offset."""
        return self._segment_at(offset).size

    @property
    def free_nbytes(self) -> int:
        """Bytes that are not granted; how many of them a class can have is `room`."""
        return self.capacity - self.used

    def _segment_at(self, offset: int) -> Segment:
        return self._segments[int(self._of_unit[offset // self.unit])]

    def _free(self, offset: int) -> None:
        segment = self._segment_at(offset)
        segment.live.remove(offset)
        self.used -= segment.size
        self.blocks -= 1
        if segment.live:
            segment.free.append(offset)
            self._open[segment.size][segment.first_unit] = segment
            return
        self._open.get(segment.size, {}).pop(segment.first_unit, None)
        del self._segments[segment.first_unit]
        self._of_unit[segment.first_unit : segment.first_unit + segment.units] = -1

    def _new_segment(self, size: int) -> Segment | None:
        wanted = self._segment_units(size)
        runs = self._runs()
        fitting = next(((start, wanted) for start, length in runs if length >= wanted), None)
        start, units = fitting or max(runs, key=lambda run: run[1], default=(0, 0))
        slots = units * self.unit // size
        if not slots:
            return None
        base = start * self.unit
        segment = Segment(start, units, size, [base + i * size for i in reversed(range(slots))])
        self._occupy(segment)
        self._open[size][start] = segment
        return segment

    def _occupy(self, segment: Segment) -> None:
        self._segments[segment.first_unit] = segment
        self._of_unit[segment.first_unit : segment.first_unit + segment.units] = segment.first_unit

    def _runs(self) -> list[tuple[int, int]]:
        """Runs of free units as (first, length)."""
        units = self._of_unit[: self.capacity // self.unit]
        edges = np.flatnonzero(np.diff(np.concatenate(([0], units, [0])) >= 0))
        return [(int(a), int(b - a)) for a, b in zip(edges[::2], edges[1::2], strict=True)]

    def _segment_units(self, size: int) -> int:
        target = max(size, min(TARGET_SEGMENT, self.capacity // SEGMENTS_AT_LEAST))
        first = -(-target // self.unit)
        candidates = range(first, 2 * first + 1)

        def waste(units: int) -> float:
            total = units * self.unit
            return (total % size) / total

        return next((u for u in candidates if waste(u) <= WASTE), min(candidates, key=waste))
