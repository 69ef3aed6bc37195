"""How the CPU tier gets room."""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import dataclass

from kvtier.block import slot_nbytes
from kvtier.hierarchy.state import State
from kvtier.tiers.base import TierNumber

LINE = 64 << 20
"""Bytes of the oldest blocks among which a save takes the youngest, when NVMe cannot keep up."""
DESCENDANTS = 64
"""Blocks, besides as many again as a segment holds, that may leave with it."""
SEGMENTS_TRIED = 8
"""Segments that hold something pinned and are passed over, before only slots of the wanted size are looked at."""


@dataclass(frozen=True, slots=True)
class Victims:
    """Blocks to take out of the CPU tier, children before parents.

    Attributes:
        rows: all of them.
        dirty: those that only the CPU tier has and the NVMe tier could keep.
    """

    rows: list[int]
    dirty: list[int]


def choose(state: State, nbytes: int, need: int, spared: Set[int] = frozenset()) -> Victims:
    """Choose victims so that a slot for `nbytes` becomes free; `need` bytes of them where there are as many.

    The oldest block decides. If its slot has the wanted size, old blocks leave one by one. If not, its whole segment
    must be emptied, and with it go the descendants of what lies there. A segment that cannot be emptied is left alone:
    single blocks of another size would leave for nothing.

    Args:
        state: of the host.
        nbytes: of the payload that needs a slot.
        need: bytes to free.
        spared: blocks that must stay, and with them all their ancestors.
    """
    policy, pool = state.policies[TierNumber.CPU], state.cpu.pool
    size = slot_nbytes(nbytes)
    hopeless: set[int] = set()

    def offset(row: int) -> int:
        return int(state.table.offset[row])

    def kept(row: int) -> bool:
        return row in spared or state.pinned(row)

    def useless(row: int) -> bool:
        return kept(row) or pool.size_class(offset(row)) != size

    def elsewhere(row: int) -> bool:
        return kept(row) or pool.segment(offset(row)) in hopeless

    rows: list[int] = []
    while not rows and len(hopeless) <= SEGMENTS_TRIED and (oldest := policy.victims(1, elsewhere)):
        if not useless(oldest[0]):
            break
        hopeless.add(pool.segment(offset(oldest[0])))
        rows = _segment(state, oldest[0], kept)
    rows = rows or policy.victims(max(need, size), useless) or policy.victims(size, useless)
    keeps = TierNumber.NVME in state.tiers
    only_cpu = 1 << TierNumber.CPU
    return Victims(rows, [row for row in rows if keeps and state.table.tiers[row] == only_cpu])


def _segment(state: State, row: int, kept: Callable[[int], bool]) -> list[int]:
    """All blocks of the segment that holds this one, with their descendants.

    None when one of them is kept, or when they are many more than the segment holds: then it holds the first blocks of
    sequences, which have a size of their own under some plans, and with them all of these sequences would go.
    """
    slots = state.cpu.pool.neighbours(int(state.table.offset[row]))
    if any(offset not in state.at for offset in slots):
        return []
    rows = state.policies[TierNumber.CPU].with_descendants([state.at[o] for o in slots], 2 * len(slots) + DESCENDANTS)
    return [] if any(map(kept, rows)) else rows


@dataclass(frozen=True, slots=True)
class Room:
    """What a save leaves and takes.

    Attributes:
        keep: bytes of the CPU tier that must stay free.
        wanted: bytes that the save is about to take, this block's included.
    """

    keep: int
    wanted: int


def grant_at_once(
    state: State, nbytes: int, writer: int, *, room: Room, spared: Set[int] = frozenset()
) -> tuple[int, int] | None:
    """A slot that is free, or can be freed without writing anything down; None otherwise.

    While NVMe is being written to and cannot keep up with the saves, blocks leave for good, unwritten: of the oldest
    those that it would have written last. Then saves may take what is kept free, too.

    Args:
        state: of the host.
        nbytes: of the payload.
        writer: session that will write into the slot.
        room: how much to free.
        spared: blocks that must stay: the ancestors of what is saved, without which nobody would reach it.
    """
    pool, slot = state.cpu.pool, None
    keep = 0 if state.relieving else room.keep
    while pool.free_nbytes < keep + slot_nbytes(nbytes) or (slot := state.cpu.grant(nbytes, writer)) is None:
        # What is free may be of another size.
        victims = choose(state, nbytes, max(keep + room.wanted - pool.free_nbytes, room.wanted), spared)
        if victims.dirty:
            victims = choose(state, nbytes, 0, spared)
        rows, why = victims.rows, "cpu_evicted"
        if victims.dirty:
            rows, why = _last_in_line(state, nbytes, room, spared) if state.relieving else [], "nvme_behind"
        if not rows:
            return None
        state.leave(rows, TierNumber.CPU, why)
    return slot


def _last_in_line(state: State, nbytes: int, room: Room, spared: Set[int]) -> list[int]:
    """Of the old blocks that wait for NVMe, those that are written last, with their descendants; of one size only.

    As many as there is to be room for, children before parents.
    """
    policy, pool, size = state.policies[TierNumber.CPU], state.cpu.pool, slot_nbytes(nbytes)

    def kept(row: int) -> bool:
        return row in spared or state.pinned(row) or pool.size_class(int(state.table.offset[row])) != size

    line = policy.victims(min(LINE, pool.used // 4), kept) or policy.victims(size, kept)
    wanted = max(1, min(room.wanted // size, len(line)))
    last = policy.with_descendants(line[-wanted:])[:wanted]
    return [] if any(map(kept, last)) else last
