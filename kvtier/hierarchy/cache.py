"""The brain of one host, as sessions see it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as await_all
from contextlib import ExitStack, suppress
from typing import Any

from kvtier.block import slot_nbytes
from kvtier.hierarchy import loading, placement, report, retention, saving, stock, transfer
from kvtier.hierarchy.answers import Matched, Placement, Reserved
from kvtier.hierarchy.checking import Check
from kvtier.hierarchy.lending import Lending
from kvtier.hierarchy.limits import Limits, Rules
from kvtier.hierarchy.loading import Look, Wish
from kvtier.hierarchy.mover import Mover
from kvtier.hierarchy.publishing import Publisher
from kvtier.hierarchy.seeking import LOOKUP, Sought
from kvtier.hierarchy.sharing import HandedOver, Sharing
from kvtier.hierarchy.state import Clock, State
from kvtier.index.base import Index
from kvtier.memory.arena import Arena
from kvtier.tiers.base import Tier, TierNumber
from kvtier.tiers.cpu import CpuTier

__all__ = ["Hierarchy", "Limits", "Rules"]

Allowance = Callable[[], int]

SETTLING = 1.0
"""Seconds after which a tier is told again what it is to forget."""
LONGEST_PIN = 30 * 86_400.0
LONGEST_CALL = 3600.0
"""Seconds that a client may say it took; one that says more counts for nothing in the histograms."""


class Hierarchy:
    """The tiers of one host and everything that moves blocks between them. Thread-safe; never waits for I/O.

    Args:
        arena: memory of the CPU tier.
        tiers: the other tiers.
        index: where blocks are published.
        limits: see `Limits`.
        rules: see `Rules`.
        clock: seconds since the epoch.
        writer_gone: whether a cut-off session is known to write no more.

    Attributes:
        writing: tell whether somebody is writing into a session's slots for it, in this process.
    """

    def __init__(
        self,
        arena: Arena,
        tiers: Mapping[TierNumber, Tier],
        index: Index,
        *,
        limits: Limits | None = None,
        rules: Rules | None = None,
        clock: Clock = time.time,
        writer_gone: Callable[[int], bool] = lambda _session: True,
    ) -> None:
        self.arena = arena
        self.limits = limits or Limits.of(arena.capacity)
        self.state = State(CpuTier(arena), tiers, index, clock, rules)
        self.mover = Mover(self.state, high=self.limits.high, low=self.limits.low)
        self.lending = Lending(self.state, self.mover.stager, self.limits)
        self.sharing = Sharing(self.state, rules.replicate if rules else 0)
        self.publisher = Publisher(self.state)
        self._writer_gone = writer_gone
        self.writing: list[Callable[[int], bool]] = []
        self._settled = 0.0
        with self.state.lock:
            for tier in sorted(tiers):
                self.state.take_inventory(tier)
            transfer.locate(self.state, list(self.state.table.rows) if TierNumber.GPU in tiers else [])
        self.mover.start(
            [
                self._grow,
                self._absolve,
                self._end_times,
                self._remove_unread,
                self._settle,
                self.mover.stager.seeker.sweep,
                self.state.demand.read,
            ]
        )
        self.sharing.start()
        self.publisher.start()

    def close(self) -> None:
        """Stop the background, then close tiers and index; idempotent."""
        with ExitStack() as last_first:
            last_first.callback(self.state.index.close)
            for tier in self.state.tiers.values():
                last_first.callback(tier.close)
            last_first.callback(self.mover.close)
            last_first.callback(self.sharing.close)
            last_first.callback(self.publisher.close)

    # Sessions

    def attach(self, session: int, owner: str = "") -> None:
        """A session begins; `owner` is what its client says of itself, for people."""
        with self.state.lock:
            self.state.ledger.attach(session, owner)

    def detach(self, session: int) -> None:
        """A session ends, however: leases are released, reserved slots quarantined until its writer is gone."""
        state = self.state
        with state.lock:
            leases, reservations = state.ledger.detach(session)
            for lease in leases:
                state.end(lease)
            for reservation in reservations:
                state.cpu.quarantine(session, reservation.offsets)
        self._absolve()
        self.mover.kick()

    # Load

    def match(self, wish: Wish, wait: float = 0.0) -> Matched:
        """See `Session.match`; waits in the calling thread."""
        until = time.monotonic() + wait
        look = self.look(wish)
        if (wait or wish.stream) and (lookups := look.lookups):
            self.release(look.matched.lease)
            await_all(lookups, LOOKUP)
            look = self.look(wish, look.sought)
        while (flight := look.staging) is not None and (news := look.news) is not None:
            left = until - time.monotonic()
            if left <= 0:
                break
            self.release(look.matched.lease)
            with suppress(TimeoutError):
                news.result(left)
            look = self.look(wish, look.sought)
            if flight.done.done():
                break
        return self.settle(look)

    def look(self, wish: Wish, sought: Sought | None = None) -> Look:
        """Lease what is in the arena and start staging the rest, without waiting and without counting.

        What this host does not know is looked up in the background, unless a look before this one did: `sought`.
        """
        return loading.look(self.state, self.mover.stager, self.limits.session_leased, wish, sought)

    def settle(self, look: Look) -> Matched:
        """Count a look as the answer that was given."""
        if look.wish.again:
            return look.matched
        loading.count(self.state, look)
        if len(look.matched.slots):
            self.mover.promote(look.matched.slots["offset"][~look.matched.inside])
        return look.matched

    def release(self, lease: int, seconds: float = 0.0, part: float = 1.0) -> None:
        """Give a lease back; idempotent.

        Args:
            lease: its number.
            seconds: how long the reader had it, for the histogram of loads; 0 when it did not load.
            part: how much of its bytes were read in that time.
        """
        state = self.state
        with state.lock:
            ended = state.ledger.end_lease(lease)
            if ended is not None:
                state.end(ended)
            if 0 < seconds < LONGEST_CALL:
                state.stats.seconds["load"].observe(seconds)
                if ended is not None and not ended.inside and 0 < part < math.inf:
                    state.pace.observe(TierNumber.CPU, int(ended.nbytes * part), seconds, state.clock())

    # Save

    def reserve(
        self, session: int, keys: Sequence[bytes], nbytes: Sequence[int], start: int, *, allowance: int | None = None
    ) -> Reserved:
        """See `Session.reserve`.

        Args:
            session: who will write.
            keys: addresses of a chain from its first block.
            nbytes: payload bytes of each key of `keys[start:]`.
            start: how many of the keys are ancestors.
            allowance: bytes of slots that may be granted at most; None for what a session may.

        Raises:
            UsageError: not one size a key.
        """
        reserved = saving.reserve(self.state, self.limits, session, keys, nbytes, start, allowance=allowance)
        pool = self.state.cpu.pool
        if reserved.reason == "pressure":
            self.mover.kick(short=saving.staging_nbytes(self.state, self.limits) + sum(map(slot_nbytes, nbytes)))
        elif pool.used > self.limits.high * pool.capacity:
            self.mover.kick()
        return reserved

    def commit(
        self, session: int, ticket: int, written: Sequence[int], seconds: float = 0.0, raw: int = 0
    ) -> list[bool]:
        """See `Session.commit`.

        Args:
            session: who wrote.
            ticket: of `reserve`.
            written: positions whose slot holds a whole payload.
            seconds: how long the writer took, for the histogram of saves.
            raw: bytes of the KV of each of these blocks as its model has it; 0 when it is not said.
        """
        visible = saving.commit(self.state, session, ticket, written, raw)
        if 0 < seconds < LONGEST_CALL:
            with self.state.lock:
                self.state.stats.seconds["save"].observe(seconds)
        return visible

    def condemn(self, keys: Sequence[bytes], why: str) -> None:
        """A reader found that these blocks' bytes in the arena are not what was written: drop them everywhere."""
        with self.state.lock:
            self.state.stats.faults[why] += len(keys)
            self.state.stats.condemned += len(keys)
        self._drop(keys, why, self.mover.forget)

    def refused(self) -> None:
        """A client on the GPU tier's device cannot attach its memory, and is served from the arena: counted."""
        with self.state.lock:
            self.state.stats.faults["device_refused"] += 1

    # What stays, what goes

    def pin(
        self,
        session: int,
        keys: Sequence[bytes],
        seconds: float,
        allowance: Allowance | None = None,
        own: Callable[[Sequence[bytes]], int] | None = None,
    ) -> Future[int]:
        """See `Session.pin`.

        Args:
            session: who asks.
            keys: addresses of a chain from its first block.
            seconds: for how long.
            allowance: bytes that who asks may pin besides what is pinned; asked with the lock held, when it is done.
            own: how many of some blocks, from the first on, are who asks's own; asked in the same way.

        Raises:
            SessionUnavailable: the session is not attached.
        """
        with self.state.lock:
            owner = self.state.ledger.of(session).owner
        return self.mover.pin(keys, min(seconds, LONGEST_PIN), owner, self.limits.pinned, allowance, own)

    def unpin(self, keys: Sequence[bytes]) -> int:
        """See `Session.unpin`."""
        with self.state.lock:
            return retention.unpin(self.state, keys)

    def evict(self, keys: Sequence[bytes]) -> int:
        """See `Session.evict`."""
        return self._drop(keys, "evict", self._forget)

    def clear(self, space: bytes) -> int:
        """See `Session.clear`."""
        with self.state.lock:
            coming = list(self.state.abroad)
        for part in stock.parts(coming):  # any of these may be of it, and would come in behind
            with self.state.lock:
                self.state.reclaim(part)
        with self.state.lock:
            keys = retention.of_space(self.state, space)
        return self._drop(keys, "clear", self._forget)

    # Moves, looking

    def move(self, keys: Sequence[bytes], tier: TierNumber) -> Future[int]:
        """Bring a chain's blocks to one tier and out of the other memory tiers."""
        return self.mover.move(keys, tier)

    def prefetch(self, keys: Sequence[bytes], tier: TierNumber) -> Future[int]:
        """Bring a chain's blocks up to one tier."""
        return self.mover.bring(keys, tier)

    def inspect(self, keys: Sequence[bytes]) -> list[dict[str, Any] | None]:
        """See `Session.inspect`."""
        return report.inspect(self.state, keys)

    def where(self, keys: Sequence[bytes]) -> Placement:
        """See `Session.where`; asks the index."""
        return placement.where(self.state, keys)

    def status(self) -> dict[str, Any]:
        """Tiers, counters, sessions and index of this host, as plain values."""
        now = report.status(self.state)
        now["index"] |= {"reconciled": dict(self.publisher.counts)}
        return now | {"staging": self.mover.stager.flying, "queues": self.mover.queues()}

    def check_index(self, seconds: float, *, repair: bool) -> dict[str, Any]:
        """Compare all blocks with what the index says of this host; see `kvtier.hierarchy.checking`."""
        return Check(self.state, repair=repair).run(seconds)

    def hand_over(self, seconds: float) -> HandedOver:
        """Take no more saves, and offer the hottest blocks to other hosts until time is up; waits for them."""
        return self.sharing.hand_over(seconds)

    # Inside

    def _grow(self) -> None:
        with self.state.lock:
            self.state.cpu.grow()

    def _absolve(self) -> None:
        state = self.state
        with state.lock:
            cut_off = list(state.cpu.quarantined)
        for session in filter(self._writer_gone, cut_off):
            if any(writes(session) for writes in self.writing):
                continue
            with state.lock:
                state.cpu.absolve(session)

    def _end_times(self) -> None:
        with self.state.lock:
            retention.end_pins(self.state)
            keys = retention.expired(self.state)
        self._drop(keys, "expired", self.mover.forget)

    def _drop(self, keys: Sequence[bytes], why: str, forget: Callable[[Sequence[bytes]], None]) -> int:
        """Drop blocks everywhere, a few at a time so that nobody waits for the lock; how many there were."""
        dropped = 0
        for part in stock.parts(keys):
            with self.state.lock:
                gone = retention.drop(self.state, part, why)
            if gone:
                forget(gone)
            dropped += len(gone)
        return dropped

    def _forget(self, keys: Sequence[bytes]) -> None:
        """Tell the tiers before the caller is told that it is done."""
        transfer.forget(self.state, keys)

    def _remove_unread(self) -> None:
        if self.state.device.leaving:
            transfer.remove_unread(self.state)

    def _settle(self) -> None:
        """A tier that was busy when it was to forget something is told again, whether or not it was away."""
        now = time.monotonic()
        if now < self._settled + SETTLING:
            return
        self._settled = now
        for tier, owed in self.state.owed.items():
            if owed or tier in self.state.behind:
                self.mover.settle(tier)
