"""The block table after a tier was away."""

from __future__ import annotations

from kvtier.hierarchy import transfer
from kvtier.hierarchy.state import State
from kvtier.tiers.base import TierNumber


def reconcile(state: State, tier: TierNumber) -> tuple[int, int]:
    """Tell a tier what it missed, and make the table say of it what it says of itself.

    Its blocks that were lost with it are forgotten, what it kept is learned. May take a while; not for the loop.

    Returns:
        How many blocks the tier has, and how many were forgotten.

    Raises:
        TierUnavailable: it is away again.
    """
    transfer.settle(state, tier)
    has = state.tiers[tier].inventory()
    there = frozenset(has.keys)
    with state.lock:
        table = state.table
        lost = [row for key, row in table.rows.items() if key not in there and table.has(row, tier)]
        state.leave(lost, tier, f"{state.tiers[tier].name}_lost")
        state.adopt_inventory(tier, has)
    if tier is TierNumber.GPU:
        transfer.locate(state, has.keys)
    return len(has), len(lost)
