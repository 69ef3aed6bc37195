"""Payloads of slots that go to, or come from, somebody who does not map the arena."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvtier.block import BlockHeader, verify_payload
from kvtier.errors import CorruptPayload
from kvtier.hierarchy.state import State
from kvtier.tiers.base import TierNumber


@dataclass(frozen=True, slots=True)
class Place:
    """A slot and whose it is.

    Attributes:
        key: of its block.
        offset: in the arena.
        nbytes: of the payload.
        space: that its header says it belongs to; empty while nothing is written there.
    """

    key: bytes
    offset: int
    nbytes: int
    space: bytes = b""


def hold(state: State, lease: int, position: int) -> Place | None:
    """Refer to a leased slot until `let_go`, even if the lease ends before; None when it is not leased, or bad."""
    with state.lock:
        one = state.ledger.leases.get(lease)
        if one is None or not 0 <= position < len(one.offsets):
            return None
        offset = int(one.offsets[position])
        try:
            # A block that was dropped meanwhile is in no table any more; its slot is the lease's still.
            header = BlockHeader.unpack(state.cpu.arena.payload(offset, state.cpu.pool.size_class(offset)))
        except CorruptPayload:
            return None
        if header.payload_nbytes > state.cpu.pool.size_class(offset):
            return None
        state.cpu.pool.retain(np.array([offset], np.int64))
        return Place(header.address, offset, header.payload_nbytes, header.space)


def is_broken(state: State, key: bytes) -> bool:
    """Whether the CPU tier has this block and its bytes are not what was written; looked at without the lock."""
    with state.lock:
        row = state.row(key)
        if row is None or not state.table.has(row, TierNumber.CPU):
            return False
        offset, nbytes = int(state.table.offset[row]), int(state.table.nbytes[row])
        state.cpu.pool.retain(np.array([offset], np.int64))
    try:
        verify_payload(state.cpu.arena.memory[offset : offset + nbytes].data, expected=key)
    except CorruptPayload:
        return True
    finally:
        let_go(state, offset)
    return False


def let_go(state: State, offset: int) -> None:
    """Refer to a slot no more."""
    with state.lock:
        state.free_slot(offset)


def places(state: State, session: int, ticket: int) -> dict[int, Place]:
    """Slots that a session has reserved, by position; none when it has no such reservation (any more)."""
    with state.lock:
        booked = state.ledger.reservation(ticket, session)
        if booked is None:
            return {}
        known = zip(booked.positions, booked.keys, booked.offsets, booked.nbytes, strict=True)
        return {position: Place(key, offset, nbytes) for position, key, offset, nbytes in known}
