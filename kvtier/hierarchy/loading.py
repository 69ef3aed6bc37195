"""The hot path of loads."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvtier.block import PAGE
from kvtier.hierarchy.answers import SLOT, Matched
from kvtier.hierarchy.ledger import Lease
from kvtier.hierarchy.pace import worth
from kvtier.hierarchy.staging import Stager, Staging
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
    """

    session: int
    keys: Sequence[bytes]
    prefill: float = 0.0
    stream: bool = False
    after: int = 0
    first: bool = True
    device: int = 0


@dataclass(frozen=True, slots=True)
class Look:
    """What one look at the table gave.

    Attributes:
        matched: the answer.
        staging: the flight that brings up more; None when there is nothing to wait for.
        wish: what was asked for.
        rows: of the leased blocks.
        missed: blocks not leased, by reason.
    """

    matched: Matched
    staging: Staging | None
    wish: Wish
    rows: NDArray[np.int64]
    missed: dict[str, int]

    @property
    def news(self) -> Future[int] | None:
        """What to wait for before looking again; None when that is of no use."""
        if self.staging is None:
            return None
        if not self.wish.stream:
            return self.staging.done
        return self.staging.step if len(self.rows) <= self.wish.after else None


def look(state: State, stager: Stager, leasable: int, wish: Wish) -> Look:
    """See `Hierarchy.look`; `leasable`: bytes that a session may have leased."""
    table, keys = state.table, wish.keys
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
            state.touch(leased)
            table.hits[leased] += 1
            table.used[leased] = now
            lease = state.ledger.lease(Lease(wish.session, outside, there, int(sizes[within - 1]), now))
    waiting = len(rows) - ready if staging is not None else 0
    missed = {
        "quota": ready - within,
        "staging": waiting,
        "declined_recompute_cheaper": present - len(rows),
        "staging_refused": len(rows) - ready - waiting,
        "absent": len(keys) - present,
    }
    matched = Matched(lease, slots, waiting, tiers, inside, state.device.epoch)
    return Look(matched, staging, wish, leased, missed)


def count(state: State, look: Look) -> None:
    """Count a look as the answer that was given; of a stream, only what no call before it was given."""
    wish, stats, table, missed = look.wish, state.stats, state.table, dict(look.missed)
    found, asked = len(look.rows), len(wish.keys)
    rows, tiers = look.rows[wish.after :], look.matched.tiers[wish.after :]
    if wish.stream and (wish.first or len(rows)):
        found += missed.pop("staging")  # a later call counts them
    with state.lock:
        for tier in np.unique(tiers).tolist():
            stats.hits[_name(tier)] += int((tiers == tier).sum())
            stats.tokens[_name(tier)] += int(table.tokens[rows[tiers == tier]].sum())
        table.came[rows] = 0
        for reason, blocks in missed.items():
            if wish.first or reason == "staging":
                stats.misses[reason] += blocks
        if wish.first:
            stats.lookups["full" if found == asked else "partial" if found else "miss"] += 1


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
    return TierNumber(tier).name.lower()
