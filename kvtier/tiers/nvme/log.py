"""What is where in the file: bookkeeping without I/O."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import islice

from kvtier.block import ADDRESS_NBYTES, PAGE
from kvtier.tiers.base import Inventory
from kvtier.tiers.nvme.frames import FRAME_NBYTES, ROW, Begin, Frame, Row, span, split
from kvtier.tiers.nvme.life import ROW_BITS, ROW_MASK, Entry, Life, Region, inventory, replay
from kvtier.tiers.nvme.regions import Geometry
from kvtier.tiers.nvme.seal import checksum
from kvtier.tiers.nvme.table import Table, table_nbytes

CARRY_SHARE = 2
"""At most one part in so many of a region's bytes is carried over into it, so that what is fresh finds room."""
REMOVED_AT_A_TIME = 30_000
"""Addresses in one removal at most: a MiB."""


class RegionLog:
    """Regions in the order of their lives, and the keys in them. Not thread-safe: used under the tier's lock.

        order:   [free] [free] [oldest] [....] [newest: appended to]
                   ^ taken next

    To append, call `lay_out` until it answers something, and `append` what is whole on disk. When it answers nothing,
    the newest region is full but for what `to_carry` names: append these (`carried`, `moved`), and only when there are
    none `empty_oldest` and `begin`.

    Args:
        geometry: how the file is cut.
        opening: random, so that no frame is like one that another process left behind.

    Attributes:
        entries: place of every stored key.
        removed: keys that are stored no longer, though the file may still say so.
    """

    def __init__(self, geometry: Geometry, opening: int = 0) -> None:
        self.geometry = geometry
        self._opening = opening
        self.entries: dict[bytes, int] = {}
        self.removed: dict[bytes, None] = {}
        self._order = deque(Region(index) for index in range(geometry.count))
        self._lives: dict[int, Region] = {}
        self._next = 1
        self._suspects: set[bytes] = set()
        self._dropped: dict[bytes, None] = {}
        self._reads = 0
        self._others = 0
        """Bytes in use in all regions but the newest."""

    @property
    def newest(self) -> Region:
        """The region that is appended to."""
        return self._order[-1]

    @property
    def oldest(self) -> Region:
        """The region that is taken next."""
        return self._order[0]

    @property
    def used(self) -> int:
        """Bytes of whole records, with all that goes with them."""
        return self._others + self.newest.used

    def holds(self, nbytes: int) -> bool:
        """Whether a payload of so many bytes fits into a region at all."""
        return PAGE + span(nbytes) + table_nbytes(1) <= self.geometry.region_nbytes and nbytes < 1 << 32

    def adopt(self, lives: Sequence[Life | None]) -> None:
        """Take over what recovery found in each region; even a life without records goes on.

        Numbers go on far behind the highest: a region that could not be read may hold higher ones.
        """
        for region, life in zip(list(self._order), lives, strict=True):
            if life is not None:
                region.sequence, region.root = life.begin.sequence, life.table.root
                region.rows, region.tabled = life.table.rows, len(life.table.rows) // ROW.itemsize
                region.tail, region.last = life.table.tail, life.table.last
                for frame, last in life.frames:
                    region.extend(frame, last)
        self._order = deque(sorted(self._order, key=lambda region: region.sequence))
        self._lives = {region.sequence: region for region in self._order if region.sequence}
        self._next = self.newest.sequence + self.geometry.count + 1
        self._others = sum(region.used for region in self._order) - self.newest.used
        for region in self._lives.values():
            life = lives[region.index]
            if life is not None:
                replay(self.entries, region, life.removed)
                self.forget(life.torn)

    def inherit(self, former: RegionLog) -> None:
        """Take over what another log has dropped and not reported."""
        self._dropped = {key: None for key in former.dropped() if key not in self.entries}

    def find(self, key: bytes) -> Entry | None:
        """Where the payload of a key lies."""
        place = self.entries.get(key)
        if place is None:
            return None
        region, number = self._at(place)
        row = Row.at(region.rows, number)
        return Entry(place, region, self.geometry.start(region.index) + row.page * PAGE, row)

    def lay_out(self, store: bytes, rows: Iterable[Row], *, carried: bool = False) -> list[tuple[Frame, bytes]]:
        """Frames, plain and sealed, for as many of these rows as have room in the newest region.

        Args:
            store: id of the store.
            rows: where they lie is not known yet.
            carried: they are of the oldest region. Others leave room for such; but the first in a region never does,
                so that each region takes in something.
        """
        region, laid = self.newest, []
        at, previous, count = region.tail, region.last, region.count
        kept = 0 if carried else self._reserved()
        for row in rows if region.sequence else ():
            placed = row._replace(page=at // PAGE)
            count += 1
            if at + row.span + table_nbytes(count) > self.geometry.region_nbytes - (kept if count > 1 else 0):
                break
            offset = self.geometry.start(region.index) + at
            frame = Frame(self._opening, region.sequence, offset, previous, region.tail, placed)
            sealed = frame.pack(store)
            laid.append((frame, sealed))
            at, previous = at + row.span, checksum(sealed)
        return laid

    def append(self, frame: Frame, sealed: bytes, *, moved: Entry | None = None) -> None:
        """Make a record of the newest region visible that is whole on disk.

        Args:
            frame: its frame.
            sealed: the same, sealed.
            moved: where it was carried over from; when it is no longer stored there, the record is of no use.
        """
        region, key = self.newest, frame.row.key
        place = region.sequence << ROW_BITS | region.count
        region.extend(frame, checksum(sealed))
        if moved is not None:
            region.carried += frame.row.span
            if self.entries.get(key) != moved.place:
                return
        self._leave(key)
        self.entries[key] = place
        self._dropped.pop(key, None)
        self.removed.pop(key, None)

    def lay_out_removal(self, store: bytes) -> tuple[Frame, bytes] | None:
        """A removal of as many removed keys as have room in the newest region: frame, and all its bytes, sealed."""
        region = self.newest
        count = min(REMOVED_AT_A_TIME, (self._free() - FRAME_NBYTES) // ADDRESS_NBYTES)
        if not region.sequence or count < 1:
            return None
        addresses = b"".join(islice(self.removed, count))
        offset = self.geometry.start(region.index) + region.tail
        row = Row.removal(addresses)._replace(page=region.tail // PAGE)
        frame = Frame(self._opening, region.sequence, offset, region.last, region.tail, row)
        return frame, frame.pack(store) + addresses

    def append_removal(self, frame: Frame, content: bytes) -> None:
        """A removal is whole on disk."""
        self.newest.extend(frame, checksum(content[:FRAME_NBYTES]))
        for key in split(content[FRAME_NBYTES:]):
            self.removed.pop(key, None)

    def to_carry(self, nbytes: int, count: int) -> list[Entry]:
        """Blocks of the oldest region to append next, so that they outlive it: those that were read there.

        When these are more than have room, the last read ones; in the order in which they lie there.

        Args:
            nbytes: about so many bytes at most, but one block at least.
            count: so many at most.
        """
        oldest = self.oldest
        entries: list[Entry] = []
        for number in oldest.warmest(min(self._reserved(), self._free()))[:count]:
            entry = self.find(Row.at(oldest.rows, number).key)
            if entry is None or nbytes <= 0:
                break
            entries.append(entry)
            nbytes -= entry.row.span
        return entries

    def empty_oldest(self) -> int:
        """Drop what the oldest region holds; returns how many keys that were."""
        region = self.oldest
        first = region.sequence << ROW_BITS
        gone = [key for place, key in enumerate(region.keys(), first) if self.entries.get(key) == place]
        for key in gone:
            self.drop(key)
        return len(gone)

    def next_life(self, nonce: int) -> Begin:
        """How the next life of the oldest region begins."""
        return Begin(self._next, self.geometry.start(self.oldest.index), self.newest.sequence, self.newest.tail, nonce)

    def begin(self, root: int) -> None:
        """Give the emptied oldest region its next life; nobody may be reading it."""
        region = self._order.popleft()
        self._others += self.newest.used - region.used
        self._lives.pop(region.sequence, None)
        fresh = Region(region.index, self._next, root, PAGE, root)
        self._next += 1
        self._order.append(fresh)
        self._lives[fresh.sequence] = fresh

    def table(self) -> Table | None:
        """The newest region's table; None when the one on the disk says it all."""
        region = self.newest
        if region.tabled == region.count:
            return None
        return Table(region.root, region.tail, region.last, region.rows)

    def touch(self, key: bytes, place: int) -> None:
        """A key was read there."""
        if self.entries.get(key) == place:
            self._reads += 1
            region, number = self._at(place)
            region.warmed(number, self._reads)

    def forget(self, keys: Sequence[bytes]) -> bool:
        """Stop storing these keys, and mark them as removed; whether any of them is marked now."""
        for key in keys:
            if self._leave(key):
                self.removed[key] = None
        return any(key in self.removed for key in keys)

    def doubt(self, keys: Iterable[bytes]) -> None:
        """Writing these failed, and yet they may be whole on the disk: those that are not stored are removed."""
        self.removed.update((key, None) for key in keys if key not in self.entries)

    def drop(self, key: bytes) -> None:
        """Forget a stored key, and report it."""
        self._leave(key)
        self._dropped[key] = None

    def corrupt(self, key: bytes, place: int) -> None:
        """What lies there is not what was written: drop the key, and mark it as removed."""
        if self.entries.get(key) == place:
            self.drop(key)
            self.removed[key] = None

    def suspect(self, key: bytes, place: int) -> None:
        """A key could not be read there: let it be written again."""
        if self.entries.get(key) == place:
            region, number = self._at(place)
            region.cooled(number)
            self._suspects.add(key)

    def is_sound(self, key: bytes) -> bool:
        """Whether a key is stored where it can be read, for all that is known."""
        return key in self.entries and key not in self._suspects

    def dropped(self) -> list[bytes]:
        """Keys dropped since the last call and not stored again."""
        gone = list(self._dropped)
        self._dropped.clear()
        return gone

    def readers(self) -> int:
        """Reads under way."""
        return sum(region.readers for region in self._order)

    def inventory(self) -> Inventory:
        """Everything that is stored, oldest first."""
        return inventory(self.entries, self._lives)

    def _at(self, place: int) -> tuple[Region, int]:
        return self._lives[place >> ROW_BITS], place & ROW_MASK

    def _leave(self, key: bytes) -> bool:
        """Store a key no longer; whether it was stored."""
        place = self.entries.pop(key, None)
        if place is None:
            return False
        region, number = self._at(place)
        region.cooled(number)
        self._suspects.discard(key)
        return True

    def _free(self) -> int:
        """Bytes of the newest region that one more record may take."""
        return self.geometry.region_nbytes - self.newest.tail - table_nbytes(self.newest.count + 1)

    def _reserved(self) -> int:
        """Bytes of the newest region that are kept for blocks of the oldest."""
        return max(0, min(self.oldest.warm, self.geometry.region_nbytes // CARRY_SHARE - self.newest.carried))
