"""The hot path of saves."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from kvtier.block import BlockHeader, slot_nbytes
from kvtier.codecs.plan import kind_of
from kvtier.errors import CorruptPayload, UsageError
from kvtier.hierarchy.answers import GRANT, GrantState, Reserved
from kvtier.hierarchy.ledger import Reservation
from kvtier.hierarchy.limits import Limits
from kvtier.hierarchy.room import Room, grant_at_once
from kvtier.hierarchy.state import State
from kvtier.tiers.base import TierNumber

AHEAD = 64
"""Blocks for which room is made at once."""


def reserve(
    state: State,
    limits: Limits,
    session: int,
    keys: Sequence[bytes],
    nbytes: Sequence[int],
    start: int,
    *,
    allowance: int | None = None,
) -> Reserved:
    """See `Session.reserve`; `allowance`: bytes that may be reserved at most, None for what the session may."""
    if not 0 <= start <= len(keys) or len(nbytes) != len(keys) - start or min(nbytes, default=1) < 1:
        raise UsageError(f"{len(nbytes)} sizes for {len(keys)} keys from key {start} on; give one for each, 1 or more")
    if len(frozenset(keys)) != len(keys):
        raise UsageError("a key is there twice; a chain never meets itself")
    grants = np.zeros(len(keys) - start, GRANT)
    kept = staging_nbytes(state, limits)
    now = state.clock()
    ends = list(accumulate(map(slot_nbytes, nbytes)))
    ancestor = keys[start - 1] if start else None
    booked = Reservation(session, [], [], [], [], [], ancestor, list(keys[start:]), now)
    reason = ""
    with state.lock:
        state.reclaim(booked.asked)
        budget = limits.session_reserved - state.ledger.of(session).reserved_nbytes
        budget = budget if allowance is None else min(budget, allowance)
        known = state.table.prefix(keys)
        state.touch(known)
        ancestors = frozenset(known.tolist())
        for i, (key, size) in enumerate(zip(booked.asked, nbytes, strict=True)):
            row = state.row(key)
            if row is not None:
                # What has expired is about to be dropped.
                over = 0 < state.table.expires[row] <= now
                grants[i]["state"] = GrantState.BUSY if over else GrantState.STORED
                continue
            if key in state.ledger.writing or key in state.forgetting:
                grants[i]["state"] = GrantState.BUSY
                continue
            reason = _refusal(state, size, budget, kept, first=allowance is None and budget == limits.session_reserved)
            slot = None
            if not reason:
                coming = min(ends[min(i + AHEAD, len(ends)) - 1] - ends[i] + slot_nbytes(size), budget)
                slot = grant_at_once(state, size, session, room=Room(kept, coming), spared=ancestors)
                reason = "" if slot else "pressure"
            if slot is None:
                grants[i:]["state"] = GrantState.REFUSED
                state.stats.refused[reason] += len(grants) - i
                break
            budget -= slot_nbytes(size)
            grants[i] = (*slot, GrantState.GRANTED)
            booked.keys.append(key)
            booked.offsets.append(slot[0])
            booked.generations.append(slot[1])
            booked.nbytes.append(size)
            booked.positions.append(i)
        ticket = state.ledger.reserve(booked) if booked.keys else 0
    return Reserved(ticket, grants, reason)


def commit(state: State, session: int, ticket: int, written: Sequence[int], raw: int = 0) -> list[bool]:
    """See `Hierarchy.commit`."""
    visible = dict.fromkeys(written, False)
    table = state.table
    with state.lock:
        state.ledger.of(session)
        booked = state.ledger.reservation(ticket, session)
    if booked is None:
        return [False] * len(written)
    # Still reserved, the slots are nobody else's and the keys are busy: their headers are read without the lock.
    said = [place for place, position in enumerate(booked.positions) if position in visible]
    keys, offsets = [booked.keys[i] for i in said], [booked.offsets[i] for i in said]
    whole, records = state.cpu.headers(keys, offsets, [booked.nbytes[i] for i in said])
    sound = {place: n for n, place in enumerate(said) if whole[n]}
    codec = _codec_of(state, booked, min(sound)) if sound and raw else ""
    with state.lock:
        if state.ledger.end_reservation(ticket, session) is None:  # the session ended meanwhile
            return [False] * len(written)
        if len(sound) < len(said):
            state.stats.faults["bad_commit"] += len(said) - len(sound)
        state.reclaim(booked.keys)
        placed: list[int] = []
        places: list[int] = []
        parents = [booked.ancestor, *booked.asked]
        for place, (i, key, offset, size) in enumerate(
            zip(booked.positions, booked.keys, booked.offsets, booked.nbytes, strict=True)
        ):
            state.cpu.written(offset, size)
            if place not in sound or key in table.rows:
                if i in visible:
                    visible[i] = place in sound
                state.free_slot(offset)
                continue
            placed.append(state.learn(key, size, table.rows.get(parents[i] or b"", -1)))
            places.append(place)
            visible[i] = True
            state.stats.stored_nbytes += size
        offsets = [booked.offsets[place] for place in places]
        generations = [booked.generations[place] for place in places]
        state.place(placed, offsets, generations, records[[sound[place] for place in places]])
        state.enter(placed, TierNumber.CPU)
        state.stats.stored += len(placed)
        state.stats.encoded(codec, [booked.nbytes[place] for place in places], raw)
        # Blocks behind these may have been there before, and did not know their parents.
        chain = np.array([table.rows.get(key or b"", -1) for key in parents], np.int64)
        state.link(chain)
        state.touch(chain[1:][chain[1:] >= 0])
    return [visible[i] for i in written]


def staging_nbytes(state: State, limits: Limits) -> int:
    """Bytes of the CPU tier that saves leave to blocks that come up from other tiers."""
    return int(limits.staging_reserve * state.cpu.pool.capacity)


def _codec_of(state: State, booked: Reservation, place: int) -> str:
    """What the plan is called by which a block was encoded; it goes for all blocks of one save."""
    try:
        header = BlockHeader.unpack(state.cpu.arena.payload(booked.offsets[place], booked.nbytes[place]))
    except CorruptPayload:  # a client that writes there still
        return kind_of("")
    return kind_of(header.plan)


def _refusal(state: State, size: int, budget: int, kept: int, *, first: bool) -> str:
    """Why a block gets no slot; a session that holds none may have one of any size."""
    if state.draining:
        return "draining"
    if slot_nbytes(size) > state.cpu.pool.capacity - kept:
        return "too_large"
    if slot_nbytes(size) > budget and not first:
        return "quota"
    return ""
