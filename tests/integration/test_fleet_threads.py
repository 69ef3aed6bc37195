"""Engines on two hosts at once, which fetch from each other, offer, evict and lose sight of each other."""

from __future__ import annotations

import threading

from kvtier.hierarchy.cache import Hierarchy, Limits, Rules
from kvtier.hierarchy.sharing import Sharing
from kvtier.index.local import LocalIndex, LocalStore
from kvtier.memory.arena import Arena
from kvtier.testing.memory_peers import MemoryPeers, Network
from kvtier.tiers.base import TierNumber
from kvtier.tiers.nvme import NvmeTier
from tests.integration.test_hierarchy_threads import CAPACITY, KEYS, Engine

NAMES = ("a", "b")


class Guest(Engine):
    """An engine of one host; its tiers are its host's own."""

    def __init__(self, hierarchy: Hierarchy, number: int, network: Network, door: str) -> None:
        super().__init__(hierarchy, number)
        self.network, self.door = network, door

    def condemn(self, seeds):
        """Besides: blocks are dropped by request, offered, and the host is out of sight now and then."""
        act = self.rng.random()
        if act < 0.3:
            super().condemn(seeds)
        elif act < 0.6:
            self.hierarchy.evict([KEYS[seeds[-1]]])
        elif act < 0.8:
            Sharing(self.hierarchy.state, 1).replicate()
        else:
            (self.network.unreachable.add if act < 0.9 else self.network.unreachable.discard)(self.door)


def test_many_engines_on_two_small_hosts(tmp_path):
    store, network = LocalStore(), Network()
    hosts: dict[str, Hierarchy] = {}
    guests: list[Guest] = []
    for place, name in enumerate(NAMES):
        arena, door = Arena.private(CAPACITY), f"{name}:1"
        tiers = {
            TierNumber.NVME: NvmeTier(tmp_path / name, 1 << 20, arena, direct=False),
            TierNumber.PEER: MemoryPeers(arena, network, door, patience=0.05),
        }
        index = LocalIndex(store, store.register(name, door))
        hosts[name] = Hierarchy(
            arena, tiers, index, limits=Limits(CAPACITY // 2, CAPACITY // 4), rules=Rules(replicate=1)
        )
        network.hosts[door] = hosts[name].lending, arena
        guests += [Guest(hosts[name], 2 * place + number, network, door) for number in range(2)]
    failures: list[BaseException] = []

    def run(guest: Guest) -> None:
        try:
            guest.run()
        except BaseException as exc:  # noqa: BLE001 - handed to the test's own thread
            failures.append(exc)

    threads = [threading.Thread(target=run, args=(guest,)) for guest in guests]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120.0)
    try:
        assert not failures, failures
        network.unreachable.clear()
        for host in hosts.values():
            while host.mover.stager.seeker.pending:
                threading.Event().wait(0.01)
            host.mover.drain()
        moved = 0
        for name, host in hosts.items():
            state, status = host.state, host.status()
            pool = state.cpu.pool
            asked = sum(guest.asked for guest in guests if guest.hierarchy is host)
            assert state.stats.hits.total() + state.stats.misses.total() == asked
            assert pool.used == sum(map(pool.size_class, state.at)), f"{name}: a slot leaked"
            assert (status["leases"], status["sessions"], status["reservations"], status["staging"]) == (0, 0, 0, 0)
            assert not state.ledger.sessions, "a borrower is left"
            faults = {"keeper_error", "mover_error", "staging_error", "seek_error", "sharing_error", "bad_commit"}
            assert not faults & status["faults"].keys(), status["faults"]
            assert not state.forgetting
            abroad = {key for key, row in state.table.rows.items() if state.table.has(row, TierNumber.PEER)}
            assert abroad == state.abroad.keys()
            assert all(int(state.table.tiers[state.table.rows[key]]) == 1 << TierNumber.PEER for key in abroad)
            told = {
                key: replica.tier
                for key, replicas in store.replicas.items()
                for replica in replicas
                if replica.node == state.index.node
            }
            assert told == {key: state.table.best(row) for key, row in state.table.rows.items() if key not in abroad}
            moved += state.stats.moves["peer", "cpu"]
        # How much hangs on time: what could not be had is not asked for again at once.
        assert moved, "nothing went from host to host"
    finally:
        for host in hosts.values():
            host.close()
