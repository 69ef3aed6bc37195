"""The table at the end of a region: all that the frames of a life say, in one place. Integers are little-endian.

    table:    zeros | row | row | ... | footer                     whole pages, which end where the region ends
    footer:   magic | store id | root | rows | tail | last | checksum of the rows | checksum

A table is the chain of frames as it was when the table was written; frames may follow, and continue the chain at `tail`
and `last`. It counts for the life with its root only.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from kvtier.block import PAGE, slot_nbytes
from kvtier.tiers.nvme.frames import ROW
from kvtier.tiers.nvme.seal import checksum, digest, is_sealed, seal

_FOOTER = struct.Struct("<8s16sQQQQQ")
_MAGIC = b"KVTTABLE"
_NBYTES = _FOOTER.size + 8


@dataclass(frozen=True, slots=True)
class Table:
    """Where a chain of frames ended, and what it was.

    Attributes:
        root: of its life.
        tail: bytes of the region, from its start, that hold its records.
        last: checksum of its last frame.
        rows: packed rows.
    """

    root: int
    tail: int
    last: int
    rows: bytearray

    def pack(self, store: bytes) -> bytes:
        """Encode as whole pages."""
        count = len(self.rows) // ROW.itemsize
        front = (_MAGIC, store, self.root, count, self.tail, self.last, checksum(digest(self.rows)))
        return bytes(table_nbytes(count) - len(self.rows) - _NBYTES) + self.rows + seal(_FOOTER.pack(*front))

    @classmethod
    def unpack(cls, pages: memoryview) -> Table | None:
        """Decode as many pages as `nbytes_of` says; None when the rows are not whole."""
        _, _, root, count, tail, last, rows_digest = _FOOTER.unpack_from(pages, len(pages) - _NBYTES)
        rows = pages[len(pages) - _NBYTES - count * ROW.itemsize : len(pages) - _NBYTES]
        if checksum(digest(rows)) != rows_digest:
            return None
        return cls(root, tail, last, bytearray(rows))


def nbytes_of(store: bytes, root: int, page: memoryview) -> int:
    """Bytes of the table that ends with this page; 0 when there is none of this store and life."""
    footer = page[PAGE - _NBYTES :]
    magic, owner, found, count, *_ = _FOOTER.unpack_from(footer)
    if magic != _MAGIC or owner != store or found != root or not is_sealed(footer, _FOOTER.size):
        return 0
    return table_nbytes(count)


def table_nbytes(rows: int) -> int:
    """Bytes of a table of so many rows."""
    return slot_nbytes(rows * ROW.itemsize + _NBYTES)
