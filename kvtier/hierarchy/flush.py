"""Writing down what would be lost with this host's memory."""

from __future__ import annotations

import time
from collections.abc import Callable

from kvtier.hierarchy import transfer
from kvtier.hierarchy.cache import Hierarchy
from kvtier.tiers.base import TierNumber


def flush(hierarchy: Hierarchy, seconds: float, clock: Callable[[], float] = time.monotonic) -> tuple[int, int]:
    """Move blocks that only memory has to the NVMe tier, oldest first.

    Args:
        hierarchy: of the host; nobody uses it any more.
        seconds: after which it stops.
        clock: monotonic seconds.

    Returns:
        How many blocks are on NVMe because of this, and how many still are not.
    """
    deadline, state = clock() + seconds, hierarchy.state
    unwritten = _unwritten(hierarchy)
    if TierNumber.NVME in state.tiers:
        for batch in transfer.batches(state, unwritten):
            left = deadline - clock()
            if left <= 0:
                break
            try:
                hierarchy.move(batch, TierNumber.NVME).result(left)
            except TimeoutError:
                break
    still = len(_unwritten(hierarchy))
    return len(unwritten) - still, still


def _unwritten(hierarchy: Hierarchy) -> list[bytes]:
    state = hierarchy.state
    with state.lock:
        rows = ((key, row) for key, row in state.table.rows.items() if key not in state.abroad)
        return [key for key, row in rows if not state.table.has(row, TierNumber.NVME)]
