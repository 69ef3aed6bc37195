"""What stays longer than its turn, and what goes before it: pins, expiry, dropping on request.

All of it is called with the lock held.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence, Set
from dataclasses import replace

import numpy as np

from kvtier.block import slot_nbytes
from kvtier.hierarchy.ledger import Pin
from kvtier.hierarchy.state import State
from kvtier.tiers.base import OWN, TierNumber

SHED_AMONG = 4096
"""Blocks that are looked at when a tenant must make room for itself."""


def pin(state: State, keys: Sequence[bytes], seconds: float, owner: str, share: float, most: int = sys.maxsize) -> int:
    """Keep the leading blocks of a chain that the CPU tier has there for some time; how many of them are kept.

    A block that is pinned already is kept for the longer of the two times. It ends where the part of the tier that pins
    may take is used up, or `most` bytes are.
    """
    table, ledger = state.table, state.ledger
    until = state.clock() + seconds
    room = min(int(share * state.cpu.pool.capacity) - ledger.pinned_nbytes, most)
    kept = 0
    for key in keys:
        row = state.row(key)
        if row is None or not table.has(row, TierNumber.CPU):
            break
        known, nbytes = ledger.pins.get(key), slot_nbytes(int(table.nbytes[row]))
        if known is not None:
            ledger.pin(key, replace(known, until=max(known.until, until), owner=owner))
        elif nbytes > room:
            state.stats.refused["pin_quota"] += len(keys) - kept
            break
        else:
            offset = int(table.offset[row])
            state.cpu.pool.retain(np.array([offset], np.int64))
            ledger.pin(key, Pin(offset, nbytes, until, owner, int(table.space[row])))
            room -= nbytes
        kept += 1
    return kept


def unpin(state: State, keys: Sequence[bytes]) -> int:
    """Let blocks go that were pinned; how many were."""
    gone = [pin for key in keys if (pin := state.ledger.unpin(key)) is not None]
    state.cpu.pool.release(np.array([pin.offset for pin in gone], np.int64))
    return len(gone)


def end_pins(state: State) -> None:
    """Let go what was pinned until a time that has come."""
    now = state.clock()
    unpin(state, [key for key, pin in state.ledger.pins.items() if pin.until <= now])


def drop(state: State, keys: Sequence[bytes], why: str) -> list[bytes]:
    """Take blocks out of the table, wherever they are and whoever holds them; those that were there.

    Their tiers must be told to forget them (`transfer.forget`); until then nobody saves them anew.
    """
    state.reclaim(keys)
    gone = [key for key in dict.fromkeys(keys) if state.row(key) is not None]
    for tier in reversed(OWN):
        state.leave(state.rows(gone), tier, why)
    unpin(state, gone)
    state.forgetting.update(gone)
    for watcher in state.watching:
        watcher.update(gone)
    return gone


def of_space(state: State, space: bytes) -> list[bytes]:
    """All blocks of one keyspace."""
    table = state.table
    rows = np.fromiter(table.rows.values(), np.int64, len(table))
    keys: list[bytes] = [table.keys[row] for row in rows[table.space[rows] == table.known_space(space)].tolist()]
    return keys


def shed(state: State, spaces: Set[int], nbytes: int, spared: Set[int] = frozenset()) -> int:
    """Take the blocks of these keyspaces that were used longest ago out of the CPU tier; how many bytes that freed.

    What NVMe has stays there. Children leave with their parents, and whatever is spared or held keeps its ancestors.
    Looks at the oldest few thousand only, so that nobody waits for the lock: it may free less.
    """
    table, policy = state.table, state.policies[TierNumber.CPU]
    here = np.flatnonzero((table.tiers >> TierNumber.CPU & 1) > 0)
    mine = here[np.isin(table.space[here], list(spaces))]
    leaving: list[int] = []
    seen: set[int] = set()
    kept: set[int] = set()
    freed = 0
    for oldest in mine[np.argsort(table.used[mine], kind="stable")][:SHED_AMONG].tolist():
        family = policy.with_descendants([oldest], SHED_AMONG) if oldest not in seen and freed < nbytes else []
        for row in (one for one in family if one not in seen):
            seen.add(row)
            if row in spared or row in kept or state.pinned(row):
                kept.update(above for above in (table.parent_of(row),) if above is not None)
            elif freed < nbytes:
                leaving.append(row)
                freed += slot_nbytes(int(table.nbytes[row]))
            else:
                break
    state.leave(leaving, TierNumber.CPU, "quota")
    return freed


def expired(state: State) -> list[bytes]:
    """All blocks whose time is over."""
    table, now = state.table, state.clock()
    if now < table.soonest:
        return []
    rows = np.fromiter(table.rows.values(), np.int64, len(table))
    ends = table.expires[rows]
    later = ends[ends > now]
    table.soonest = float(later.min()) if later.size else np.inf
    return [table.keys[row] for row in rows[(ends > 0) & (ends <= now)].tolist()]
