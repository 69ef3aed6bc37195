"""The background that encodes and commits."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from threading import BoundedSemaphore

import numpy as np
from numpy.typing import NDArray

from kvtier.block import slot_nbytes
from kvtier.client.hit import Hit
from kvtier.client.reading import Bodies, Numbers
from kvtier.client.scope import Chain, Scope
from kvtier.client.writing import Source
from kvtier.errors import ClosedError, KVMismatch, SessionError, UsageError
from kvtier.hierarchy.answers import GrantState, Reserved

WINDOW_NBYTES = 64 << 20
"""Bytes reserved at once: what a client that dies can keep from others."""
WINDOW_BLOCKS = 256
PENDING = 16
"""Saves that may wait; one more is refused, so that a slow host does not keep an engine's memory."""


@dataclass(frozen=True, slots=True)
class Saved:
    """What became of a save.

    Attributes:
        blocks: blocks that are visible because of it.
        present: blocks that were stored already, or are being stored by another.
        refused: why the rest was not stored; empty when all was.
    """

    blocks: int
    present: int
    refused: str = ""


@dataclass(frozen=True, slots=True)
class SaveJob:
    """One save: see `Space.save`."""

    scope: Scope
    chain: Chain
    source: Source
    start: int
    origin: int
    after: Hit | None
    vouched: bool

    def problem(self) -> str:
        """Why it must be refused; empty when it need not."""
        wanted = self.chain.tokens - self.origin
        if self.source.tokens < wanted:
            raise KVMismatch(f"kv has {self.source.tokens} tokens for {wanted} token ids; pass KV of all of them")
        if self.origin > self.start:
            raise UsageError(f"kv begins with token {self.origin}, behind start ({self.start}); pass a smaller origin")
        if self.vouched:
            return ""
        sound = self.start == 0 if self.after is None else self.after.extends(self.chain, self.start)
        return "" if sound else "unverified"


def refuse(scope: Scope, why: str) -> Future[Saved]:
    """A save that is refused before it began, counted."""
    scope.counters[f"save_{why}"] += 1
    future: Future[Saved] = Future()
    future.set_result(Saved(0, 0, why))
    return future


class Saver:
    """Runs saves one after the other on a thread of its own."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._thread = ThreadPoolExecutor(1, "kvtier-save")
        self._room = BoundedSemaphore(PENDING)
        self._closed = False

    def submit(self, job: SaveJob) -> Future[Saved]:
        """Queue a save; refused at once when it cannot be right or too many wait."""
        if os.getpid() != self._pid:
            raise UsageError("this cache was opened before a fork, and its threads are the parent's; open one here")
        if self._closed:
            raise ClosedError("this cache is closed")
        refused = job.problem()
        if not refused and not self._room.acquire(blocking=False):
            refused = "client_busy"
        if refused:
            return refuse(job.scope, refused)
        try:
            future = self._thread.submit(_save, job)
        except RuntimeError as exc:
            self._room.release()
            raise ClosedError("this cache is closed") from exc
        future.add_done_callback(lambda _: self._room.release())
        return future

    def close(self) -> None:
        """Finish what is queued."""
        self._closed = True
        self._thread.shutdown(wait=True)


def _save(job: SaveJob) -> Saved:
    blocks = present = 0
    refused = ""
    at = job.start // job.scope.keyspace.spec.block_tokens
    step = max(1, min(WINDOW_BLOCKS, WINDOW_NBYTES // slot_nbytes(job.scope.headers.payload_nbytes(1))))
    try:
        while at < len(job.chain.addresses) and not refused:
            window = _window(job, at, min(at + step, len(job.chain.addresses)))
            blocks += window.blocks
            present += window.present
            at += window.passed
            # What a session may reserve at once was too little for the window: the next one begins after it.
            refused = "" if window.refused == "quota" and window.passed else window.refused
    except SessionError as exc:
        refused = type(exc).__name__
    if refused:
        job.scope.counters[f"save_{refused}"] += 1
    return Saved(blocks, present, refused)


@dataclass(frozen=True, slots=True)
class _Window:
    """What became of one reservation: blocks made visible, blocks there already, keys not refused, and why not all."""

    blocks: int
    present: int
    passed: int
    refused: str


def _window(job: SaveJob, first: int, last: int) -> _Window:
    session, headers = job.scope.session, job.scope.headers
    with session.writing():
        began = time.perf_counter()
        sizes = [headers.payload_nbytes(i) for i in range(first, last)]
        reserved = session.reserve(job.chain.addresses[:last], sizes, first)
        states = reserved.grants["state"]
        granted = np.flatnonzero(states == GrantState.GRANTED)
        passed = int((states != GrantState.REFUSED).sum())
        stored, why = _fill(job, reserved, granted, first, began) if reserved.ticket else (0, "")
    return _Window(stored, passed - len(granted), passed, why or reserved.reason)


def _fill(job: SaveJob, reserved: Reserved, granted: Numbers, first: int, began: float) -> tuple[int, str]:
    """Write the granted blocks and make them visible; how many are, and why not all."""
    session = job.scope.session
    written: list[int] = []
    visible: list[bool] = []
    why = ""
    try:
        places = reserved.grants["offset"][granted].astype(np.int64)
        for done in _write(job, session.writable(), places, first + granted):
            written.append(int(granted[done]))  # noqa: PERF401 - what was written before an error counts
    except UsageError:
        raise
    except RuntimeError:  # a GPU that fails, or has no memory for what is on its way
        why = "device_error"
    finally:
        raw = job.scope.keyspace.spec.block_nbytes
        visible = session.commit(reserved.ticket, written, time.perf_counter() - began, raw)
    if not why and len(written) < len(granted):
        why = "bad_values"
    return sum(visible), why or ("" if all(visible) else "commit")


def _write(job: SaveJob, memory: NDArray[np.uint8], offsets: Numbers, positions: Numbers) -> Iterator[int]:
    """Encode blocks into their slots, each with its header in front; which are there, until one cannot be stored."""
    scope, chain = job.scope, job.chain
    headers = scope.headers
    expires = math.ceil(time.time() + scope.ttl) if scope.ttl else 0
    nbytes = np.where(positions > 0, headers.body_nbytes(1), headers.body_nbytes(0))
    checksums = job.source.encode(Bodies(memory, offsets + headers.nbytes, nbytes, positions))
    for i, checksum in enumerate(checksums):
        position, offset = int(positions[i]), int(offsets[i])
        header = headers.make(chain.addresses[position][:32], position, checksum, expires)
        memory[offset : offset + headers.nbytes] = np.frombuffer(header, np.uint8)
        yield i
