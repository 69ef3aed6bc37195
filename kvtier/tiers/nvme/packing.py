"""Payloads in fewer bytes, before they are written."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from kvtier.block import PAGE, BlockHeader
from kvtier.errors import CorruptPayload
from kvtier.lossless.method import Method
from kvtier.tiers.nvme.io import pages
from kvtier.tiers.nvme.record import Record

GROUP = 32 << 20
"""Payload bytes that are packed, and then written, at a time: what is packed waits in memory of this size."""


class Room:
    """Page-aligned memory that grows to the largest size asked for, and is used again and again."""

    def __init__(self) -> None:
        self._memory = pages(1)

    def get(self, nbytes: int) -> memoryview:
        """The first `nbytes` of it, with whatever is in there."""
        if nbytes > len(self._memory):
            self._memory = pages(-(-nbytes // PAGE))
        return self._memory[:nbytes]


def load_libraries() -> None:
    """Load what packs and unpacks now; it takes half a second, and otherwise the first payload would wait for it."""
    import kvtier.lossless.frame  # noqa: F401


def groups(records: Sequence[Record]) -> Iterator[list[Record]]:
    """Cut a batch into groups of about `GROUP` bytes."""
    group: list[Record] = []
    nbytes = 0
    for record in records:
        if group and nbytes + len(record.slot) > GROUP:
            yield group
            group, nbytes = [], 0
        group.append(record)
        nbytes += len(record.slot)
    if group:
        yield group


def suited(record: Record) -> bool:
    """Whether packing the payload in its slot is worth a try."""
    from kvtier.lossless.frame import suits

    try:
        return suits(BlockHeader.unpack(record.slot))
    except CorruptPayload:
        return False


def packed(record: Record, method: Method, room: memoryview) -> Record:
    """The record with its packed payload in `room`; as it is when that saves no page."""
    from kvtier.lossless.frame import pack

    if not suited(record):
        return record
    nbytes = pack(record.slot[: record.nbytes], method, room[: len(record.slot) - PAGE])
    return record if nbytes is None else replace(record, packed=nbytes, content=room)
