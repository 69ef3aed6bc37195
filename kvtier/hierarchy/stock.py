"""What a tier has, and what it has not heard that it is to forget."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Set
from contextlib import contextmanager

from kvtier.hierarchy.state import State
from kvtier.tiers.base import Inventory, TierNumber

PART = 1024
"""Blocks that the table takes note of at a time."""


def settle(state: State, tier: TierNumber) -> None:
    """Tell a tier to forget what it has not heard of yet.

    Raises:
        TierUnavailable: it is away.
    """
    with state.lock:
        keys = list(state.owed[tier])
    if tier in state.behind:
        _catch_up(state, tier)
    elif keys:
        state.tiers[tier].remove(keys)
        with state.lock:
            state.owed[tier].difference_update(keys)


def _catch_up(state: State, tier: TierNumber) -> None:
    """Take everything out of a tier that the table does not know to be there; nothing is written there meanwhile."""
    with state.writes[tier]:
        for keys in parts(state.tiers[tier].inventory().keys):
            with state.lock:
                rows = [state.row(key) for key in keys]
                known = [row is not None and state.table.has(row, tier) for row in rows]
                gone = [key for key, ok in zip(keys, known, strict=True) if not ok]
                if tier is TierNumber.GPU:
                    gone = state.device.removable(gone)
            if gone:
                state.tiers[tier].remove(gone)
        with state.lock:
            state.behind.discard(tier)


@contextmanager
def stocktaking(state: State, tier: TierNumber) -> Iterator[set[bytes]]:
    """While a tier that came back is asked for what it has, nothing is written to it; what it missed it is told before.

    The set gets what is dropped meanwhile.

    Raises:
        TierUnavailable: it is away again.
    """
    dropped: set[bytes] = set()
    state.uncertain[tier] += 1
    try:
        settle(state, tier)
        with state.writes[tier]:
            with state.lock:
                state.watching.append(dropped)
            yield dropped
    finally:
        with state.lock:
            state.uncertain[tier] -= 1
            state.watching = [one for one in state.watching if one is not dropped]


def take_stock(state: State, tier: TierNumber, has: Inventory, dropped: Set[bytes], lost: Iterable[bytes] = ()) -> int:
    """Make the table say of a tier what the tier says of itself, a few blocks at a time; how many were forgotten.

    Args:
        state: of the host.
        tier: which one.
        has: what it has.
        dropped: what is not to be adopted: see `stocktaking`.
        lost: what it has no more.
    """
    forgotten = 0
    for keys in parts(list(lost)):
        with state.lock:
            rows = [row for row in state.rows(keys) if state.table.has(row, tier)]
            state.leave(rows, tier, f"{state.tiers[tier].name}_lost")
            forgotten += len(rows)
    for at in range(0, len(has), PART):
        part = Inventory(has.keys[at : at + PART], has.records[at : at + PART])
        with state.lock:
            state.adopt_inventory(tier, part, dropped)
    return forgotten


def parts(keys: Sequence[bytes]) -> Iterator[Sequence[bytes]]:
    """Some blocks at a time, so that nobody waits for the lock."""
    for at in range(0, len(keys), PART):
        yield keys[at : at + PART]
