"""Copies between the arena and the other tiers, without the lock; what is copied is pinned first."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar, cast

import numpy as np

from kvtier.errors import ClosedError, TierUnavailable
from kvtier.hierarchy.state import State
from kvtier.tiers.base import Slots, Tier, TierNumber
from kvtier.tiers.shared import Places, SharedTier

T = TypeVar("T")

BATCH_NBYTES = 64 << 20
"""Bytes moved by one tier call."""
BATCH_BLOCKS = 256


@dataclass(frozen=True, slots=True)
class Landing:
    """A slot that waits for a block; `life` is that of the block's row in the table."""

    key: bytes
    offset: int
    generation: int
    nbytes: int
    life: int


@dataclass(frozen=True, slots=True)
class Held:
    """A block of the CPU tier whose slot is pinned; its row may go meanwhile, its bytes may not.

    Attributes:
        key: its address.
        offset, nbytes: of the payload in the arena.
        tiers: mask of the tiers that had it when it was pinned.
        life: of its row in the table.
        uses: of it until then.
    """

    key: bytes
    offset: int
    nbytes: int
    tiers: int
    life: int
    uses: int


@contextmanager
def pinned(state: State, rows: Sequence[int]) -> Iterator[list[Held]]:
    """Those of the rows that the CPU tier has, pinned while the context lasts."""
    table = state.table
    with state.lock:
        here = [row for row in dict.fromkeys(rows) if table.has(row, TierNumber.CPU)]
        offsets = table.offset[np.array(here, np.int64)]
        state.cpu.pool.retain(offsets)
        held = [
            Held(
                table.keys[row],
                offset,
                int(table.nbytes[row]),
                int(table.tiers[row]),
                int(table.life[row]),
                int(table.uses[row]),
            )
            for row, offset in zip(here, offsets.tolist(), strict=True)
        ]
    try:
        yield held
    finally:
        with state.lock:
            state.cpu.pool.release(offsets)


def write(state: State, tier: TierNumber, held: Sequence[Held]) -> list[Held]:
    """Copy pinned blocks of the CPU tier to another tier, where there is one; those that it answered and refused."""
    held = _writable(state, tier, held)
    if not held:
        return []
    name = state.tiers[tier].name
    keys = [block.key for block in held]
    slots = Slots.of([block.offset for block in held], [block.nbytes for block in held])
    with state.writes[tier]:
        began = time.perf_counter()
        answer = ask(state, tier, lambda t: t.write(keys, slots))
        took = time.perf_counter() - began
        if answer is None:
            return []
        dropped = set(ask(state, tier, lambda t: t.dropped()) or [])
        again = [block.key for block, ok in zip(held, answer, strict=True) if ok and block.key in dropped]
        if again:
            there = ask(state, tier, lambda t: t.contains(again)) or [False] * len(again)
            dropped -= {key for key, ok in zip(again, there, strict=True) if ok}
        places = _places(state, tier, keys)
        orphans, refused, stored = [], [], []
        with state.lock:
            state.stats.transfers["cpu", tier.name.lower()].observe(took)
            for block, ok in zip(held, answer, strict=True):
                row = state.row(block.key)
                if not ok:
                    state.stats.faults[f"{name}_refused"] += 1
                    refused.append(block)
                elif row is not None and state.table.life[row] == block.life:
                    stored.append(row)
                    if not state.table.has(row, tier):  # else somebody else moved it meanwhile, and counted that
                        state.move("cpu", name, block.nbytes)
                else:  # condemned meanwhile: what was copied is not to be trusted
                    orphans.append(block.key)
            state.enter(stored, tier)
            state.device.learn(keys, places)
            state.heard(tier, dropped)
        if orphans and not remove(state, tier, orphans):
            owe(state, tier, orphans)
    return refused


def read(state: State, tier: TierNumber, landings: Sequence[Landing], *, asked: bool = False) -> list[int]:
    """Copy blocks of another tier into granted slots; the slots that hold a block now, pinned once for the caller.

    What the tier does not have or cannot verify is forgotten there, of other hosts also what they did not give in time.
    Slots that hold nothing are given back.

    Args:
        state: of the host.
        tier: to read from.
        landings: slots, and what they wait for.
        asked: somebody waits for the blocks, and will be told where they came from.
    """
    keys = [landing.key for landing in landings]
    slots = Slots.of([landing.offset for landing in landings], [landing.nbytes for landing in landings])
    began = time.perf_counter()
    answer = ask(state, tier, lambda t: t.read(keys, slots))
    took = time.perf_counter() - began
    # Still granted to nobody else, the slots are read without the lock.
    whole, records = state.cpu.headers(keys, slots.offsets.tolist(), slots.nbytes.tolist())
    whole &= np.array(answer or [False] * len(keys), np.bool_)
    if tier is TierNumber.PEER:  # whose clock may be behind
        whole &= (records["expires"] == 0) | (records["expires"] > state.clock())
    arrived: list[int] = []
    placed: list[int] = []
    lost: list[int] = []
    with state.lock:
        table, name = state.table, state.tiers[tier].name
        if answer is not None:
            state.stats.transfers[tier.name.lower(), "cpu"].observe(took)
        for i, (landing, sound) in enumerate(zip(landings, whole.tolist(), strict=True)):
            row = state.row(landing.key)
            if row is not None and table.life[row] != landing.life:
                row = None
            if row is not None and sound and not table.has(row, TierNumber.CPU):
                arrived.append(i)
                placed.append(row)
                state.move(name, "cpu", landing.nbytes)
                continue
            state.free_slot(landing.offset)
            silent = answer is None and tier is not TierNumber.PEER
            if row is not None and not sound and not silent and table.has(row, tier):
                lost.append(row)
        offsets, generations = slots.offsets[arrived], [landings[i].generation for i in arrived]
        state.place(placed, offsets.tolist(), generations, records[arrived])
        state.enter(placed, TierNumber.CPU)
        table.came[placed] = tier if asked else 0
        if lost and tier is TierNumber.PEER:
            state.unfetchable(table.keys[row] for row in lost)
        if lost:
            state.stats.faults[f"{name}_lost"] += len(lost)
            state.leave(lost, tier, f"{name}_lost")
        if tier is TierNumber.NVME and placed:
            state.admission.read([table.keys[row] for row in placed], table.nbytes[placed].tolist())
        state.cpu.pool.retain(offsets)
    taken: list[int] = offsets.tolist()
    return taken


def admitted(state: State, held: Sequence[Held]) -> list[Held]:
    """Those of these pinned blocks that NVMe shall have; they are about to leave the CPU tier."""
    usage = ask(state, TierNumber.NVME, lambda tier: tier.usage()) if held and TierNumber.NVME in state.tiers else None
    if usage is None:
        return list(held)
    with state.lock:
        rows = [state.row(block.key) for block in held]
        again = [row is not None and bool(state.table.hits[row]) for row in rows]
        state.admission.usage(usage.used, usage.capacity, usage.counters.get("device_nbytes", 0))
        answer = state.admission.admit([block.key for block in held], [block.nbytes for block in held], again)
    return [block for block, ok in zip(held, answer, strict=True) if ok]


def remove(state: State, tier: TierNumber, keys: Sequence[bytes]) -> bool:
    """Tell a tier to forget blocks; whether it heard it. What somebody reads in its memory it is told of later."""
    if tier is TierNumber.GPU:
        with state.lock:
            keys = state.device.removable(keys)

    def tell(told: Tier) -> bool:
        told.remove(keys)
        return True

    return not keys or ask(state, tier, tell) is not None


def forget(state: State, keys: Sequence[bytes]) -> None:
    """Tell all tiers to forget blocks that were dropped; who does not hear it is told later: see `stock.settle`."""
    for tier in state.tiers:
        if not remove(state, tier, keys):
            owe(state, tier, keys)
    with state.lock:
        state.forgetting -= Counter(keys)


def owe(state: State, tier: TierNumber, keys: Sequence[bytes]) -> None:
    """See `State.owe`."""
    with state.lock:
        state.owe(tier, keys)


def remove_unread(state: State) -> None:
    """Tell the GPU tier to forget what it kept for its readers only."""
    with state.lock:
        keys = state.device.unread()
    if keys:
        ask(state, TierNumber.GPU, lambda tier: tier.remove(keys))
        with state.lock:
            state.device.removed(keys)


def locate(state: State, keys: Sequence[bytes]) -> None:
    """Hear from the GPU tier where the blocks are that it says it has; those on their way out stay out."""
    places = _places(state, TierNumber.GPU, keys)
    with state.lock:
        state.leave(state.rows(state.device.leaving), TierNumber.GPU, "gpu_evicted")
        state.device.learn(keys, places)


def _places(state: State, tier: TierNumber, keys: Sequence[bytes]) -> Places | None:
    """None when nobody can read there, or nobody answers."""
    if tier is not TierNumber.GPU or not state.device.epoch or not keys:
        return None
    return ask(state, tier, lambda told: cast("SharedTier", told).places(keys))


def _writable(state: State, tier: TierNumber, held: Sequence[Held]) -> Sequence[Held]:
    """Those of these blocks that can be written to a tier."""
    if tier not in state.tiers:
        return []
    with state.lock:
        leaving = state.device.leaving if tier is TierNumber.GPU else ()
        rows = [state.row(block.key) for block in held]
        places = [place for place, row in enumerate(rows) if row is not None]
        known = [row for row in rows if row is not None]
        fit = np.ones(len(held), np.bool_)
        fit[places] = state.accounts.within(tier, state.table.space[known], state.table.nbytes[known])
        if not fit.all():
            state.stats.refused[f"{state.tiers[tier].name}_quota"] += int((~fit).sum())
        return [
            block
            for block, ok in zip(held, fit.tolist(), strict=True)
            if ok and not state.owes(tier, block.key) and block.key not in leaving
        ]


def batches(
    state: State, keys: Sequence[bytes], nbytes: int = BATCH_NBYTES, first: int = BATCH_NBYTES
) -> list[list[bytes]]:
    """Cut known keys into batches of one tier call each, of `nbytes` at most (`first` the first) if they can be."""
    with state.lock:
        rows = map(state.row, keys)
        sizes = [0 if row is None else int(state.table.nbytes[row]) for row in rows]
    cut: list[list[bytes]] = []
    total = 0
    for key, size in zip(keys, sizes, strict=True):
        most = first if len(cut) == 1 else nbytes
        if not cut or total + size > most or len(cut[-1]) == BATCH_BLOCKS:
            cut.append([])
            total = 0
        cut[-1].append(key)
        total += size
    return cut


def ask(state: State, tier: TierNumber, call: Callable[[Tier], T]) -> T | None:
    """Ask a tier; None when there is nobody to ask, or the tier fails in a way that it must not (both counted)."""
    why = "unavailable"
    try:
        return call(state.tiers[tier])
    except (TierUnavailable, ClosedError):
        pass
    except Exception:  # noqa: BLE001 - whatever a tier does, its caller must give back slots and pins
        why = "error"
    with state.lock:
        state.stats.faults[f"{state.tiers[tier].name}_{why}"] += 1
    return None
