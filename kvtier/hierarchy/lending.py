"""What this host lends other hosts, and what they offer it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvtier.block import PAGE, slot_nbytes
from kvtier.hierarchy.ledger import PEERS, Lease
from kvtier.hierarchy.limits import Limits
from kvtier.hierarchy.seeking import ABROAD
from kvtier.hierarchy.staging import Stager
from kvtier.hierarchy.state import State
from kvtier.index.base import Replica
from kvtier.peers.base import Lent
from kvtier.tiers.base import Slots, TierNumber

TAKEN = 4
"""Offers that are being fetched at a time; while there are as many, others are declined."""
QUEUE = 0.5
"""Seconds at least that a request waits for others to give back, where they hold all that may be lent."""
TAKEN_SHARE = 1 / 16
"""Part of the CPU tier that one offer may fill: what is hot elsewhere, in place of what is oldest here."""


@dataclass(slots=True)
class _Borrower:
    """A host that is lent blocks: its session in the ledger, and how many leases that has."""

    session: int
    leases: int = 0


class Lending:
    """`Lender` of one host. Blocks that are lent are leased by a session of the other host's, and shown as such.

    Args:
        state: of the host.
        stager: brings up what is not in the arena.
        limits: how much may be lent at once.
        clock: monotonic seconds.
    """

    def __init__(
        self, state: State, stager: Stager, limits: Limits, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._state = state
        self._stager = stager
        self._limits = limits
        self._clock = clock
        self._borrowers: dict[str, _Borrower] = {}
        self._leases: dict[int, str] = {}
        self._nbytes = 0
        self._next = PEERS
        self._taking = 0
        self._returned = threading.Condition(state.lock)

    def lend(self, peer: str, keys: Sequence[bytes], nbytes: NDArray[np.int64], wait: float) -> Lent:
        state, until = self._state, self._clock() + wait
        with state.lock:
            staging = self._stager.stage(self._here(keys, nbytes))
        left = until - self._clock()
        if staging is not None and left > 0:
            with suppress(FutureTimeout):
                staging.done.result(left)
        with self._returned:
            # A request that has to wait for others is cut short by them, never by its own size.
            wanted = int(-(-nbytes // PAGE).sum()) * PAGE
            patience = max(QUEUE, until - self._clock())
            self._returned.wait_for(lambda: not self._nbytes or wanted <= self._room(), patience)
            return self._lease(peer, keys, nbytes)

    def give_back(self, lent: Lent) -> None:
        state = self._state
        with state.lock:
            peer = self._leases.pop(lent.lease, None)
            lease = state.ledger.end_lease(lent.lease) if peer is not None else None
            if peer is None or lease is None:
                return
            state.end(lease)
            self._nbytes -= lease.nbytes
            borrower = self._borrowers[peer]
            self._returned.notify_all()
            borrower.leases -= 1
            if not borrower.leases:
                state.ledger.detach(borrower.session)
                del self._borrowers[peer]

    def offered(self, peer: str, keys: Sequence[bytes], nbytes: NDArray[np.int64], door: str) -> int:
        state = self._state
        nodes = {node.node: node for node in state.index.nodes() if node.alive and node.door == door}
        with state.lock:
            others = state.others
            new = self._wanted(keys, nbytes) if nodes else []
            if not new or others is None:
                state.stats.offers["declined"] += len(keys)
                return 0
            self._taking += 1
        node = next(iter(nodes.values()))
        replicas = [(Replica(node.node, node.incarnation, TierNumber.CPU, size),) for _, size in new]
        others.found([key for key, _ in new], replicas, nodes)
        with state.lock:
            rows = [state.learn(key, size) for key, size in new if state.row(key) is None]
            state.enter(rows, TierNumber.PEER)
            staging = self._stager.stage([state.table.keys[row] for row in rows])
            state.stats.offers["taken"] += len(rows)
        if staging is None:
            self._taken()
            return 0
        staging.done.add_done_callback(lambda _: self._taken())
        return len(rows)

    def _room(self) -> int:
        """Bytes that may still be lent."""
        return int(self._limits.lent * self._state.cpu.pool.capacity) - self._nbytes

    def _taken(self) -> None:
        with self._state.lock:
            self._taking -= 1

    def _here(self, keys: Sequence[bytes], nbytes: NDArray[np.int64]) -> list[bytes]:
        """Those of these that this host has."""
        state, table, now = self._state, self._state.table, self._state.clock()
        here = []
        for key, size in zip(keys, nbytes.tolist(), strict=True):
            row = state.row(key)
            if row is None or key in state.abroad or int(table.nbytes[row]) != size:
                continue
            if not 0 < int(table.expires[row]) <= now:
                here.append(key)
        return here

    def _lease(self, peer: str, keys: Sequence[bytes], nbytes: NDArray[np.int64]) -> Lent:
        state, table = self._state, self._state.table
        offsets = np.full(len(keys), -1, np.int64)
        here, total = set(self._here(keys, nbytes)), 0
        room = self._room() if self._nbytes else state.cpu.pool.capacity
        for place, (key, size) in enumerate(zip(keys, nbytes.tolist(), strict=True)):
            row = state.row(key)
            if row is None or key not in here or not table.has(row, TierNumber.CPU):
                continue
            if total + slot_nbytes(size) > room:
                state.stats.refused["lent_quota"] += 1
                continue
            total += slot_nbytes(size)
            offsets[place] = table.offset[row]
        leased = offsets[offsets >= 0]
        if not len(leased):
            return Lent.nothing(len(keys))
        borrower = self._borrower(peer)
        borrower.leases += 1
        state.cpu.pool.retain(leased)
        number = state.ledger.lease(Lease(borrower.session, leased, (), total, state.clock()))
        self._leases[number] = peer
        self._nbytes += total
        state.stats.lent += len(leased)
        state.stats.lent_nbytes += total
        return Lent(number, Slots(offsets, np.where(offsets >= 0, nbytes, 0)))

    def _borrower(self, peer: str) -> _Borrower:
        known = self._borrowers.get(peer)
        if known is None:
            known = self._borrowers[peer] = _Borrower(self._next)
            self._next += 1
            self._state.ledger.attach(known.session, f"peer {peer}")
        return known

    def _wanted(self, keys: Sequence[bytes], nbytes: NDArray[np.int64]) -> list[tuple[bytes, int]]:
        """The first of these that are new here, as many as this host takes at once."""
        state, pool = self._state, self._state.cpu.pool
        pressed = state.relieving or (TierNumber.NVME in state.tiers and pool.used > self._limits.high * pool.capacity)
        if pressed or self._taking >= TAKEN or state.draining or len(state.abroad) >= ABROAD // 2:
            return []
        room = int(TAKEN_SHARE * pool.capacity)
        wanted: list[tuple[bytes, int]] = []
        for key, size in zip(keys, nbytes.tolist(), strict=True):
            if state.row(key) is not None or key in state.ledger.writing or key in state.forgetting:
                continue
            room -= slot_nbytes(size)
            if (room < 0 and wanted) or not 0 < slot_nbytes(size) <= pool.capacity:
                break
            wanted.append((key, size))
        return wanted
