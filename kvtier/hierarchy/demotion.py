"""Blocks on their way out of the CPU tier."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from kvtier.block import PAGE
from kvtier.hierarchy import transfer
from kvtier.hierarchy.state import State
from kvtier.hierarchy.transfer import Held
from kvtier.tiers.base import TierNumber

ONLY_CPU = 1 << TierNumber.CPU


class Demotion:
    """Moves old blocks down.

    Args:
        state: what it works on.
        high: part of the CPU tier that may be in use before old blocks are moved down.
        low: part of the CPU tier that is in use afterwards.
        enough: whether to stop in the middle.

    Attributes:
        short: bytes that somebody was refused, and that the next one may want.
    """

    def __init__(self, state: State, *, high: float, low: float, enough: Callable[[], bool]) -> None:
        self.short = 0
        self._state = state
        self._high, self._low = high, low
        self._enough = enough
        self._relieving = threading.Lock()

    def demote(self, rows: Sequence[int]) -> int:
        """Take blocks out of the CPU tier, children first, writing down what no other tier has; how many left."""
        state = self._state
        with state.lock:
            keys = [state.table.keys[row] for row in rows]
        left = 0
        for batch in transfer.batches(state, keys):
            with transfer.pinned(state, _rows(state, batch)) as here:
                coming = transfer.admitted(state, [block for block in here if block.tiers == ONLY_CPU])
                transfer.write(state, TierNumber.NVME, coming)
            left += self._evict(here)
        return left

    def relieve(self) -> None:
        """Move old blocks down until the CPU tier is below its low watermark, and has what was refused.

        Without an NVMe tier there is nothing below: whoever needs room takes it from the oldest block then.
        """
        state, pool = self._state, self._state.cpu.pool
        with self._relieving:
            short, self.short = min(self.short, pool.capacity // 2), 0
            if TierNumber.NVME not in state.tiers or not (short or pool.used > self._high * pool.capacity):
                return
            target = min(int(self._low * pool.capacity), pool.capacity - short)
            state.relieving = True
            try:
                while not self._enough() and pool.used > target:
                    need = min(pool.used - target, transfer.BATCH_NBYTES * 3 // 4)
                    with state.lock:
                        policy = state.policies[TierNumber.CPU]
                        rows = policy.victims(need, state.pinned) or policy.victims(PAGE, state.pinned)
                    if not rows or not self.demote(rows):
                        return
            finally:
                state.relieving = False

    def _evict(self, blocks: Sequence[Held]) -> int:
        """Take blocks, children before parents, out of the CPU tier; how many left.

        What changed since they were chosen keeps them: a use, a child that stays or came, being saved anew.
        """
        state, leaving = self._state, []
        with state.lock:
            table, policy = state.table, state.policies[TierNumber.CPU]
            for block in blocks:
                row = state.row(block.key)
                if row is None or table.life[row] != block.life or not table.has(row, TierNumber.CPU):
                    continue
                if table.uses[row] == block.uses and policy.is_leaf(row) and not state.pinned(row):
                    policy.remove(row)  # now, so that its parent may be a leaf
                    leaving.append(row)
            state.leave(leaving, TierNumber.CPU, "cpu_evicted")
        return len(leaving)


def leave(state: State, keys: Sequence[bytes], tier: TierNumber, why: str) -> None:
    """Take blocks out of a tier; in the CPU tier, leased ones stay."""
    with state.lock:
        rows = [row for row in state.rows(keys) if state.table.has(row, tier)]
        if tier is TierNumber.CPU:
            rows = [row for row in rows if not state.pinned(row)]
        gone = [state.table.keys[row] for row in rows]
        state.leave(rows, tier, why)
    if tier is not TierNumber.CPU:
        transfer.remove(state, tier, gone)


def _rows(state: State, keys: Sequence[bytes]) -> list[int]:
    with state.lock:
        return state.rows(keys)
