"""Blocks on their way from other tiers into the arena."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np

from kvtier.hierarchy import transfer
from kvtier.hierarchy.room import choose
from kvtier.hierarchy.state import State
from kvtier.tiers.base import TierNumber

FLIGHTS = 256
"""Requests that may wait for staging; what is in other tiers is not there for more of them."""
PATIENCE = 30.0
"""Seconds that a flight waits for one that it depends on."""


def _running() -> Future[int]:
    """A future that one who waits cannot cancel for the others."""
    future: Future[int] = Future()
    future.set_running_or_notify_cancel()
    return future


@dataclass(slots=True, eq=False)
class Staging:
    """Blocks of one chain on their way.

    Attributes:
        step: done when some more have arrived, or it is over; another one takes its place.
        done: how many arrived, when all are there or given up.
    """

    step: Future[int] = field(default_factory=_running)
    done: Future[int] = field(default_factory=_running)


class Stager:
    """Brings blocks up; one flight a key: what is on its way already is waited for, not fetched again."""

    def __init__(self, state: State, demote: Callable[[Sequence[int]], int], *, threads: int = 2) -> None:
        self._state = state
        self._demote = demote
        self._flights: dict[bytes, Staging] = {}
        self._threads = ThreadPoolExecutor(threads, "kvtier-stage")
        self._waiting = 0
        self._closing = False

    def close(self) -> None:
        """Stop; batches under way end first, and no flight is left pending."""
        self._closing = True
        self._threads.shutdown(wait=True)

    def drain(self) -> None:
        """Wait until nothing is flying."""
        while True:
            with self._state.lock:
                flights = set(self._flights.values())
            if not flights:
                return
            for flight in flights:
                flight.done.result()

    @property
    def flights(self) -> int:
        """Requests that blocks are being staged for, or wait for it."""
        return self._waiting

    @property
    def flying(self) -> int:
        """Blocks that are being staged or wait for it."""
        return len(self._flights)

    def stage(self, keys: Sequence[bytes], *, asked: bool = False) -> Staging | None:
        """Bring blocks into the arena, in their order; None when there is nothing to bring. The lock is held.

        Args:
            keys: of a chain.
            asked: somebody wants to read them and will be told where they came from.
        """
        state = self._state
        wanted: dict[bytes, TierNumber] = {}
        others: dict[Staging, None] = {}
        for key in keys:
            row = state.row(key)
            if row is None or state.table.has(row, TierNumber.CPU):
                continue
            if key in self._flights:
                others[self._flights[key]] = None
            else:
                wanted[key] = TierNumber(state.table.best(row))
        if not wanted and len(others) < 2:
            return next(iter(others), None)
        if self._waiting >= FLIGHTS:
            return None
        self._waiting += 1
        staging = Staging()
        self._flights.update(dict.fromkeys(wanted, staging))
        try:
            self._threads.submit(self._fly, staging, wanted, list(others), asked)
        except RuntimeError:  # closed meanwhile
            self._land(staging, wanted, [])
        return staging

    def _fly(self, staging: Staging, wanted: dict[bytes, TierNumber], others: list[Staging], asked: bool) -> None:  # noqa: FBT001
        pins: list[int] = []
        try:
            for keys in transfer.batches(self._state, list(wanted)):
                if self._closing or not self.fetch(keys, wanted, pins, asked=asked):
                    break
                arrived, staging.step = staging.step, _running()
                arrived.set_result(len(pins))
            for other in others:
                with suppress(FutureTimeout):
                    other.done.result(PATIENCE)
        except Exception:  # noqa: BLE001 - a flight that fails is a miss for those who wait
            with self._state.lock:
                self._state.stats.faults["staging_error"] += 1
        finally:
            self._land(staging, wanted, pins)

    def _land(self, staging: Staging, wanted: dict[bytes, TierNumber], pins: list[int]) -> None:
        with self._state.lock:
            self._waiting -= 1
            for key in wanted:
                del self._flights[key]
            self._state.cpu.pool.release(np.array(pins, np.int64))
        staging.done.set_result(len(pins))
        staging.step.set_result(len(pins))

    def fetch(
        self, keys: Sequence[bytes], origin: dict[bytes, TierNumber], pins: list[int], *, asked: bool = False
    ) -> bool:
        """Bring one batch, appending the slots to `pins`, which the caller releases; whether all of it is there."""
        landings: dict[TierNumber, list[transfer.Landing]] = {}
        whole = True
        for place, key in enumerate(keys):
            if self._is_here(key):
                continue
            landing = self._landing(key, len(keys) - place)
            if landing is None:
                whole = False
                break
            landings.setdefault(origin[key], []).append(landing)
        for tier, slots in landings.items():
            arrived = transfer.read(self._state, tier, slots, asked=asked)
            whole = whole and len(arrived) == len(slots)
            pins.extend(arrived)
        return whole

    def _is_here(self, key: bytes) -> bool:
        with self._state.lock:
            row = self._state.row(key)
            return row is not None and self._state.table.has(row, TierNumber.CPU)

    def _landing(self, key: bytes, coming: int) -> transfer.Landing | None:
        """A slot for a block that comes in; old blocks are moved down for it, and others that come, where needed."""
        state = self._state
        while True:
            with state.lock:
                row = state.row(key)
                if row is None:
                    return None
                nbytes = int(state.table.nbytes[row])
                slot = state.cpu.grant(nbytes)
                if slot is not None:
                    return transfer.Landing(key, *slot, nbytes, int(state.table.life[row]))
                victims = choose(state, nbytes, nbytes * coming - state.cpu.pool.free_nbytes)
            if not self._demote(victims.rows):
                with state.lock:
                    state.stats.faults["staging_no_room"] += 1
                return None
