"""Hosts that share an index, and reach one another without a network."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import wait

import pytest

from kvtier.client.local import LocalSession
from kvtier.hierarchy.cache import Hierarchy, Limits
from kvtier.hierarchy.publishing import inventory
from kvtier.index.local import LocalIndex, LocalStore
from kvtier.memory.arena import Arena
from kvtier.testing.memory_peers import MemoryPeers, Network
from kvtier.testing.payloads import key_of
from kvtier.tiers.base import TierNumber
from tests.hierarchy_fixture import SLOT_NBYTES, Host, TestTier


class Index(LocalIndex):
    """Counts its lookups; `silent` lets them go without an answer, `gate` lets them hang."""

    silent = False
    gate = None

    def match(self, keys):
        answer = super().match(keys)
        if self.gate is not None:
            self.gate.wait(10.0)
        return None if self.silent else answer


def patiently(patch: pytest.MonkeyPatch) -> None:
    """Let lookups take as long as they do on a busy machine."""
    for module in ("cache", "mover"):
        patch.setattr(f"kvtier.hierarchy.{module}.LOOKUP", 10.0)


class Fleet:
    """A store, a network, and hosts `a`, `b`, ... that are made when they are asked for.

    Args:
        patience: seconds that one host waits until another has brought up what it asks for.
    """

    def __init__(self, patience: float = 1.0) -> None:
        self.patience = patience
        self.store, self.network = LocalStore(), Network()
        self.hosts: dict[str, FleetHost] = {}

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *_: object) -> None:
        for host in self.hosts.values():
            host.__exit__()

    def host(
        self,
        name: str,
        blocks: int = 40,
        *,
        nvme: int | None = None,
        limits: Limits | None = None,
        arena: Arena | None = None,
    ) -> FleetHost:
        arena = arena or Arena.private(blocks * SLOT_NBYTES)
        host = self.hosts[name] = FleetHost(self, name, arena, nvme, limits)
        return host


class FleetHost(Host):
    """A `Host` of a fleet."""

    def __init__(self, fleet: Fleet, name: str, arena: Arena, nvme: int | None, limits: Limits | None) -> None:
        self.now, self.name, self.door = 1000.0, name, f"{name}:1"
        self.arena = arena
        self.nvme, self.gpu = None if nvme is None else TestTier(self.arena, nvme), None
        self.peers = MemoryPeers(self.arena, fleet.network, self.door, patience=fleet.patience)
        self.index = Index(fleet.store, fleet.store.register(name, self.door))
        tiers = {TierNumber.PEER: self.peers} | ({TierNumber.NVME: self.nvme} if self.nvme else {})
        self.hierarchy = Hierarchy(self.arena, tiers, self.index, limits=limits, clock=lambda: self.now)
        fleet.network.hosts[self.door] = (self.hierarchy.lending, self.arena)
        self.state, self.mover = self.hierarchy.state, self.hierarchy.mover
        self.stats = self.state.stats

    def __exit__(self, *_: object) -> None:
        self.peers.gate.set()
        super().__exit__()

    def sought(self, session: LocalSession, seeds: Sequence[int]) -> None:
        """Ask, and wait until what other hosts have is here."""
        session.match([key_of(seed) for seed in seeds], 0.0)
        self.settle()

    def settle(self) -> None:
        """Wait for lookups and flights."""
        wait([seek.done for seek in self.mover.stager.seeker._seeks.copy().values()], 10.0)
        self.mover.stager.drain()

    def check(self) -> None:
        """What holds at any quiet moment."""
        state, table, pool = self.state, self.state.table, self.state.cpu.pool
        here = {key: row for key, row in table.rows.items() if table.has(row, TierNumber.CPU)}
        assert {state.at[int(table.offset[row])] for row in here.values()} == set(here.values())
        assert pool.used == sum(map(pool.size_class, state.at)) <= pool.capacity
        self.check_rows()

    def check_rows(self) -> None:
        """What holds at any moment: what is abroad is nowhere else, and nobody is told of it."""
        state, table = self.state, self.state.table
        abroad = {key for key, row in table.rows.items() if table.has(row, TierNumber.PEER)}
        assert abroad == state.abroad.keys()
        assert all(int(table.tiers[table.rows[key]]) == 1 << TierNumber.PEER for key in abroad)
        told = {
            key
            for key, replicas in self.index._store.replicas.items()
            if any(replica.node == self.index.node for replica in replicas)
        }
        assert told == table.rows.keys() - abroad == {key for key, _, _ in inventory(state)}
