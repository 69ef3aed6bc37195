"""Batches of records between the file and slots: few calls, on several threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import TypeVar

from kvtier.block import PAGE, verify_payload
from kvtier.errors import CorruptPayload
from kvtier.tiers.nvme.io import RegionFile, pages

TRANSFER = 4 << 20
"""Neighbouring records are read and written in calls of about this many bytes."""
RECORDS = 256
"""Records in one call at most."""

_In = TypeVar("_In")
_Out = TypeVar("_Out")


@dataclass(frozen=True, slots=True)
class Record:
    """A payload on its way.

    Attributes:
        offset: where its frame lies in the file.
        key: its address.
        nbytes: bytes of the payload.
        slot: the memory, a multiple of 4 KiB.
    """

    offset: int
    key: bytes
    nbytes: int
    slot: memoryview

    @property
    def end(self) -> int:
        """Where the next record begins."""
        return self.offset + PAGE + len(self.slot)


class Transfer:
    """Reads and writes records; thread-safe, but for one write at a time.

    Args:
        threads: reads and writes under way at a time, each.
    """

    def __init__(self, threads: int) -> None:
        self._readers = ThreadPoolExecutor(threads, "nvme-read")
        self._writers = ThreadPoolExecutor(threads, "nvme-write")
        self._frames = pages(RECORDS)
        self._skipped = pages(1)

    def read(self, file: RegionFile, records: Sequence[Record]) -> list[OSError | CorruptPayload | None]:
        """Fill the slots and verify them; says for each what is wrong with it."""
        order = sorted(range(len(records)), key=lambda place: records[place].offset)
        runs = list(_runs([records[place] for place in order]))
        answers: list[OSError | CorruptPayload | None] = [None] * len(records)
        found = (answer for run in _each(self._readers, lambda run: self._read_run(file, run), runs) for answer in run)
        for place, answer in zip(order, found, strict=True):
            answers[place] = answer
        return answers

    def write(self, file: RegionFile, frames: Sequence[bytes], records: Sequence[Record]) -> tuple[int, OSError | None]:
        """Write at most `RECORDS` neighbours; returns how many from the first on are whole, and what went wrong."""
        for place, frame in enumerate(frames):
            self._frames[place * PAGE : place * PAGE + len(frame)] = frame
        runs, first = [], 0
        for run in _runs(records):
            runs.append((first, run))
            first += len(run)
        whole = 0
        errors = _each(self._writers, lambda item: self._write_run(file, *item), runs)
        for (_, run), error in zip(runs, errors, strict=True):
            if error is not None:
                return whole, error
            whole += len(run)
        return whole, None

    def close(self) -> None:
        """End the threads."""
        self._readers.shutdown()
        self._writers.shutdown()

    def _read_run(self, file: RegionFile, run: Sequence[Record]) -> list[OSError | CorruptPayload | None]:
        buffers = [run[0].slot]
        for record in run[1:]:
            buffers += (self._skipped, record.slot)
        try:
            file.read(run[0].offset + PAGE, buffers)
        except OSError as exc:
            return [exc] * len(run)
        return [_wrong(record) for record in run]

    def _write_run(self, file: RegionFile, first: int, run: Sequence[Record]) -> OSError | None:
        buffers: list[memoryview] = []
        for place, record in enumerate(run, first):
            buffers += (self._frames[place * PAGE : (place + 1) * PAGE], record.slot)
        try:
            file.write(run[0].offset, buffers)
        except OSError as exc:
            return exc
        return None


def _runs(records: Sequence[Record]) -> Iterator[list[Record]]:
    """Cut records, sorted by offset, into runs of neighbours."""
    run: list[Record] = []
    for record in records:
        full = run and (len(run) >= RECORDS or record.end - run[0].offset > TRANSFER)
        if run and (full or record.offset != run[-1].end):
            yield run
            run = []
        run.append(record)
    if run:
        yield run


def _wrong(record: Record) -> CorruptPayload | None:
    try:
        header = verify_payload(record.slot, expected=record.key)
    except CorruptPayload as exc:
        return exc
    if header.payload_nbytes != record.nbytes:
        return CorruptPayload(f"block {record.key.hex()} has {header.payload_nbytes} bytes, not {record.nbytes}")
    return None


def _each(pool: ThreadPoolExecutor, call: Callable[[_In], _Out], items: Sequence[_In]) -> list[_Out]:
    """Call for each item, on several threads if there are several; none is under way any more when this returns."""
    if len(items) == 1:
        return [call(items[0])]
    futures = [_submit(pool, call, item) for item in items]
    wait(futures)
    return [future.result() for future in futures]


def _submit(pool: ThreadPoolExecutor, call: Callable[[_In], _Out], item: _In) -> Future[_Out]:
    try:
        return pool.submit(call, item)
    except RuntimeError:  # The interpreter is ending and takes no more work for other threads.
        future: Future[_Out] = Future()
        future.set_result(call(item))
        return future
