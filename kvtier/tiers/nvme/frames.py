"""What lies in a region of the file, but for its table. All integers are little-endian.

    region:   begin, 4 KiB | record | record | ... | free | table
    begin:    magic | store id | sequence | offset | former sequence | former tail | nonce | checksum
    record:   frame, 4 KiB | payload exactly as in its slot, or packed (`kvtier.lossless`), padded to 4 KiB
    removal:  frame | addresses that are stored no longer, padded to 4 KiB
    frame:    magic | store id | opening | sequence | offset | previous | settled | row | checksum
    row:      address | what the payload's header says (`STORED`) | page | packed bytes | kind

Sequence numbers count the lives of regions. The root of a life is the checksum of its begin; `previous` is that of the
frame before a frame, in the first one the root. So the frames of one life are a chain, and a frame of another life
never continues it; nor does one that a process left behind which died, because each opening has a random number.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kvtier.block import ADDRESS_NBYTES, PAGE, slot_nbytes
from kvtier.tiers.base import STORED
from kvtier.tiers.nvme.seal import checksum, digest, is_sealed, seal

ROW = np.dtype([("key", f"V{ADDRESS_NBYTES}"), ("stored", STORED), ("page", "<u4"), ("packed", "<u4"), ("kind", "<u2")])
PAYLOAD, REMOVAL = 0, 1
_ROW = struct.Struct(f"<{ADDRESS_NBYTES}s{STORED.itemsize}sIIH")
_BEGIN = struct.Struct("<8s16sQQQQQ")
_BEGIN_MAGIC = b"KVTBEGIN"
_CHAIN = struct.Struct("<8s16sQQQQQ")
_FRAME_MAGIC = b"KVTFRAME"
FRAME_NBYTES = _CHAIN.size + _ROW.size + 8


class Begin(NamedTuple):
    """The first page of a region: which life this is.

    Attributes:
        sequence: number of this life, higher than that of any before it.
        offset: where the region begins in the file.
        former: number of the life before it, in another region; 0 for none.
        former_tail: bytes of that region, from its start, that hold whole records.
        nonce: random, so that no two lives have the same root.
    """

    sequence: int
    offset: int
    former: int
    former_tail: int
    nonce: int

    def pack(self, store: bytes) -> bytes:
        """Encode as the front of a page; what follows it is not looked at."""
        return seal(_BEGIN.pack(_BEGIN_MAGIC, store, *self))

    @classmethod
    def unpack(cls, store: bytes, page: bytes | memoryview) -> tuple[Begin, int] | None:
        """Decode; returns the root too, or None when no life of this store begins here."""
        magic, owner, *fields = _BEGIN.unpack_from(page)
        if magic != _BEGIN_MAGIC or owner != store or not is_sealed(page, _BEGIN.size):
            return None
        return cls(*fields), checksum(page[: _BEGIN.size + 8])


class Row(NamedTuple):
    """What frame and table say of one record.

    Attributes:
        key: the payload's 34-byte address; of a removal, the checksum of its addresses.
        stored: a `STORED` record; of a removal, only its size counts.
        page: where its frame lies, in pages from the start of its region.
        packed: bytes that lie there in place of the payload's; 0 when it lies there as it is.
        kind: `PAYLOAD` or `REMOVAL`.
    """

    key: bytes
    stored: bytes
    page: int = 0
    packed: int = 0
    kind: int = PAYLOAD

    @property
    def nbytes(self) -> int:
        """Bytes of the payload, or of the removed addresses."""
        return int.from_bytes(self.stored[:4], "little")

    @property
    def span(self) -> int:
        """Bytes of the whole record."""
        if self.kind == REMOVAL:
            return slot_nbytes(FRAME_NBYTES + self.nbytes)
        return span(self.packed or self.nbytes)

    def pack(self) -> bytes:
        """Encode."""
        return _ROW.pack(*self)

    @classmethod
    def at(cls, rows: bytes | bytearray, number: int) -> Row:
        """Decode one of many."""
        return cls._make(_ROW.unpack_from(rows, number * _ROW.size))

    @classmethod
    def of(cls, key: bytes, nbytes: int, packed: int = 0) -> Row:
        """Of a payload of which only the size is known."""
        return cls(key, nbytes.to_bytes(4, "little").ljust(STORED.itemsize, b"\0"), 0, packed)

    @classmethod
    def removal(cls, addresses: bytes) -> Row:
        """Of a record that says that these addresses are stored no longer."""
        return cls.of(digest(addresses), len(addresses))._replace(kind=REMOVAL)

    def removes(self, addresses: bytes | memoryview) -> bool:
        """Whether these are the addresses of this removal, whole."""
        return len(addresses) == self.nbytes and self.key[:8] == digest(addresses)


@dataclass(frozen=True, slots=True)
class Frame:
    """The front of a record.

    Attributes:
        opening: of the file, during which it was made.
        sequence: of the life that it belongs to.
        offset: where it lies in the file.
        previous: checksum of the frame before it in this life; in the first, the root.
        settled: bytes of this region, from its start, that were whole when this frame was made.
        row: what it says of its record.
    """

    opening: int
    sequence: int
    offset: int
    previous: int
    settled: int
    row: Row

    def pack(self, store: bytes) -> bytes:
        """Encode as the front of a page; only a removal goes on right behind it."""
        chain = (self.opening, self.sequence, self.offset, self.previous, self.settled)
        return seal(_CHAIN.pack(_FRAME_MAGIC, store, *chain) + self.row.pack())

    @classmethod
    def unpack(cls, store: bytes, page: bytes | memoryview) -> tuple[Frame, int] | None:
        """Decode; returns its checksum too, or None when there is no whole frame of this store."""
        magic, owner, opening, sequence, offset, previous, settled = _CHAIN.unpack_from(page)
        if magic != _FRAME_MAGIC or owner != store or not is_sealed(page, FRAME_NBYTES - 8):
            return None
        row = Row._make(_ROW.unpack_from(page, _CHAIN.size))
        return cls(opening, sequence, offset, previous, settled, row), checksum(page[:FRAME_NBYTES])


def span(nbytes: int) -> int:
    """Bytes that a payload, as it is or packed, takes in a region with its frame."""
    return PAGE + slot_nbytes(nbytes)


def split(addresses: bytes) -> list[bytes]:
    """Addresses that lie one after the other."""
    return [addresses[at : at + ADDRESS_NBYTES] for at in range(0, len(addresses), ADDRESS_NBYTES)]
