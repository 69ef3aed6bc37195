"""The block table after a tier was away."""

from __future__ import annotations

from kvtier.hierarchy import stock, transfer
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
    with stock.stocktaking(state, tier) as dropped:
        has = state.tiers[tier].inventory()
        with state.lock:
            known = list(state.table.rows)
        lost = stock.take_stock(state, tier, has, dropped, set(known).difference(has.keys))
    if tier is TierNumber.GPU:
        transfer.locate(state, has.keys)
    return len(has), lost
