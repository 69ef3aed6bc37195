"""Writing down what would be lost with the CPU tier."""

from __future__ import annotations

import time
from collections.abc import Callable

from kvtier.hierarchy import transfer
from kvtier.hierarchy.state import State
from kvtier.tiers.base import TierNumber

ONLY_CPU = 1 << TierNumber.CPU


def flush(state: State, seconds: float, clock: Callable[[], float] = time.monotonic) -> tuple[int, int]:
    """Copy blocks that only the CPU tier has to the NVMe tier, oldest first; they stay where they are.

    Args:
        state: of the host.
        seconds: after which it stops.
        clock: monotonic seconds.

    Returns:
        How many blocks are on NVMe now because of this, and how many are still in the CPU tier only.
    """
    deadline = clock() + seconds
    dirty = _dirty(state)
    if TierNumber.NVME in state.tiers:
        for batch in transfer.batches(state, dirty):
            if clock() >= deadline:
                break
            with state.lock:
                rows = [row for key in batch if (row := state.row(key)) is not None]
            with transfer.pinned(state, rows) as here:
                transfer.write(state, TierNumber.NVME, here)
    left = len(_dirty(state))
    return len(dirty) - left, left


def _dirty(state: State) -> list[bytes]:
    with state.lock:
        return [key for key, row in state.table.rows.items() if state.table.tiers[row] == ONLY_CPU]
