"""What is where in the file: bookkeeping without I/O."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from kvtier.tiers.nvme.regions import Frame, Geometry, checksum


@dataclass(slots=True, eq=False)
class Region:
    """One region and its present life.

    Attributes:
        index: its place in the file.
        sequence: number of this life; 0 before the first.
        tail: bytes of it that hold whole records.
        former_tail: those of the life before this one, in another region.
        checksum: of its last frame; random while it has none.
        keys: what was appended in this life, in order.
        readers: reads of it that are under way.
    """

    index: int
    sequence: int = 0
    tail: int = 0
    former_tail: int = 0
    checksum: int = 0
    keys: list[bytes] = field(default_factory=list)
    readers: int = 0


@dataclass(frozen=True, slots=True)
class Life:
    """What recovery found of a region's present life.

    Attributes:
        sequence: its number.
        former_tail: bytes that the life before it had, in another region.
        nonce: what its first frame carries in place of a checksum.
        links: its frames, plain and sealed; none when the first record of all is torn.
    """

    sequence: int
    former_tail: int
    nonce: int
    links: list[tuple[Frame, bytes]]


@dataclass(frozen=True, slots=True)
class Entry:
    """Where a payload lies.

    Attributes:
        region: in this region's present life.
        offset: where its frame lies in the file.
        nbytes: bytes of the payload.
        packed: bytes that lie there in place of the payload's, or 0.
        suspect: it could not be read, so it may be written again.
    """

    region: Region
    offset: int
    nbytes: int
    packed: int = 0
    suspect: bool = False


class RegionLog:
    """Regions in the order of their lives, and the keys in them. Not thread-safe: used under the tier's lock.

        order:   [free] [free] [oldest] [....] [newest: appended to]
                   ^ taken next

    Attributes:
        entries: every stored key, oldest first.
    """

    def __init__(self, geometry: Geometry) -> None:
        self.geometry = geometry
        self.entries: dict[bytes, Entry] = {}
        self._order = deque(Region(index) for index in range(geometry.count))
        self._dropped: dict[bytes, None] = {}

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
        """Bytes of whole records, frames included."""
        return sum(region.tail for region in self._order)

    def room(self) -> int:
        """Bytes that can still be appended to the newest region; 0 before its first life."""
        return self.geometry.region_nbytes - self.newest.tail if self.newest.sequence else 0

    def adopt(self, lives: Sequence[Life | None]) -> None:
        """Take over what recovery found in each region; even a life without records goes on."""
        for region, life in zip(list(self._order), lives, strict=True):
            if life is not None:
                region.sequence, region.former_tail, region.checksum = life.sequence, life.former_tail, life.nonce
        self._order = deque(sorted(self._order, key=lambda region: region.sequence))
        for region in self._order:
            life = lives[region.index]
            for frame, sealed in life.links if life is not None else ():
                self.append(region, frame, sealed)

    def inherit(self, former: RegionLog) -> None:
        """Take over what another log has dropped and not reported."""
        self._dropped = {key: None for key in former.dropped() if key not in self.entries}

    def lay_out(self, store: bytes, payloads: Iterable[tuple[bytes, int, int]]) -> list[tuple[Frame, bytes]]:
        """Frames, plain and sealed, for as many of these (key, bytes, packed bytes) as fit into the newest region."""
        region, laid = self.newest, []
        base, end = self.geometry.start(region.index), self.geometry.start(region.index + 1)
        at, previous = base + region.tail, region.checksum
        settled = region.tail or region.former_tail
        for key, nbytes, packed in payloads:
            frame = Frame(region.sequence, at, previous, settled, key, nbytes, packed)
            if at + frame.span > end:
                break
            sealed = frame.pack(store)
            laid.append((frame, sealed))
            at, previous, settled = at + frame.span, checksum(sealed), region.tail
        return laid

    def append(self, region: Region, frame: Frame, sealed: bytes) -> None:
        """Make a record visible that is whole on disk."""
        self.entries.pop(frame.key, None)
        self.entries[frame.key] = Entry(region, frame.offset, frame.nbytes, frame.packed)
        self._dropped.pop(frame.key, None)
        region.keys.append(frame.key)
        region.tail = frame.offset - self.geometry.start(region.index) + frame.span
        region.checksum = checksum(sealed)

    def empty_oldest(self) -> int:
        """Drop what the oldest region holds; returns how many keys that were."""
        region = self.oldest
        gone = [
            key for key in dict.fromkeys(region.keys) if (entry := self.entries.get(key)) and entry.region is region
        ]
        for key in gone:
            self.drop(key)
        region.keys.clear()
        return len(gone)

    def begin(self, nonce: int) -> None:
        """Give the emptied oldest region a new life; nobody may be reading it."""
        former = self.newest
        region = self._order.popleft()
        region.sequence, region.tail, region.former_tail = former.sequence + 1, 0, former.tail
        region.checksum = nonce
        self._order.append(region)

    def drop(self, key: bytes) -> None:
        """Forget a stored key, and report it."""
        del self.entries[key]
        self._dropped[key] = None

    def suspect(self, key: bytes, entry: Entry) -> None:
        """Let a key be written again, if this is still its entry."""
        if self.entries.get(key) is entry:
            self.entries[key] = replace(entry, suspect=True)

    def dropped(self) -> list[bytes]:
        """Keys dropped since the last call and not stored again."""
        gone = list(self._dropped)
        self._dropped.clear()
        return gone

    def readers(self) -> int:
        """Reads under way."""
        return sum(region.readers for region in self._order)
