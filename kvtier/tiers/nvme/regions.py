"""What the NVMe tier's file holds. All integers are little-endian.

    superblock, 4 KiB          region 0              region 1 ...
    +------------------------+---------------------+---------------------+
    | magic, version,        | record record ...   | record record ...   |
    | region size, count, id |                     |                     |
    +------------------------+---------------------+---------------------+

    record:   frame, 4 KiB | payload exactly as in its slot, or packed (`kvtier.lossless`), padded to 4 KiB
    frame:    magic | store id | sequence | offset | previous | settled | payload bytes | address | packed bytes
              | checksum

Sequence numbers count the lives of regions. `previous` is the checksum of the frame before it in the same region
(random in the first one), so the frames of one life are a chain, and a frame of another life never continues it.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import xxhash

from kvtier.block import ADDRESS_NBYTES, PAGE, slot_nbytes
from kvtier.errors import ConfigError

VERSION = 1
_SUPER = struct.Struct("<8sHHI16sQQ")
_SUPER_MAGIC = b"KVTIERRL"
_FRAME = struct.Struct(f"<8s16sQQQQQ{ADDRESS_NBYTES}sI2x")
_FRAME_MAGIC = b"KVTFRAME"
STORE_ID_NBYTES = 16

REGION_NBYTES = 257 << 20
"""256 MiB and room for frames and headers, so that 128 payloads of 2 MiB or 8 of 32 MiB fit without waste."""
REGIONS_AT_LEAST = 8
RESERVE = 8 * PAGE
"""Of the capacity, for what else takes blocks: superblock, lock file, folder, the file system's extent tree."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """How the file is cut.

    Attributes:
        region_nbytes: bytes of a region.
        count: regions.
    """

    region_nbytes: int
    count: int

    @property
    def file_nbytes(self) -> int:
        """Bytes of the file."""
        return PAGE + self.count * self.region_nbytes

    def start(self, region: int) -> int:
        """Where a region begins in the file."""
        return PAGE + region * self.region_nbytes

    @classmethod
    def fit(cls, capacity: int, region_nbytes: int) -> Geometry:
        """As many regions as the capacity holds, each an eighth of it at most.

        Raises:
            ConfigError: the capacity is too small.
        """
        size = min(region_nbytes, capacity // REGIONS_AT_LEAST) // PAGE * PAGE
        least = REGIONS_AT_LEAST * RESERVE
        if capacity < least or size < 2 * PAGE:
            raise ConfigError(
                f"an NVMe tier of {capacity} bytes with regions of {region_nbytes} cannot work; set nvme.capacity "
                f"to at least {least} (sensible: 1GiB) and regions of at least {2 * PAGE}"
            )
        return cls(size, (capacity - RESERVE) // size)


@dataclass(frozen=True, slots=True)
class Superblock:
    """The first page of the file.

    Attributes:
        store: random id; frames of another store are foreign.
        geometry: how the file was cut when this was written.
    """

    store: bytes
    geometry: Geometry

    def pack(self) -> bytes:
        """Encode as one page."""
        geometry = self.geometry
        front = _SUPER.pack(_SUPER_MAGIC, VERSION, 0, PAGE, self.store, geometry.region_nbytes, geometry.count)
        return _seal(front).ljust(PAGE, b"\0")

    @classmethod
    def unpack(cls, page: bytes | memoryview) -> Superblock | str:
        """Decode; a text when this version cannot use it, which says why."""
        if len(page) < _SUPER.size + 8:
            return "it is too short"
        magic, version, _, unit, store, region_nbytes, count = _SUPER.unpack_from(page)
        if magic != _SUPER_MAGIC:
            return "it has no superblock"
        if version != VERSION:
            return f"its format version is {version}, this kvtier's is {VERSION}"
        if not _is_sealed(page, _SUPER.size) or unit != PAGE:
            return "its superblock is corrupt"
        return cls(store, Geometry(region_nbytes, count))


@dataclass(frozen=True, slots=True)
class Frame:
    """The page in front of a stored payload.

    Attributes:
        sequence: which life of which region; counts up over all regions.
        offset: where this frame lies in the file.
        previous: checksum of the frame before it in this life; random in the first.
        settled: bytes of this region, from its start, that were whole when this frame was made; in the first frame of
            a life, those of the life before it (which is in another region, and over).
        key: the payload's 34-byte address.
        nbytes: bytes of the payload.
        packed: bytes that lie there in place of the payload's; 0 when it lies there as it is.
    """

    sequence: int
    offset: int
    previous: int
    settled: int
    key: bytes
    nbytes: int
    packed: int = 0

    @property
    def span(self) -> int:
        """Bytes of the whole record."""
        return span(self.packed or self.nbytes)

    def pack(self, store: bytes) -> bytes:
        """Encode as the front of a page; what follows it is not looked at."""
        fields = (self.sequence, self.offset, self.previous, self.settled, self.nbytes, self.key, self.packed)
        return _seal(_FRAME.pack(_FRAME_MAGIC, store, *fields))

    @classmethod
    def unpack(cls, store: bytes, page: bytes | memoryview) -> tuple[Frame, bytes] | None:
        """Decode; returns the sealed form too, or None when there is no whole frame of this store."""
        magic, owner, sequence, offset, previous, settled, nbytes, key, packed = _FRAME.unpack_from(page)
        if magic != _FRAME_MAGIC or owner != store or not _is_sealed(page, _FRAME.size):
            return None
        return cls(sequence, offset, previous, settled, key, nbytes, packed), bytes(page[: _FRAME.size + 8])


def span(nbytes: int) -> int:
    """Bytes that a payload, as it is or packed, takes in a region with its frame."""
    return PAGE + slot_nbytes(nbytes)


def checksum(sealed: bytes) -> int:
    """What the frame after this sealed one carries as `previous`."""
    return int.from_bytes(sealed[-8:], "little")


def _seal(front: bytes) -> bytes:
    return front + xxhash.xxh3_64_intdigest(front).to_bytes(8, "little")


def _is_sealed(page: bytes | memoryview, nbytes: int) -> bool:
    return xxhash.xxh3_64_intdigest(page[:nbytes]) == int.from_bytes(page[nbytes : nbytes + 8], "little")
