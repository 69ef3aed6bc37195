"""Blocks on their way from other tiers into the arena."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from kvtier.block import slot_nbytes
from kvtier.hierarchy import transfer
from kvtier.hierarchy.flight import Staging, steps_of
from kvtier.hierarchy.room import choose
from kvtier.hierarchy.seeking import Seeker
from kvtier.hierarchy.state import State
from kvtier.tiers.base import TierNumber

AHEAD = 2
"""Batches of a flight that are under way at a time."""
FIRST_NBYTES, STAGED_NBYTES = 4 << 20, 16 << 20
"""Bytes of its first batch and of the others: who waits begins to decode when the first is there."""
FLIGHTS = 256
"""Requests that may wait for staging; what is in other tiers is not there for more of them."""
PEER_FLIGHTS = 64
"""The same for what other hosts have: hosts that answer slowly must not take the places of the disk's flights."""
PEER_THREADS = 4


class _Crew:
    """The threads for what comes from some tiers."""

    def __init__(self, name: str, threads: int) -> None:
        self.legs = ThreadPoolExecutor(threads, f"kvtier-stage{name}")
        self.fetchers = ThreadPoolExecutor(threads * AHEAD, f"kvtier-fetch{name}")

    def close(self) -> None:
        self.legs.shutdown(wait=True)
        self.fetchers.shutdown(wait=True)


class Stager:
    """Brings blocks up; one flight a key: what is on its way already is waited for, not fetched again.

    A flight has a leg for what comes from tiers of this host and one for what comes from other hosts, on threads of
    their own; no thread waits for another flight.

    Attributes:
        seeker: looks up what other hosts have.
    """

    def __init__(self, state: State, demote: Callable[[Sequence[int]], int], *, threads: int = 2) -> None:
        self._state = state
        self._demote = demote
        self._flights: dict[bytes, Staging] = {}
        self._up: set[Staging] = set()
        self._own = _Crew("", threads)
        self._abroad = _Crew("-peer", PEER_THREADS) if TierNumber.PEER in state.tiers else self._own
        self.seeker = Seeker(state, self._flights.__contains__)
        self._waiting_abroad = 0
        self._closing = False

    def close(self) -> None:
        """Stop; batches under way end first, and no flight is left pending."""
        self._closing = True
        self.seeker.close()
        self._own.close()
        self._abroad.close()

    def drain(self) -> None:
        """Wait until nothing is flying."""
        while True:
            with self._state.lock:
                flights = list(self._up)
            if not flights:
                return
            for flight in flights:
                flight.done.result()

    @property
    def flights(self) -> int:
        """Requests that blocks are being staged for, or wait for it."""
        return len(self._up)

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
        own: dict[bytes, TierNumber] = {}
        abroad: dict[bytes, TierNumber] = {}
        others: dict[Staging, None] = {}
        for key in keys:
            row = state.row(key)
            if row is None or state.table.has(row, TierNumber.CPU):
                continue
            flight = self._flights.get(key)
            if flight is not None and flight.lives[key] == state.table.life[row]:
                others[flight] = None
            else:
                tier = TierNumber(state.table.best(row))
                (abroad if tier is TierNumber.PEER else own)[key] = tier
        if self._waiting_abroad >= PEER_FLIGHTS:
            abroad = {}
        if not own and not abroad and len(others) < 2:
            return next(iter(others), None)
        if len(self._up) >= FLIGHTS:
            return None
        return self._take_off(own, abroad, list(others), asked)

    def _take_off(
        self,
        own: dict[bytes, TierNumber],
        abroad: dict[bytes, TierNumber],
        others: list[Staging],
        asked: bool,  # noqa: FBT001
    ) -> Staging:
        staging, life = Staging(legs=1), self._state.table.life
        self._up.add(staging)
        for crew, wanted in ((self._own, own), (self._abroad, abroad)):
            if not wanted:
                continue
            staging.legs += 1
            staging.lives |= {key: int(life[row]) for key in wanted if (row := self._state.row(key)) is not None}
            self._flights.update(dict.fromkeys(wanted, staging))
            self._waiting_abroad += wanted is abroad
            try:
                crew.legs.submit(self._fly, crew, staging, wanted, asked)
            except RuntimeError:  # closed meanwhile
                self._waiting_abroad -= wanted is abroad
                staging.legs -= 1
        staging.legs += len(others)
        for other in others:
            other.followers.append(staging)
            other.done.add_done_callback(lambda _: self._end_leg(staging))
        self._end_leg(staging)
        return staging

    def _fly(self, crew: _Crew, staging: Staging, wanted: dict[bytes, TierNumber], asked: bool) -> None:  # noqa: FBT001
        nbytes, began = 0, time.perf_counter()
        try:
            for arrived in self._arrivals(crew, wanted, asked=asked):
                with self._state.lock:
                    nbytes += sum(map(self._state.cpu.pool.size_class, arrived))
                    staging.pins += arrived
                    steps = steps_of(staging)
                for step in steps:
                    step.set_result(len(arrived))
            self._observe(wanted, nbytes, time.perf_counter() - began)
        except Exception:  # noqa: BLE001 - a flight that fails is a miss for those who wait
            self._failed()
        finally:
            with self._state.lock:
                self._waiting_abroad -= TierNumber.PEER in wanted.values()
            self._end_leg(staging)

    def _end_leg(self, staging: Staging) -> None:
        """One of the things that a flight waits for is over; with the last one, it is."""
        with self._state.lock:
            staging.legs -= 1
            if staging.legs:
                return
            self._up.discard(staging)
            for key in staging.lives:
                if self._flights.get(key) is staging:
                    del self._flights[key]
            self._state.cpu.pool.release(np.array(staging.pins, np.int64))
            step = staging.step
        staging.done.set_result(len(staging.pins))
        step.set_result(len(staging.pins))

    def _failed(self) -> None:
        with self._state.lock:
            self._state.stats.faults["staging_error"] += 1

    def _arrivals(self, crew: _Crew, wanted: dict[bytes, TierNumber], *, asked: bool) -> Iterator[list[int]]:
        """Slots that batches have arrived in, until one is not whole; another one is under way meanwhile."""
        flying: deque[tuple[Future[bool], list[int]]] = deque()
        batches = iter(transfer.batches(self._state, list(wanted), STAGED_NBYTES, FIRST_NBYTES))
        whole = True
        while True:
            while whole and not self._closing and len(flying) < AHEAD and (keys := next(batches, None)):
                arrived: list[int] = []
                flying.append((crew.fetchers.submit(self.fetch, keys, wanted, arrived, asked=asked), arrived))
            if not flying:
                return
            fetched, arrived = flying.popleft()
            if fetched.exception() is not None:
                self._failed()
            whole = whole and fetched.exception() is None and fetched.result()
            yield arrived

    def _observe(self, wanted: dict[bytes, TierNumber], nbytes: int, seconds: float) -> None:
        """How fast what arrived came, if it came from one tier."""
        state, tiers = self._state, set(wanted.values())
        if len(tiers) == 1 and nbytes:
            with state.lock:
                state.pace.observe(tiers.pop(), nbytes, seconds, state.clock())

    def fetch(
        self, keys: Sequence[bytes], origin: dict[bytes, TierNumber], pins: list[int], *, asked: bool = False
    ) -> bool:
        """Bring one batch, appending the slots to `pins`, which the caller releases; whether all of it is there."""
        landings, whole = self._landings(keys)
        by_tier: dict[TierNumber, list[transfer.Landing]] = {}
        for landing in landings:
            by_tier.setdefault(origin[landing.key], []).append(landing)
        for tier, slots in by_tier.items():
            arrived = transfer.read(self._state, tier, slots, asked=asked)
            whole = whole and len(arrived) == len(slots)
            pins += arrived
        return whole

    def _landings(self, keys: Sequence[bytes]) -> tuple[list[transfer.Landing], bool]:
        """Slots for blocks that come in, and whether all have one; old blocks are moved down for them where needed."""
        state, at = self._state, 0
        landings: list[transfer.Landing] = []
        while True:
            with state.lock:
                at = self._grant(keys, at, landings)
                row = state.row(keys[at]) if at < len(keys) else None
                if row is None:
                    return landings, at == len(keys)
                nbytes = int(state.table.nbytes[row])
                hopeless = slot_nbytes(nbytes) > state.cpu.pool.capacity  # nobody need leave for it
                coming = slot_nbytes(nbytes) * min(len(keys) - at, transfer.BATCH_BLOCKS)
                # What is free may be of another size.
                victims = [] if hopeless else choose(state, nbytes, coming).rows
            if not self._demote(victims):
                with state.lock:
                    state.stats.faults["staging_no_room"] += 1
                return landings, False

    def _grant(self, keys: Sequence[bytes], at: int, landings: list[transfer.Landing]) -> int:
        """Grant slots from place `at` on, until there is no room or a block is not known; where that is."""
        state, table = self._state, self._state.table
        for place in range(at, len(keys)):
            row = state.row(keys[place])
            if row is None:
                return place
            if table.has(row, TierNumber.CPU):
                continue
            nbytes = int(table.nbytes[row])
            slot = state.cpu.grant(nbytes)
            if slot is None:
                return place
            landings.append(transfer.Landing(keys[place], *slot, nbytes, int(table.life[row])))
        return len(keys)
