"""Batches of records between the file and slots: few calls, on several threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from itertools import accumulate
from typing import TypeVar

from kvtier.block import PAGE
from kvtier.errors import CorruptPayload
from kvtier.lossless.method import Method
from kvtier.tiers.nvme.io import RegionFile, pages
from kvtier.tiers.nvme.packing import Room, packed
from kvtier.tiers.nvme.record import Record, wrong

TRANSFER = 4 << 20
"""Neighbouring records are read and written in calls of about this many bytes."""
RECORDS = 256
"""Records in one call at most."""

_In = TypeVar("_In")
_Out = TypeVar("_Out")


class _Own(threading.local):
    """What each reading thread has for itself."""

    def __init__(self) -> None:
        self.room = Room()


class Transfer:
    """Reads and writes records; thread-safe, but for one write (or what is packed for it) at a time.

    Args:
        threads: reads and writes under way at a time, each.
    """

    def __init__(self, threads: int) -> None:
        self._readers = ThreadPoolExecutor(threads, "nvme-read")
        self._writers = ThreadPoolExecutor(threads, "nvme-write")
        self._frames = pages(RECORDS)
        self._skipped = pages(1)
        self._packing = Room()
        self._unpacking = _Own()

    def read(self, file: RegionFile, records: Sequence[Record]) -> list[OSError | CorruptPayload | None]:
        """Fill the slots and verify them; says for each what is wrong with it."""
        order = sorted(range(len(records)), key=lambda place: records[place].offset)
        runs = list(_runs([records[place] for place in order]))
        answers: list[OSError | CorruptPayload | None] = [None] * len(records)
        found = (answer for run in _each(self._readers, lambda run: self._read_run(file, run), runs) for answer in run)
        for place, answer in zip(order, found, strict=True):
            answers[place] = answer
        return answers

    def pack(self, records: Sequence[Record], method: Method) -> list[Record]:
        """Pack the payloads that get smaller; the next call overwrites what it returns."""
        ends = list(accumulate(len(record.slot) for record in records))
        room = self._packing.get(ends[-1])
        rooms = [room[end - len(record.slot) : end] for end, record in zip(ends, records, strict=True)]
        return _each(
            self._writers, lambda item: packed(item[0], method, item[1]), list(zip(records, rooms, strict=True))
        )

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
        room = self._unpacking.room.get(sum(record.length for record in run if record.packed))
        contents: list[memoryview] = []
        buffers: list[memoryview] = []
        for record in run:
            content = record.slot
            if record.content is not None:
                content = record.content[: record.length]
            elif record.packed:
                content, room = room[: record.length], room[record.length :]
            contents.append(content)
            buffers += (self._skipped, content)
        try:
            file.read(run[0].offset + PAGE, buffers[1:])
        except OSError as exc:
            return [exc] * len(run)
        return [wrong(record, content) for record, content in zip(run, contents, strict=True)]

    def _write_run(self, file: RegionFile, first: int, run: Sequence[Record]) -> OSError | None:
        buffers: list[memoryview] = []
        for place, record in enumerate(run, first):
            content = record.slot if record.content is None else record.content[: record.length]
            buffers += (self._frames[place * PAGE : (place + 1) * PAGE], content)
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
