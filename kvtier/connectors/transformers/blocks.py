"""Saving the blocks of a cache's rows as they become whole."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from threading import Lock
from typing import Any

import torch

from kvtier.client.save import Saved
from kvtier.client.scope import Chain
from kvtier.client.space import Space
from kvtier.errors import KVTierError

AT_ONCE = 8
"""Saves of one cache that wait in the client; more wait here, so that one cache leaves room for others."""
FOR_GOOD = frozenset(("bad_values", "kv_mismatch"))
"""Refusals that another try would meet again."""


@dataclass(frozen=True, slots=True)
class Job:
    """Blocks of one row: `kv` begins with the sequence's token `start`."""

    row: int
    chain: Chain
    kv: Sequence[tuple[torch.Tensor, torch.Tensor]]
    start: int


class Blocks:
    """Saves of the rows of one cache; what is refused is offered again with what comes next.

    Called by the thread that runs the model and by the client's.

    Args:
        space: where to.
        rows: how many rows there are.
    """

    def __init__(self, space: Space, rows: int) -> None:
        self._space, self._lock = space, Lock()
        self._sent, self._refused, self._stopped = [0] * rows, dict[int, str](), ""
        self._ends, self._loaded = [sys.maxsize] * rows, [0] * rows
        self._exact = space.keyspace.plan == "raw"
        self._waiting: deque[Job] = deque()
        self._busy = self._blocks = self._present = 0
        self._asked: list[Future[Saved]] = []

    def due(self, lengths: Sequence[int], *, all_of_them: bool = False) -> list[tuple[int, int, int]]:
        """Rows of these lengths that have whole blocks to be saved: row, first token, end.

        Few while many wait, unless all are wanted: then the next time it is more of them.
        """
        step = self._space.block_tokens
        with self._lock:
            room = len(lengths) * 2 + AT_ONCE - self._busy - len(self._waiting)
            reached = [min(length, end) for length, end in zip(lengths, self._ends, strict=True)]
            found = [
                (row, sent, length // step * step)
                for row, (sent, length) in enumerate(zip(self._sent, reached, strict=True))
                if length - sent >= step and self._refused.get(row) not in FOR_GOOD and not self._stopped
            ]
        return found if all_of_them else found[: max(0, room)]

    def loaded(self, lengths: Sequence[int]) -> None:
        """So many tokens of each row were loaded."""
        with self._lock:
            self._sent = [max(sent, length) for sent, length in zip(self._sent, lengths, strict=True)]
            self._loaded = [max(had, length) for had, length in zip(self._loaded, lengths, strict=True)]

    def cut(self, lengths: Sequence[int]) -> None:
        """Only so many tokens of each row are there any more."""
        step = self._space.block_tokens
        with self._lock:
            whole = [length // step * step for length in lengths]
            self._sent = [min(sent, length) for sent, length in zip(self._sent, whole, strict=True)]
            self._loaded = [min(had, length) for had, length in zip(self._loaded, whole, strict=True)]

    def again(self) -> None:
        """Save all of it again: what is there is passed over, and what was evicted, or died with the host, is not.

        Nor is what was refused: the part that could not be saved may be gone. What was loaded and is not exact stays
        out of it: nothing is quantised twice.
        """
        with self._lock:
            self._refused, self._stopped = {}, ""
            self._sent = [0 if self._exact else had for had in self._loaded]

    def copy(self) -> Blocks:
        """One for a copy of the cache."""
        made = Blocks(self._space, len(self._sent))
        with self._lock:
            made._sent, made._loaded = list(self._sent), list(self._loaded)
        return made

    def end(self, lengths: Sequence[int]) -> None:
        """Beyond so many tokens there is nothing in a row that is worth saving."""
        with self._lock:
            self._ends = list(lengths)

    def add(self, job: Job) -> None:
        """Save, now or when those before it are done."""
        with self._lock:
            if self._sent[job.row] < job.start:  # something before it was refused meanwhile
                return
            self._sent[job.row] = job.chain.tokens
            self._waiting.append(job)
        self._go_on()

    def stop(self, why: str) -> None:
        """Nothing more can be saved, which is counted once."""
        with self._lock:
            stopped, self._stopped = self._stopped, self._stopped or why
        if not stopped:
            self._space.refused(why)

    def done(self) -> Future[Saved]:
        """What became of all of it, once it is."""
        future: Future[Saved] = Future()
        with self._lock:
            self._asked.append(future)
        self._go_on()
        return future

    def _go_on(self) -> None:
        while job := self._next():
            saving = self._save(job)
            if saving.done():
                self._finished(job, saving)
            else:
                saving.add_done_callback(partial(self._finished_later, job))

    def _save(self, job: Job) -> Future[Saved]:
        kv = job.kv
        while True:
            try:
                return self._space.save(job.chain, kv, start=job.start, origin=job.start, vouched=True)
            except (KVTierError, RuntimeError):
                if kv[0][0].device.type == "cpu":  # not what the model said that it was; or the cache is closed
                    return self._space.refused("kv_mismatch")
                kv = [(keys.cpu(), values.cpu()) for keys, values in kv]  # nothing encodes this plan where it was

    def _next(self) -> Job | None:
        with self._lock:
            if self._waiting and self._busy < AT_ONCE:
                self._busy += 1
                return self._waiting.popleft()
            if self._busy or self._waiting:
                return None
            asked, self._asked = self._asked, []
            refused = self._stopped or next(iter(self._refused.values()), "")
            whole = Saved(self._blocks, self._present, refused)
        for future in asked:
            future.set_result(whole)
        return None

    def _finished_later(self, job: Job, done: Future[Saved]) -> None:
        self._finished(job, done)
        self._go_on()

    def _finished(self, job: Job, done: Future[Saved]) -> None:
        saved = Saved(0, 0, "failed") if done.cancelled() or done.exception() else done.result()
        with self._lock:
            self._busy -= 1
            self._blocks += saved.blocks
            self._present += saved.present
            if not saved.refused:
                self._refused.pop(job.row, None)
                return
            self._refused[job.row] = saved.refused
            reached = job.start + (saved.blocks + saved.present) * self._space.block_tokens
            self._sent[job.row] = min(self._sent[job.row], reached)
            self._waiting = deque(other for other in self._waiting if other.row != job.row)


def rows_of(layers: Sequence[Any], row: int, first: int, end: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Columns of one row of a cache, for each layer K and V as `[tokens, kv_heads, head_dim]`.

    A small part is copied, so that who saves it does not keep the whole; a large one is a view: a DynamicCache grows by
    concatenation into new tensors, and leaves those that it had as they are.
    """
    return [(_rows(layer.keys, row, first, end), _rows(layer.values, row, first, end)) for layer in layers]


def _rows(part: torch.Tensor, row: int, first: int, end: int) -> torch.Tensor:
    piece = part.detach()[row, :, first:end]
    return (piece.clone() if piece.numel() * 2 < part.numel() else piece).transpose(0, 1)
