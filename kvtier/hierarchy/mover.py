"""The background: what is done by itself, and moves on request."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from typing import Any

from numpy.typing import NDArray

from kvtier.errors import TierUnavailable
from kvtier.hierarchy import promotion, retention, stock, transfer
from kvtier.hierarchy.demotion import Demotion, leave
from kvtier.hierarchy.seeking import LOOKUP
from kvtier.hierarchy.staging import Stager
from kvtier.hierarchy.state import State
from kvtier.tiers.base import TierNumber

TICK = 0.05
"""Seconds between looks at watermarks, quarantine and index when nothing else wakes the keeper."""
BRINGERS = 4
"""Requests to bring blocks up that wait for other hosts at a time; nothing else waits behind them."""
WAITING = {"moves": 256, "promotions": 64}
"""How much of each kind of work may wait; more is refused."""


class Mover:
    """Moves blocks between tiers on its own threads.

    Args:
        state: what it works on.
        high, low: watermarks, see `Demotion`.

    Attributes:
        demotion: out of the CPU tier.
        stager: into it.
    """

    def __init__(self, state: State, *, high: float, low: float) -> None:
        self._state = state
        self._closing = threading.Event()
        self.demotion = Demotion(state, high=high, low=low, enough=self._closing.is_set)
        self.stager = Stager(state, self.demotion.demote)
        self._worker = ThreadPoolExecutor(1, "kvtier-move")
        self._bringers = ThreadPoolExecutor(BRINGERS, "kvtier-bring")
        self._bringing: set[Future[int]] = set()
        self._kicked = threading.Event()
        self._waiting: Counter[str] = Counter()
        self._chores: Sequence[Callable[[], None]] = ()
        self._keeper = threading.Thread(target=self._keep, name="kvtier-keep", daemon=True)

    def start(self, chores: Sequence[Callable[[], None]] = ()) -> None:
        """Start the keeper, which also does these chores every tick."""
        self._chores = chores
        self._keeper.start()

    def close(self) -> None:
        """Stop; what is under way ends first, what waits is given up. No future is left pending."""
        self._closing.set()
        self._kicked.set()
        self._worker.shutdown(wait=True)
        self.stager.close()  # with which the bringers' flights end
        self._bringers.shutdown(wait=True)
        if self._keeper.is_alive():
            self._keeper.join()

    def drain(self) -> None:
        """Wait until everything that was asked for so far is done, and the CPU tier is below its watermark."""
        with self._state.lock:
            bringing = list(self._bringing)
        wait(bringing)
        self._submit(lambda: 0).result()
        self.stager.drain()
        self.demotion.relieve()
        self._submit(lambda: 0).result()

    def kick(self, *, short: int = 0) -> None:
        """Look at the watermarks now; `short`: somebody was refused this many bytes, which the next one may want."""
        self.demotion.short = max(self.demotion.short, short)
        self._kicked.set()

    def promote(self, offsets: NDArray[Any]) -> None:
        """Copy blocks in these slots of the CPU tier to the GPU tier, where there is one; declined when many wait."""
        state = self._state
        if TierNumber.GPU not in state.tiers:
            return
        with state.lock:
            rows = [row for offset in offsets.tolist() if (row := state.at.get(offset)) is not None]
            keys = [state.table.keys[row] for row in rows if not state.table.has(row, TierNumber.GPU)]
        if keys:
            self._queue("promotions", self._worker, self._promote, keys)

    def move(self, keys: Sequence[bytes], tier: TierNumber) -> Future[int]:
        """Bring blocks to one tier and out of the other memory tiers; how many are there at the end."""
        return self._queue("moves", self._worker, self._move, list(keys), tier)

    def bring(self, keys: Sequence[bytes], tier: TierNumber) -> Future[int]:
        """Bring a chain's blocks up to one tier, from other hosts too; how many are there at the end."""
        return self._queue("moves", self._bringers, self._fetch, list(keys), tier)

    def pin(
        self,
        keys: Sequence[bytes],
        seconds: float,
        owner: str,
        share: float,
        allowance: Callable[[], int] | None = None,
        own: Callable[[Sequence[bytes]], int] | None = None,
    ) -> Future[int]:
        """Bring a chain's blocks to the CPU tier and keep them there; how many are kept."""
        return self._queue("moves", self._bringers, self._pin, list(keys), seconds, owner, share, allowance, own)

    def forget(self, keys: Sequence[bytes]) -> None:
        """Tell all tiers, in the background, to forget blocks that were dropped."""
        if keys:
            self._submit(self._forget, list(keys))

    def settle(self, tier: TierNumber) -> None:
        """Tell a tier, in the background, what it has not heard of yet."""
        self._submit(self._settle, tier)

    def queues(self) -> dict[str, int]:
        """How much waits, by what it waits for."""
        return {"flights": self.stager.flights} | {kind: self._waiting[kind] for kind in WAITING}

    def _queue(self, kind: str, who: ThreadPoolExecutor, work: Callable[..., int], *args: Any) -> Future[int]:
        """Queue work that can be refused; it answers 0, counted, when too much of its kind waits already."""
        with self._state.lock:
            if self._waiting[kind] >= WAITING[kind]:
                self._state.stats.faults[f"{kind}_refused"] += 1
                return _nothing()
            self._waiting[kind] += 1
            future = self._submit(self._counted, kind, work, *args, who=who)
            if who is self._bringers:
                self._bringing.add(future)
        future.add_done_callback(self._brought)
        return future

    def _counted(self, kind: str, work: Callable[..., int], *args: Any) -> int:
        try:
            return work(*args)
        finally:
            with self._state.lock:
                self._waiting[kind] -= 1

    def _brought(self, future: Future[int]) -> None:
        with self._state.lock:
            self._bringing.discard(future)

    def _submit(self, work: Callable[..., int], *args: Any, who: ThreadPoolExecutor | None = None) -> Future[int]:
        """Queue work; what is not done because this is closing, or fails, answers 0."""
        try:
            return (who or self._worker).submit(self._guarded, work, *args)
        except RuntimeError:  # closed
            return _nothing()

    def _guarded(self, work: Callable[..., int], *args: Any) -> int:
        try:
            return 0 if self._closing.is_set() else work(*args)
        except Exception:  # noqa: BLE001 - one move that fails must not end all others
            self._count("mover_error")
            return 0

    def _count(self, fault: str) -> None:
        with self._state.lock:
            self._state.stats.faults[fault] += 1

    def _forget(self, keys: list[bytes]) -> int:
        transfer.forget(self._state, keys)
        return len(keys)

    def _settle(self, tier: TierNumber) -> int:
        with suppress(TierUnavailable):
            stock.settle(self._state, tier)
        return 0

    def _promote(self, keys: list[bytes]) -> int:
        return promotion.promote(self._state, self.stager, keys)

    def _fetch(self, keys: list[bytes], tier: TierNumber) -> int:
        """Look up what this host does not know, and bring all up. On a bringer's thread."""
        with self._state.lock:
            known = len(self._state.table.prefix(keys))
            sought = self.stager.seeker.seek(keys[known:], lambda: None)
        wait([seek.done for seek in sought.seeks], LOOKUP)
        self._bring(keys)
        if tier is TierNumber.GPU and tier in self._state.tiers:
            self._submit(self._promote, keys).result()
        return sum(self._has(key, tier) for key in keys)

    def _bring(self, keys: Sequence[bytes]) -> None:
        """Bring blocks to the CPU tier."""
        state = self._state
        with state.lock:
            known = state.table.prefix(keys)
            state.link(known)
            # Who asks for blocks is about to use them: what is here already must not make room for the rest.
            state.touch(known)
            staging = self.stager.stage(keys)
        if staging is not None:
            staging.done.result()

    def _pin(
        self,
        keys: list[bytes],
        seconds: float,
        owner: str,
        share: float,
        allowance: Callable[[], int] | None,
        own: Callable[[Sequence[bytes]], int] | None,
    ) -> int:
        self._fetch(keys, TierNumber.CPU)
        kept = 0
        for part in stock.parts(keys):
            with self._state.lock:
                most = sys.maxsize if allowance is None else allowance()
                mine = part if own is None else part[: own(part)]
                now = retention.pin(self._state, mine, seconds, owner, share, most)
            kept += now
            if now < len(part):
                break
        return kept

    def _move(self, keys: list[bytes], tier: TierNumber) -> int:
        state = self._state
        with state.lock:
            keys = [key for key in keys if key not in state.abroad]
        if tier is TierNumber.NVME:
            absent = [key for key in keys if not self._has(key, tier)]
            for batch in transfer.batches(state, absent):
                self._bring(batch)
                with transfer.pinned(state, self._rows(batch)) as here:
                    transfer.write(state, tier, here)
        else:
            self._bring(keys)
            if tier is TierNumber.GPU and tier in state.tiers:
                self._promote(keys)
        there = [key for key in keys if self._has(key, tier)]
        for other in (TierNumber.GPU, TierNumber.CPU):
            if other is not tier:
                leave(state, there[::-1], other, "moved")
        with state.lock:
            return sum(state.table.best(row) == tier for row in self._rows(keys))

    def _rows(self, keys: Sequence[bytes]) -> list[int]:
        with self._state.lock:
            return self._state.rows(keys)

    def _has(self, key: bytes, tier: TierNumber) -> bool:
        with self._state.lock:
            row = self._state.row(key)
            return row is not None and self._state.table.has(row, tier)

    def _keep(self) -> None:
        while not self._closing.is_set():
            self._kicked.wait(TICK)
            self._kicked.clear()
            for chore in (self.demotion.relieve, *self._chores):
                try:
                    chore()
                except Exception:  # noqa: BLE001 - without its keeper a host fills up and stays full
                    self._count("keeper_error")


def _nothing() -> Future[int]:
    future: Future[int] = Future()
    future.set_result(0)
    return future
