"""The hot path of loads."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvtier.block import PAGE
from kvtier.hierarchy.answers import SLOT, Matched
from kvtier.hierarchy.demand import Asked
from kvtier.hierarchy.flight import Staging
from kvtier.hierarchy.ledger import Lease
from kvtier.hierarchy.pace import worth
from kvtier.hierarchy.seeking import Sought
from kvtier.hierarchy.staging import Stager
from kvtier.hierarchy.state import State
from kvtier.tiers.base import TierNumber


@dataclass(frozen=True, slots=True)
class Wish:
    """What a session asks for.

    Attributes:
        session: who asks.
        keys: addresses of a chain from its first block.
        prefill: tokens a second that the engine computes; 0 when that is not known.
        stream: who asks takes what is there, and asks again for what is on its way.
        after: blocks that it was given already, of a call before this one; 0 in the first.
        first: whether this is the only call for these keys, or the first of a stream.
        device: epoch of the GPU tier's memory that who asks has attached; 0 for none.
        again: whether somebody asked for the same on behalf of the same engine: it is not a use of the blocks, and is
            not counted.
    """

    session: int
    keys: Sequence[bytes]
    prefill: float = 0.0
    stream: bool = False
    after: int = 0
    first: bool = True
    device: int = 0
    again: bool = False


@dataclass(frozen=True, slots=True)
class Look:
    """What one look at the table gave.

    Attributes:
        matched: the answer.
        staging: the flight that brings up more; None when there is nothing to wait for.
        wish: what was asked for.
        step: done when some more of it has arrived than this look saw.
        rows: of the leased blocks.
        missed: blocks not leased, by reason.
        sought: lookups of what other hosts have of the rest; their outcome is worth another look.
        seconds: that it took.
    """

    matched: Matched
    staging: Staging | None
    step: Future[int] | None
    wish: Wish
    rows: NDArray[np.int64]
    missed: dict[str, int]
    sought: Sought
    seconds: float = 0.0

    @property
    def news(self) -> Future[int] | None:
        """What to wait for before looking again; None when that is of no use."""
        if self.staging is None:
            return None
        if not self.wish.stream:
            return self.staging.done
        return self.step if len(self.rows) <= self.wish.after else None

    @property
    def lookups(self) -> tuple[Future[None], ...]:
        """What one who can wait waits for, a few milliseconds, before another look, so that it is told of all there is.

        Done or not: what a lookup found while this look was under way is not in it.
        """
        patient = not self.wish.stream or self.wish.first
        return tuple(seek.done for seek in self.sought.seeks) if patient else ()


def look(state: State, stager: Stager, leasable: int, wish: Wish, sought: Sought | None = None) -> Look:
    """See `Hierarchy.look`.

    Args:
        state: of the host.
        stager: brings up what is not in the arena.
        leasable: bytes that a session may have leased.
        wish: what is asked for.
        sought: of the look before this one; what other hosts have is looked up once.
    """
    began, table, keys = time.perf_counter(), state.table, wish.keys
    with state.lock:
        now = state.clock()
        holdings = state.ledger.of(wish.session)
        known = table.prefix(keys)
        rows = known[: table.alive(known, now)]
        present = len(rows)
        rows = rows[: _worth(state, wish, rows, now)]
        offsets = table.offset[rows]
        inside = state.device.readable(rows, wish.device)
        away = np.flatnonzero((offsets < 0) & ~inside)
        ready = int(away[0]) if away.size else len(rows)
        sizes = np.cumsum(-(-table.nbytes[rows[:ready]] // PAGE) * PAGE)
        within = int(np.searchsorted(sizes, leasable - holdings.leased_nbytes, side="right")) if ready else 0
        staging = None
        if within == ready < len(rows):
            state.link(rows)
            staging = stager.stage([keys[i] for i in range(ready, len(rows)) if not inside[i]], asked=True)
        step = staging.step if staging is not None else None
        if sought is None:
            seeks = wish.first and within == ready and present == len(known)
            sought = stager.seeker.seek(keys[present:] if seeks else (), lambda: fetch(state, stager, wish))
        leased, slots, inside = rows[:within], np.empty(within, SLOT), inside[:within]
        slots["offset"] = np.where(inside, table.inside[leased], offsets[:within])
        slots["generation"] = np.where(inside, table.inside_generation[leased], table.generation[leased])
        slots["nbytes"] = table.nbytes[leased]
        came = table.came[leased]
        tiers = np.where(came > 0, came, np.uint8(TierNumber.CPU))
        tiers[inside] = TierNumber.GPU
        lease = 0
        if within:
            outside = offsets[:within][~inside]
            there = [keys[i] for i in np.flatnonzero(inside).tolist()]
            state.cpu.pool.retain(outside)
            state.device.lease(there)
            if not wish.again:
                state.touch(leased)
                table.hit(leased, now)
            held = int(sizes[within - 1])
            apart = int(np.diff(sizes[:within], prepend=0)[inside].sum()) if there else 0
            lease = state.ledger.lease(Lease(wish.session, outside, there, held, now, apart))
    waiting = len(rows) - ready if staging is not None else 0
    missed = {
        "quota": ready - within,
        "staging": waiting,
        "declined_recompute_cheaper": present - len(rows),
        "staging_refused": len(rows) - ready - waiting,
        sought.why: len(keys) - present,
    }
    matched = Matched(lease, slots, waiting, tiers, inside, state.device.epoch)
    return Look(matched, staging, step, wish, leased, missed, sought, time.perf_counter() - began)


def fetch(state: State, stager: Stager, wish: Wish) -> None:
    """Bring up what was found of a chain, whether or not somebody waits for it."""
    with state.lock:
        now = state.clock()
        rows = state.table.prefix(wish.keys)
        rows = rows[: state.table.alive(rows, now)]
        rows = rows[: _worth(state, wish, rows, now)]
        away = np.flatnonzero((state.table.offset[rows] < 0) & ~state.device.readable(rows, wish.device))
        state.link(rows)
        stager.stage([wish.keys[i] for i in away.tolist()], asked=True)


def count(state: State, look: Look) -> None:
    """Count a look as the answer that was given; of a stream, only what no call before it was given."""
    began = time.perf_counter()
    wish, stats, table, missed = look.wish, state.stats, state.table, dict(look.missed)
    found, asked = len(look.rows), len(wish.keys)
    rows, tiers = look.rows[wish.after :], look.matched.tiers[wish.after :]
    if wish.stream and (wish.first or len(rows)):
        found += missed.pop("staging")  # a later call counts them
    if not wish.first:
        missed = {reason: blocks for reason, blocks in missed.items() if reason == "staging"}
    hits = {tier: n for tier, n in enumerate(np.bincount(tiers).tolist()) if n}
    note = Asked(
        state.clock(),
        wish.keys if wish.first else (),
        len(rows) + sum(missed.values()),
        {_name(tier): blocks for tier, blocks in hits.items()},
        missed.get("absent", 0),
    )
    with state.lock:
        tokens = table.tokens[rows]
        given = int(tokens.sum())
        for tier, blocks in hits.items():
            stats.hits[_name(tier)] += blocks
            stats.tokens[_name(tier)] += given if len(hits) == 1 else int(tokens[tiers == tier].sum())
        stats.save_computing(given, wish.prefill)
        table.came[rows] = 0
        for reason, blocks in missed.items():
            if blocks:
                stats.misses[reason] += blocks
        if wish.first:
            stats.lookups["full" if found == asked else "partial" if found else "miss"] += 1
        state.demand.asked(note)
        stats.seconds["match"].observe(look.seconds + time.perf_counter() - began)


def _worth(state: State, wish: Wish, rows: NDArray[np.int64], now: float) -> int:
    """How many of the blocks the engine gets sooner by loading than by computing."""
    if not 0 < wish.prefill < np.inf or not len(rows):
        return len(rows)
    table = state.table
    here = (table.tiers[rows] >> TierNumber.CPU & 1) > 0
    here |= state.device.readable(rows, wish.device)
    slowness = np.array([state.pace.slowness(tier, now) for tier in (0, *TierNumber)])
    # Slots decode at the CPU tier's pace, wherever their blocks come from.
    each = slowness[TierNumber.CPU] + np.where(here, 0.0, slowness[table.best_of(rows)])
    tokens = table.tokens[rows]
    return worth(tokens, np.where(tokens > 0, table.nbytes[rows] * each, 0.0), wish.prefill)


def _name(tier: int) -> str:
    return _NAMES[tier]


_NAMES = {int(tier): tier.name.lower() for tier in TierNumber}
