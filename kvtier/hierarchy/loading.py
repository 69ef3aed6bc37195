"""The hot path of loads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvtier.block import PAGE
from kvtier.hierarchy.answers import SLOT, Matched
from kvtier.hierarchy.pace import worth
from kvtier.hierarchy.staging import Stager, Staging
from kvtier.hierarchy.state import State
from kvtier.tiers.base import TierNumber


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


@dataclass(frozen=True, slots=True)
class Wish:
    """What a session asks for.

    Attributes:
        session: who asks.
        leasable: bytes that a session may have leased.
        keys: addresses of a chain from its first block.
        origin: tiers from which blocks were brought up for this very request.
        prefill: tokens a second that the engine computes; 0 when that is not known.
    """

    session: int
    leasable: int
    keys: Sequence[bytes]
    origin: Mapping[bytes, TierNumber]
    prefill: float


def look(state: State, stager: Stager, wish: Wish) -> Look:
    """See `Hierarchy.look`."""
    table, keys, origin = state.table, wish.keys, wish.origin
    with state.lock:
        now = state.clock()
        holdings = state.ledger.of(wish.session)
        known = table.prefix(keys)
        rows = known[: table.alive(known, now)]
        present = len(rows)
        rows = rows[: _worth(state, wish, rows, now)]
        offsets = table.offset[rows]
        away = np.flatnonzero(offsets < 0)
        ready = int(away[0]) if away.size else len(rows)
        sizes = np.cumsum(-(-table.nbytes[rows[:ready]] // PAGE) * PAGE)
        within = int(np.searchsorted(sizes, wish.leasable - holdings.leased_nbytes, side="right")) if ready else 0
        staging = None
        if within == ready < len(rows):
            state.link(rows)
            staging = stager.stage(keys[ready : len(rows)])
        leased, slots = rows[:within], np.empty(within, SLOT)
        slots["offset"], slots["nbytes"] = offsets[:within], table.nbytes[leased]
        slots["generation"] = table.generation[leased]
        tiers = np.full(within, TierNumber.CPU, np.uint8)
        for i in range(within if origin else 0):
            tiers[i] = origin.get(keys[i], TierNumber.CPU)
        lease = 0
        if within:
            state.cpu.pool.retain(offsets[:within])
            state.touch(leased)
            table.hits[leased] += 1
            table.used[leased] = now
            lease = state.ledger.lease(wish.session, offsets[:within], int(sizes[within - 1]), now)
        tokens = {_name(t): int(table.tokens[leased][tiers == t].sum()) for t in np.unique(tiers).tolist()}
    waiting = len(rows) - ready if staging is not None else 0
    missed = {
        "quota": ready - within,
        "staging": waiting,
        "declined_recompute_cheaper": present - len(rows),
        "staging_refused": len(rows) - ready - waiting,
        "absent": len(keys) - present,
    }
    return Look(Matched(lease, slots, waiting, tiers), staging, len(keys), tokens, missed)


def count(state: State, look: Look) -> None:
    """Count a look as the answer that was given."""
    matched, stats = look.matched, state.stats
    found = len(matched.slots)
    with state.lock:
        for tier, blocks in zip(*np.unique(matched.tiers, return_counts=True), strict=True):
            stats.hits[_name(int(tier))] += int(blocks)
        stats.tokens.update(look.tokens)
        for reason, blocks in look.missed.items():
            stats.misses[reason] += blocks
        stats.lookups["full" if found == look.asked else "partial" if found else "miss"] += 1


def _worth(state: State, wish: Wish, rows: NDArray[np.int64], now: float) -> int:
    """How many of the blocks the engine gets sooner by loading than by computing."""
    if not 0 < wish.prefill < np.inf or not len(rows):
        return len(rows)
    table = state.table
    here = (table.tiers[rows] >> TierNumber.CPU & 1) > 0
    slowness = np.array([state.pace.slowness(tier, now) for tier in (0, *TierNumber)])
    # Slots decode at the CPU tier's pace, wherever their blocks come from.
    each = slowness[TierNumber.CPU] + np.where(here, 0.0, slowness[table.best_of(rows)])
    tokens = table.tokens[rows]
    return worth(tokens, np.where(tokens > 0, table.nbytes[rows] * each, 0.0), wish.prefill)


def _name(tier: int) -> str:
    return TierNumber(tier).name.lower()
