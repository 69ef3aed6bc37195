"""The hot path of one host."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvtier.block import BlockHeader, slot_nbytes
from kvtier.errors import CorruptPayload
from kvtier.hierarchy.answers import GRANT, SLOT, GrantState, Matched, Reserved
from kvtier.hierarchy.ledger import Reservation
from kvtier.hierarchy.mover import Mover
from kvtier.hierarchy.room import grant_at_once
from kvtier.hierarchy.staging import Staging
from kvtier.hierarchy.state import Clock, State
from kvtier.index.base import Index
from kvtier.memory.arena import Arena
from kvtier.tiers.base import Tier, TierNumber
from kvtier.tiers.cpu import CpuTier


@dataclass(frozen=True, slots=True)
class Limits:
    """How much one session may hold, and when old blocks move down.

    Attributes:
        session_leased: bytes that one session may have leased.
        session_reserved: bytes that one session may have reserved.
        staging_reserve: part of the CPU tier that saves leave to blocks that come up from other tiers.
        high, low: watermarks of the CPU tier, as parts of its capacity.
    """

    session_leased: int
    session_reserved: int
    staging_reserve: float = 0.05
    high: float = 0.9
    low: float = 0.8

    @classmethod
    def of(cls, capacity: int) -> Limits:
        """The defaults for a CPU tier of this size."""
        return cls(session_leased=capacity // 10 * 9, session_reserved=capacity // 2)


@dataclass(frozen=True, slots=True)
class Look:
    """What one look at the table gave.

    Attributes:
        matched: the answer.
        staging: the flight that brings up more; None when there is nothing to wait for.
        asked: how many blocks were asked for.
        tokens: tokens leased, by tier.
        missed: blocks not leased, by reason.
    """

    matched: Matched
    staging: Staging | None
    asked: int
    tokens: dict[str, int]
    missed: dict[str, int]


class Hierarchy:
    """The tiers of one host and everything that moves blocks between them. Thread-safe; never waits for I/O.

    Args:
        arena: memory of the CPU tier.
        tiers: the other tiers.
        index: where blocks are published.
        limits: see `Limits`.
        clock: seconds since the epoch.
        writer_gone: whether a cut-off session is known to write no more.
    """

    def __init__(
        self,
        arena: Arena,
        tiers: Mapping[TierNumber, Tier],
        index: Index,
        *,
        limits: Limits | None = None,
        clock: Clock = time.time,
        writer_gone: Callable[[int], bool] = lambda _session: True,
    ) -> None:
        self.arena = arena
        self.limits = limits or Limits.of(arena.capacity)
        self.state = State(CpuTier(arena), tiers, index, clock)
        self.mover = Mover(self.state, high=self.limits.high, low=self.limits.low)
        self._writer_gone = writer_gone
        with self.state.lock:
            for tier in sorted(tiers):
                self.state.take_inventory(tier)
        self.mover.start([self._absolve, self._republish])

    def close(self) -> None:
        """Stop the background, then close tiers and index."""
        self.mover.close()
        for tier in self.state.tiers.values():
            tier.close()
        self.state.index.close()

    # Sessions

    def attach(self, session: int) -> None:
        """A session begins."""
        with self.state.lock:
            self.state.ledger.attach(session)

    def detach(self, session: int) -> None:
        """A session ends, however: leases are released, reserved slots quarantined until its writer is gone."""
        state = self.state
        with state.lock:
            leases, reservations = state.ledger.detach(session)
            for lease in leases:
                state.cpu.pool.release(lease.offsets)
            for reservation in reservations:
                state.cpu.quarantine(session, reservation.offsets)
        self._absolve()
        self.mover.kick()

    # Load

    def match(self, session: int, keys: Sequence[bytes], wait: float = 0.0) -> Matched:
        """See `Session.match`; waits in the calling thread."""
        look = self.look(session, keys)
        if look.staging is not None and wait > 0:
            self.release(look.matched.lease)
            staging = look.staging
            with suppress(TimeoutError):
                staging.done.result(wait)
            look = self.look(session, keys, staging.origin)
        return self.settle(look)

    def look(self, session: int, keys: Sequence[bytes], origin: Mapping[bytes, TierNumber] | None = None) -> Look:
        """Lease what is in the arena and start staging the rest, without waiting and without counting.

        Args:
            session: who asks.
            keys: addresses of a chain from its first block.
            origin: tiers from which blocks were brought up for this very request.
        """
        state, table = self.state, self.state.table
        with state.lock:
            holdings = state.ledger.of(session)
            rows = table.prefix(keys)
            offsets = table.offset[rows]
            away = np.flatnonzero(offsets < 0)
            ready = int(away[0]) if away.size else len(rows)
            room = self.limits.session_leased - holdings.leased_nbytes
            sizes = np.cumsum(table.nbytes[rows[:ready]])
            within = int(np.searchsorted(sizes, room, side="right")) if ready else 0
            staging = self.mover.stager.stage(keys[ready : len(rows)]) if within == ready < len(rows) else None
            leased, slots = rows[:within], np.empty(within, SLOT)
            slots["offset"], slots["nbytes"] = offsets[:within], table.nbytes[leased]
            slots["generation"] = table.generation[leased]
            tiers = np.full(within, TierNumber.CPU, np.uint8)
            for i in range(within if origin else 0):
                tiers[i] = (origin or {}).get(keys[i], TierNumber.CPU)
            lease = 0
            if within:
                state.cpu.pool.retain(offsets[:within])
                state.policies[TierNumber.CPU].touch(leased.tolist())
                table.hits[leased] += 1
                table.used[leased] = state.clock()
                lease = state.ledger.lease(session, offsets[:within], int(sizes[within - 1]))
            tokens = {self._name(t): int(table.tokens[leased][tiers == t].sum()) for t in np.unique(tiers).tolist()}
        waiting = sum(key in staging.origin for key in keys[within:]) if staging is not None else 0
        missed = {"quota": ready - within, "staging": waiting, "absent": len(keys) - max(ready, within + waiting)}
        return Look(Matched(lease, slots, waiting, tiers), staging, len(keys), tokens, missed)

    def settle(self, look: Look) -> Matched:
        """Count a look as the answer that was given."""
        state, matched = self.state, look.matched
        found, stats = len(matched.slots), self.state.stats
        with state.lock:
            for tier, count in zip(*np.unique(matched.tiers, return_counts=True), strict=True):
                stats.hits[self._name(int(tier))] += int(count)
            stats.tokens.update(look.tokens)
            for reason, count in look.missed.items():
                stats.misses[reason] += count
            stats.lookups["full" if found == look.asked else "partial" if found else "miss"] += 1
        if found:
            self._promote_later(matched)
        return matched

    def release(self, lease: int, seconds: float = 0.0) -> None:
        """Give a lease back; idempotent.

        Args:
            lease: its number.
            seconds: how long the reader had it, for the histogram of loads; 0 when it did not load.
        """
        state = self.state
        with state.lock:
            ended = state.ledger.end_lease(lease)
            if ended is not None:
                state.cpu.pool.release(ended.offsets)
            if seconds:
                state.stats.observe("load", seconds)

    # Save

    def reserve(self, session: int, keys: Sequence[bytes], nbytes: Sequence[int], start: int) -> Reserved:
        """See `Session.reserve`."""
        state = self.state
        grants = np.zeros(len(keys) - start, GRANT)
        kept = int(self.limits.staging_reserve * state.cpu.pool.capacity)
        booked = Reservation(session, [], [], [], [], [], keys[start - 1] if start else None, list(keys[start:]))
        reason = ""
        with state.lock:
            holdings = state.ledger.of(session)
            budget = self.limits.session_reserved - holdings.reserved_nbytes
            known = state.table.prefix(keys)
            state.policies[TierNumber.CPU].touch(known[state.table.offset[known] >= 0].tolist())
            for i, (key, size) in enumerate(zip(booked.asked, nbytes, strict=True)):
                if key in state.table.rows:
                    grants[i]["state"] = GrantState.STORED
                    continue
                if key in state.ledger.writing:
                    grants[i]["state"] = GrantState.BUSY
                    continue
                reason = self._refusal(size, budget, kept)
                slot = None
                if not reason:
                    slot = grant_at_once(state, size, session, keep=kept)
                    reason = "" if slot else "pressure"
                if slot is None:
                    grants[i:]["state"] = GrantState.REFUSED
                    state.stats.refused[reason] += len(grants) - i
                    break
                budget -= size
                grants[i] = (*slot, GrantState.GRANTED)
                booked.keys.append(key)
                booked.offsets.append(slot[0])
                booked.generations.append(slot[1])
                booked.nbytes.append(size)
                booked.positions.append(i)
            ticket = state.ledger.reserve(booked) if booked.keys else 0
        if reason == "pressure" or state.cpu.pool.used > self.limits.high * state.cpu.pool.capacity:
            self.mover.kick(short=kept + sum(map(slot_nbytes, nbytes)) if reason == "pressure" else 0)
        return Reserved(ticket, grants, reason)

    def commit(self, session: int, ticket: int, written: Sequence[int], seconds: float = 0.0) -> list[bool]:
        """See `Session.commit`.

        Args:
            session: who wrote.
            ticket: of `reserve`.
            written: positions whose slot holds a whole payload.
            seconds: how long the writer took, for the histogram of saves.
        """
        state = self.state
        visible: dict[int, bool] = dict.fromkeys(written, False)
        with state.lock:
            state.ledger.of(session)
            booked = state.ledger.end_reservation(ticket, session)
            if booked is None:
                return [False] * len(written)
            parents = [booked.ancestor, *booked.asked]
            for i, key, offset, generation, size in zip(
                booked.positions, booked.keys, booked.offsets, booked.generations, booked.nbytes, strict=True
            ):
                state.cpu.written(offset, size)
                header = self._written(key, offset, size) if i in visible else None
                if header is None or key in state.table.rows:
                    state.free_slot(offset)
                    continue
                row = state.learn(key, size, state.table.rows.get(parents[i] or b"", -1))
                state.place(row, offset, generation, header)
                visible[i] = True
                state.stats.stored += 1
                state.stats.stored_nbytes += size
            known = [state.table.rows[key] for key in booked.asked if key in state.table.rows]
            here = [row for row in known if state.table.has(row, TierNumber.CPU)]
            state.policies[TierNumber.CPU].touch(here)
            if seconds:
                state.stats.observe("save", seconds)
        return list(visible.values())

    def condemn(self, keys: Sequence[bytes], why: str) -> None:
        """A reader found that these blocks' bytes in the arena are not what was written: drop them everywhere."""
        state = self.state
        with state.lock:
            state.stats.faults[why] += len(keys)
            gone = [key for key in keys if state.row(key) is not None]
            for row in [state.table.rows[key] for key in gone]:
                for tier in TierNumber:
                    state.leave(row, tier, why)
        self.mover.forget(gone)

    # Moves, looking

    def move(self, keys: Sequence[bytes], tier: TierNumber) -> Future[int]:
        """Bring a chain's blocks to one tier and out of the other memory tiers."""
        return self.mover.move(keys, tier)

    def prefetch(self, keys: Sequence[bytes], tier: TierNumber) -> Future[int]:
        """Bring a chain's blocks up to one tier."""
        return self.mover.bring(keys, tier)

    def inspect(self, keys: Sequence[bytes]) -> list[dict[str, Any] | None]:
        """See `Session.inspect`."""
        state, table = self.state, self.state.table

        def describe(row: int) -> dict[str, Any]:
            return {
                "tiers": [self._name(tier) for tier in TierNumber if table.has(row, tier)],
                "nbytes": int(table.nbytes[row]),
                "codec": int(table.codec[row]),
                "created": float(table.created[row]),
                "last_access": float(table.used[row]),
                "hits": int(table.hits[row]),
                "leased": table.has(row, TierNumber.CPU) and state.pinned(row),
            }

        with state.lock:
            rows = map(state.row, keys)
            return [None if row is None else describe(row) for row in rows]

    def status(self) -> dict[str, Any]:
        """Tiers, counters, sessions and index of this host, as plain values."""
        state = self.state
        tiers = {TierNumber.CPU: state.cpu.usage()} | {n: tier.usage() for n, tier in state.tiers.items()}
        with state.lock:
            masks = state.table.tiers[list(state.table.rows.values())] if state.table.rows else np.zeros(0, np.uint8)
            return {
                "epoch": self.arena.epoch,
                "tiers": [
                    {
                        "tier": self._name(number),
                        "label": getattr(state.tiers.get(number), "label", self._name(number)),
                        "capacity": usage.capacity,
                        "used": usage.used,
                        "blocks": int((masks >> np.uint8(number) & 1).sum()),
                        "fault": usage.fault,
                        "counters": usage.counters,
                    }
                    for number, usage in sorted(tiers.items())
                ],
                "blocks": len(state.table),
                "sessions": len(state.ledger.sessions),
                "leases": len(state.ledger.leases),
                "leased_nbytes": sum(h.leased_nbytes for h in state.ledger.sessions.values()),
                "reservations": len(state.ledger.reservations),
                "staging": self.mover.stager.flying,
                "index": state.index.status(),
                **state.stats.as_dict(),
            }

    # Inside

    def _name(self, tier: int) -> str:
        return TierNumber(tier).name.lower()

    def _refusal(self, size: int, budget: int, kept: int) -> str:
        pool = self.state.cpu.pool
        if slot_nbytes(size) > pool.capacity - kept:
            return "too_large"
        if size > budget:
            return "quota"
        return ""

    def _written(self, key: bytes, offset: int, size: int) -> BlockHeader | None:
        try:
            header = BlockHeader.unpack(self.arena.payload(offset, size))
        except CorruptPayload:
            header = None
        if header is None or (header.address, header.payload_nbytes) != (key, size):
            self.state.stats.faults["bad_commit"] += 1
            return None
        return header

    def _promote_later(self, matched: Matched) -> None:
        if TierNumber.GPU in self.state.tiers:
            with self.state.lock:
                rows = [self.state.at[offset] for offset in matched.slots["offset"].tolist() if offset in self.state.at]
                keys = [self.state.table.keys[row] for row in rows]
            self.mover.promote(keys)

    def _absolve(self) -> None:
        state = self.state
        for session in [s for s in list(state.cpu.quarantined) if self._writer_gone(s)]:
            with state.lock:
                state.cpu.absolve(session)

    def _republish(self) -> None:
        if self.state.index.needs_publish():
            with self.state.lock:
                inventory = self.state.inventory()
            self.state.index.publish(inventory)
