"""Copies between the arena and the other tiers, without the lock; what is copied is pinned first."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from kvtier.block import BlockHeader
from kvtier.errors import CorruptPayload, TierUnavailable
from kvtier.hierarchy.state import State
from kvtier.tiers.base import Slots, Tier, TierNumber

T = TypeVar("T")

BATCH_NBYTES = 64 << 20
"""Bytes moved by one tier call."""
BATCH_BLOCKS = 64


@dataclass(frozen=True, slots=True)
class Landing:
    """A slot that waits for a block."""

    key: bytes
    offset: int
    generation: int
    nbytes: int


@contextmanager
def pinned(state: State, rows: Sequence[int]) -> Iterator[list[int]]:
    """Those of the rows that the CPU tier has, pinned while the context lasts."""
    with state.lock:
        here = [row for row in rows if state.table.has(row, TierNumber.CPU)]
        offsets = state.table.offset[np.array(here, np.int64)]
        state.cpu.pool.retain(offsets)
    try:
        yield here
    finally:
        with state.lock:
            state.cpu.pool.release(offsets)


def write(state: State, tier: TierNumber, rows: Sequence[int]) -> None:
    """Copy pinned blocks of the CPU tier to another tier, where there is one."""
    if tier not in state.tiers or not rows:
        return
    with state.lock:
        table, name = state.table, state.tiers[tier].name
        keys = [table.keys[row] for row in rows]
        sizes = [int(table.nbytes[row]) for row in rows]
        slots = Slots.of([int(table.offset[row]) for row in rows], sizes)
    answer = _ask(state, tier, lambda t: t.write(keys, slots))
    with state.lock:
        for key, size, ok in zip(keys, sizes, answer or [False] * len(keys), strict=True):
            row = state.row(key)
            if ok and row is not None:
                state.enter(row, tier)
                state.move("cpu", name, size)
            elif not ok:
                state.stats.faults[f"{name}_refused"] += 1
        state.heard(tier)


def read(state: State, tier: TierNumber, landings: Sequence[Landing]) -> list[int]:
    """Copy blocks of another tier into granted slots; the slots that hold a block now, pinned once for the caller.

    What the tier does not have or cannot verify is forgotten there; slots that hold nothing are given back.
    """
    keys = [landing.key for landing in landings]
    slots = Slots.of([landing.offset for landing in landings], [landing.nbytes for landing in landings])
    answer = _ask(state, tier, lambda t: t.read(keys, slots))
    arrived: list[int] = []
    with state.lock:
        name = state.tiers[tier].name
        for landing, ok in zip(landings, answer or [False] * len(keys), strict=True):
            row = state.row(landing.key)
            header = _header(state, landing) if ok else None
            if row is not None and header is not None and not state.table.has(row, TierNumber.CPU):
                state.place(row, landing.offset, landing.generation, header)
                arrived.append(landing.offset)
                state.move(name, "cpu", landing.nbytes)
                continue
            state.free_slot(landing.offset)
            if row is not None and header is None and answer is not None:
                state.stats.faults[f"{name}_lost"] += 1
                state.leave(row, tier, f"{name}_lost")
        state.cpu.pool.retain(np.array(arrived, np.int64))
    return arrived


def remove(state: State, tier: TierNumber, keys: Sequence[bytes]) -> None:
    """Tell a tier to forget blocks."""
    if keys:
        _ask(state, tier, lambda t: t.remove(keys))


def batches(state: State, keys: Sequence[bytes]) -> list[list[bytes]]:
    """Cut known keys into batches of one tier call each."""
    with state.lock:
        rows = map(state.row, keys)
        sizes = [0 if row is None else int(state.table.nbytes[row]) for row in rows]
    cut: list[list[bytes]] = []
    total = 0
    for key, size in zip(keys, sizes, strict=True):
        if not cut or total + size > BATCH_NBYTES or len(cut[-1]) == BATCH_BLOCKS:
            cut.append([])
            total = 0
        cut[-1].append(key)
        total += size
    return cut


def _ask(state: State, tier: TierNumber, call: Callable[[Tier], T]) -> T | None:
    """Ask a tier; None when there is nobody to ask (counted)."""
    try:
        return call(state.tiers[tier])
    except TierUnavailable:
        with state.lock:
            state.stats.faults[f"{state.tiers[tier].name}_unavailable"] += 1
        return None


def _header(state: State, landing: Landing) -> BlockHeader | None:
    try:
        header = BlockHeader.unpack(state.cpu.arena.payload(landing.offset, landing.nbytes))
    except CorruptPayload:
        return None
    return header if (header.address, header.payload_nbytes) == (landing.key, landing.nbytes) else None
