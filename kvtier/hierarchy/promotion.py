"""Blocks on their way into the GPU tier, and old ones out of it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvtier.hierarchy import transfer
from kvtier.hierarchy.demotion import leave
from kvtier.hierarchy.staging import Stager
from kvtier.hierarchy.state import State
from kvtier.hierarchy.transfer import Held
from kvtier.tiers.base import TierNumber

GPU_SLACK = 1 << 20
"""Bytes kept free in the GPU tier beyond what is needed now, for what its size classes cannot use; in a small tier a
sixteenth of it."""
ONLY_GPU = 1 << TierNumber.GPU


def promote(state: State, stager: Stager, keys: Sequence[bytes]) -> int:
    """Copy blocks of the CPU tier to the GPU tier; how many were not there.

    Args:
        state: of the host.
        stager: brings down what only the GPU tier has, before it leaves.
        keys: of the blocks.
    """
    with state.lock:
        absent = [key for key in keys if (row := state.row(key)) is None or not state.table.has(row, TierNumber.GPU)]
    for batch in transfer.batches(state, absent):
        with state.lock:
            rows = state.rows(batch)
        with transfer.pinned(state, rows) as here:
            _room(state, stager, here)
            refused = transfer.write(state, TierNumber.GPU, here)
            if refused:  # there are bytes, but not for this size: old blocks go until a segment is free
                _room(state, stager, here, at_least=sum(block.nbytes for block in refused))
                transfer.write(state, TierNumber.GPU, refused)
    return len(absent)


def _room(state: State, stager: Stager, coming: Sequence[Held], *, at_least: int = 0) -> None:
    """Take old blocks out of the GPU tier, down to the CPU tier those that no other tier has."""
    usage = transfer.ask(state, TierNumber.GPU, lambda tier: tier.usage())
    if usage is None:
        return
    room = usage.capacity - usage.used
    wanted = sum(block.nbytes for block in coming)
    need = max(wanted + min(GPU_SLACK, usage.capacity // 16) - room, at_least)
    with state.lock:
        policy, table = state.policies[TierNumber.GPU], state.table
        # What is read there gives no room now.
        stay = {*state.rows(block.key for block in coming), *state.rows(state.device.readers)}
        rows = policy.victims(need, stay.__contains__) or policy.victims(wanted - room, stay.__contains__)
        keys = [table.keys[row] for row in rows]
        last = [table.keys[row] for row in rows if table.tiers[row] == ONLY_GPU]
    pins: list[int] = []
    for batch in transfer.batches(state, last):
        stager.fetch(batch, dict.fromkeys(batch, TierNumber.GPU), pins)
    leave(state, keys, TierNumber.GPU, "gpu_evicted")
    with state.lock:
        state.cpu.pool.release(np.array(pins, np.int64))
