"""How the CPU tier gets room."""

from __future__ import annotations

from dataclasses import dataclass

from kvtier.block import slot_nbytes
from kvtier.hierarchy.state import State
from kvtier.tiers.base import TierNumber


@dataclass(frozen=True, slots=True)
class Victims:
    """Blocks to take out of the CPU tier, children before parents.

    Attributes:
        rows: all of them.
        dirty: those that only the CPU tier has and the NVMe tier could keep.
    """

    rows: list[int]
    dirty: list[int]


def choose(state: State, nbytes: int, need: int) -> Victims:
    """Choose victims so that a slot for `nbytes` becomes free; `need` bytes of them where there are as many.

    The oldest block decides. If its slot has the wanted size, old blocks leave one by one. If not, its whole segment
    must be emptied, and with it go the descendants of what lies there.
    """
    policy, pool = state.policies[TierNumber.CPU], state.cpu.pool
    size = slot_nbytes(nbytes)
    rows = policy.victims(max(need, size), state.pinned) or policy.victims(size, state.pinned)
    if rows and size != pool.size_class(int(state.table.offset[rows[0]])):
        rows = _segment(state, rows[0]) or rows
    keeps = TierNumber.NVME in state.tiers
    only_cpu = 1 << TierNumber.CPU
    return Victims(rows, [row for row in rows if keeps and state.table.tiers[row] == only_cpu])


def _segment(state: State, row: int) -> list[int]:
    slots = state.cpu.pool.neighbours(int(state.table.offset[row]))
    if any(offset not in state.at for offset in slots):
        return []
    rows = state.policies[TierNumber.CPU].with_descendants([state.at[offset] for offset in slots])
    return [] if any(map(state.pinned, rows)) else rows


def grant_at_once(state: State, nbytes: int, writer: int, *, keep: int) -> tuple[int, int] | None:
    """A slot that is free, or can be freed without writing anything down; None otherwise.

    Args:
        state: of the host.
        nbytes: of the payload.
        writer: session that will write into the slot.
        keep: bytes of the CPU tier that must stay free.
    """
    pool, slot = state.cpu.pool, None
    while pool.free_nbytes < keep + slot_nbytes(nbytes) or (slot := state.cpu.grant(nbytes, writer)) is None:
        victims = choose(state, nbytes, keep)
        if not victims.rows or victims.dirty:
            return None
        for row in victims.rows:
            state.leave(row, TierNumber.CPU, "cpu_evicted")
    return slot
