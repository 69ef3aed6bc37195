"""A payload and its place in the file."""

from __future__ import annotations

from dataclasses import dataclass

from kvtier.block import PAGE, slot_nbytes, verify_payload
from kvtier.errors import CorruptPayload


@dataclass(frozen=True, slots=True)
class Record:
    """A payload on its way.

    Attributes:
        offset: where its frame lies in the file.
        key: its address.
        nbytes: bytes of the payload.
        slot: the memory, a multiple of 4 KiB.
        packed: bytes that lie in the file in place of the payload's, or 0.
        content: where these are in memory, while it is written, and after it was read if that is asked for.
    """

    offset: int
    key: bytes
    nbytes: int
    slot: memoryview
    packed: int = 0
    content: memoryview | None = None

    @property
    def length(self) -> int:
        """Bytes behind its frame in the file."""
        return slot_nbytes(self.packed) if self.packed else len(self.slot)

    @property
    def end(self) -> int:
        """Where the next record begins."""
        return self.offset + PAGE + self.length


def wrong(record: Record, content: memoryview) -> CorruptPayload | None:
    """Verify a record that was read into `content` (its slot, unless it is packed); a packed one gets into its slot."""
    try:
        found = _unpacked(record, content) if record.packed else record.nbytes
        header = verify_payload(record.slot, expected=record.key)
    except CorruptPayload as exc:
        return exc
    if not found == header.payload_nbytes == record.nbytes:
        return CorruptPayload(f"block {record.key.hex()} has {header.payload_nbytes} bytes, not {record.nbytes}")
    return None


def _unpacked(record: Record, content: memoryview) -> int:
    from kvtier.lossless.frame import unpack

    return unpack(content[: record.packed], record.slot)
