"""Whether packing is worth it on this device: tried once, with what was just written there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from kvtier.block import PAGE
from kvtier.lossless.method import Method
from kvtier.tiers.nvme.io import RegionFile, pages
from kvtier.tiers.nvme.packing import suited
from kvtier.tiers.nvme.record import Record
from kvtier.tiers.nvme.transfer import Transfer

LEAST = 4 << 20
"""Payload bytes without which a trial says too little."""
SAMPLES, SAMPLE = 4, 2 << 20
"""Payloads that are packed for it, and the bytes of each that are."""


def trial(transfer: Transfer, file: RegionFile, records: Sequence[Record], clock: Callable[[], float]) -> Method | None:
    """Read records back and pack some: the method with which reads are fastest, or None when nobody can tell yet.

    A reader is taken to wait for the device, and then for one thread that unpacks. With several blocks the two overlap;
    that is not counted on, because the machine has other things to do. So reads gain what this says, or more.
    """
    records = [record for record in records if suited(record)]
    nbytes = sum(len(record.slot) for record in records)
    if nbytes < LEAST:
        return None
    room, into = pages(nbytes // PAGE), []
    for record in records:
        into.append(replace(record, slot=room[: len(record.slot)]))
        room = room[len(record.slot) :]
    start = clock()
    wrongs = transfer.read(file, into)
    took = clock() - start
    if any(wrongs):
        return None
    from kvtier.lossless.choice import Path, choose, measure

    sample = [record.slot[: min(record.nbytes, SAMPLE)] for record in records[:SAMPLES]]
    return choose(measure(sample, clock), Path(nbytes / max(took, 1e-9)))
