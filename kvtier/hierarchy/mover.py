"""The background: demotion, promotion, moves on request, housekeeping."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from kvtier.hierarchy import transfer
from kvtier.hierarchy.staging import Stager
from kvtier.hierarchy.state import State
from kvtier.tiers.base import TierNumber

TICK = 0.05
"""Seconds between looks at watermarks, quarantine and index when nothing else wakes the keeper."""
PROMOTIONS_WAITING = 64
GPU_SLACK = 1 << 20
"""Bytes kept free in the GPU tier beyond what is needed now, for what its size classes cannot use."""
ONLY_CPU = 1 << TierNumber.CPU
ONLY_GPU = 1 << TierNumber.GPU


class Mover:
    """Moves blocks between tiers on its own threads.

    Args:
        state: what it works on.
        high: part of the CPU tier that may be in use before old blocks are moved down.
        low: part of the CPU tier that is in use afterwards.
    """

    def __init__(self, state: State, *, high: float, low: float) -> None:
        self._state = state
        self._high, self._low = high, low
        self.stager = Stager(state, self.demote)
        self._worker = ThreadPoolExecutor(1, "kvtier-move")
        self._closing = threading.Event()
        self._kicked = threading.Event()
        self._short = 0
        self._promotions = 0
        self._chores: Sequence[Callable[[], None]] = ()
        self._keeper = threading.Thread(target=self._keep, name="kvtier-keep", daemon=True)

    def start(self, chores: Sequence[Callable[[], None]] = ()) -> None:
        """Start the keeper, which also does these chores every tick."""
        self._chores = chores
        self._keeper.start()

    def close(self) -> None:
        """Stop; what is under way ends first."""
        self._closing.set()
        self._kicked.set()
        self._worker.shutdown(wait=True, cancel_futures=True)
        self.stager.close()
        if self._keeper.is_alive():
            self._keeper.join()

    def kick(self, *, short: int = 0) -> None:
        """Look at the watermarks now; `short`: somebody was refused this many bytes, which the next one may want."""
        self._short = max(self._short, short)
        self._kicked.set()

    def demote(self, rows: Sequence[int]) -> int:
        """Take blocks out of the CPU tier, children first, writing down what no other tier has; how many left."""
        state = self._state
        with state.lock:
            keys = [state.table.keys[row] for row in rows]
        left = 0
        for batch in transfer.batches(state, keys):
            with transfer.pinned(state, self._rows(batch)) as here:
                with state.lock:
                    dirty = [row for row in here if state.table.tiers[row] == ONLY_CPU]
                transfer.write(state, TierNumber.NVME, dirty)
            left += self._leave(batch, TierNumber.CPU, "cpu_evicted")
        return left

    def promote(self, keys: Sequence[bytes]) -> None:
        """Copy blocks of the CPU tier to the GPU tier, where there is one; declined when too many wait."""
        if TierNumber.GPU in self._state.tiers and self._promotions < PROMOTIONS_WAITING and not self._closing.is_set():
            self._promotions += 1
            self._worker.submit(self._promote, list(keys)).add_done_callback(self._promoted)

    def move(self, keys: Sequence[bytes], tier: TierNumber) -> Future[int]:
        """Bring blocks to one tier and out of the other memory tiers; how many are there at the end."""
        return self._worker.submit(self._move, list(keys), tier)

    def bring(self, keys: Sequence[bytes], tier: TierNumber) -> Future[int]:
        """Bring blocks up to one tier, leaving their copies elsewhere; how many are there at the end."""
        return self._worker.submit(self._bring, list(keys), tier)

    def forget(self, keys: Sequence[bytes]) -> None:
        """Tell all tiers to forget blocks that the table no longer has."""
        for tier in self._state.tiers:
            self._worker.submit(transfer.remove, self._state, tier, list(keys))

    def _promoted(self, _: Future[None]) -> None:
        self._promotions -= 1

    def _promote(self, keys: list[bytes]) -> None:
        state = self._state
        absent = [key for key in keys if not self._has(key, TierNumber.GPU)]
        for batch in transfer.batches(state, absent):
            with transfer.pinned(state, self._rows(batch)) as here:
                self._room_on_gpu(here)
                transfer.write(state, TierNumber.GPU, here)

    def _room_on_gpu(self, coming: list[int]) -> None:
        """Take old blocks out of the GPU tier, down to the CPU tier those that no other tier has."""
        state = self._state
        usage = state.tiers[TierNumber.GPU].usage()
        with state.lock:
            need = int(state.table.nbytes[coming].sum()) + GPU_SLACK - (usage.capacity - usage.used)
            if need <= 0:
                return
            rows = state.policies[TierNumber.GPU].victims(need, set(coming).__contains__)
            keys = [state.table.keys[row] for row in rows]
            last = [state.table.keys[row] for row in rows if state.table.tiers[row] == ONLY_GPU]
        pins: list[int] = []
        for batch in transfer.batches(state, last):
            self.stager.fetch(batch, dict.fromkeys(batch, TierNumber.GPU), pins)
        self._leave(keys, TierNumber.GPU, "gpu_evicted")
        with state.lock:
            state.cpu.pool.release(np.array(pins, np.int64))

    def _bring(self, keys: list[bytes], tier: TierNumber) -> int:
        with self._state.lock:
            staging = self.stager.stage(keys)
        if staging is not None:
            staging.done.result()
        if tier is TierNumber.GPU:
            self._promote(keys)
        return sum(self._has(key, tier) for key in keys)

    def _move(self, keys: list[bytes], tier: TierNumber) -> int:
        state = self._state
        if tier is TierNumber.NVME:
            absent = [key for key in keys if not self._has(key, tier)]
            for batch in transfer.batches(state, absent):
                self._bring(batch, TierNumber.CPU)
                with transfer.pinned(state, self._rows(batch)) as here:
                    transfer.write(state, tier, here)
        else:
            self._bring(keys, tier)
        there = [key for key in keys if self._has(key, tier)]
        for other in (TierNumber.GPU, TierNumber.CPU):
            if other is not tier:
                self._leave(there[::-1], other, "moved")
        with state.lock:
            return sum(state.table.best(row) == tier for row in self._rows(keys))

    def _leave(self, keys: Sequence[bytes], tier: TierNumber, why: str) -> int:
        """Take blocks out of a tier; in the CPU tier, leased ones stay. How many left."""
        state = self._state
        with state.lock:
            rows = [row for row in self._rows(keys) if state.table.has(row, tier)]
            if tier is TierNumber.CPU:
                rows = [row for row in rows if not state.pinned(row)]
            gone = [state.table.keys[row] for row in rows]
            for row in rows:
                state.leave(row, tier, why)
        if tier is not TierNumber.CPU:
            transfer.remove(state, tier, gone)
        return len(rows)

    def _rows(self, keys: Sequence[bytes]) -> list[int]:
        with self._state.lock:
            return [row for key in keys if (row := self._state.row(key)) is not None]

    def _has(self, key: bytes, tier: TierNumber) -> bool:
        with self._state.lock:
            row = self._state.row(key)
            return row is not None and self._state.table.has(row, tier)

    def _keep(self) -> None:
        while not self._closing.is_set():
            self._kicked.wait(TICK)
            self._kicked.clear()
            self._relieve()
            for chore in self._chores:
                chore()

    def _relieve(self) -> None:
        """Move old blocks down until the CPU tier is below its low watermark, and has what was refused."""
        state, pool = self._state, self._state.cpu.pool
        short, self._short = min(self._short, pool.capacity // 2), 0
        if not short and pool.used <= self._high * pool.capacity:
            return
        target = min(int(self._low * pool.capacity), pool.capacity - short)
        while not self._closing.is_set() and pool.used > target:
            need = min(pool.used - target, transfer.BATCH_NBYTES)
            with state.lock:
                rows = state.policies[TierNumber.CPU].victims(need, state.pinned)
            if not rows or not self.demote(rows):
                return
