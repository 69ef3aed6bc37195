"""Engines, movers and the keeper at once, on tiers that are far too small: what is read is right, nothing leaks."""

from __future__ import annotations

import random
import threading
from pathlib import Path

import numpy as np
import pytest

from kvtier.block import PAGE
from kvtier.client.local import LocalSession
from kvtier.errors import SessionUnavailable
from kvtier.hierarchy.answers import GrantState
from kvtier.hierarchy.cache import Hierarchy, Limits
from kvtier.index.local import LocalIndex, LocalStore
from kvtier.memory.arena import Arena
from kvtier.testing.payloads import key_of, payload_of
from kvtier.tiers.base import OWN, Tier, TierNumber
from kvtier.tiers.gpu import GpuTier
from kvtier.tiers.nvme import NvmeTier
from kvtier.tiers.several import Several

CAPACITY = 1 << 20
ROUNDS = 150
CHAINS = [[1000 * n + i for i in range(10)] for n in range(6)]
PAYLOADS = {seed: payload_of(seed, 50_000 if chain[0] >= 4000 else 20_000) for chain in CHAINS for seed in chain}
KEYS = {seed: key_of(seed) for seed in PAYLOADS}


class Engine:
    """One session and what it does at random; `reads` counts blocks that were compared byte by byte."""

    def __init__(self, hierarchy: Hierarchy, number: int) -> None:
        self.hierarchy = hierarchy
        self.rng = random.Random(number)
        self.session = LocalSession(hierarchy)
        self.reads = self.asked = 0

    def run(self) -> None:
        acts = [self.load, self.load, self.load, self.save, self.save, self.move, self.prefetch, self.condemn, self.die]
        for _ in range(ROUNDS):
            chain = self.rng.choice(CHAINS)
            self.rng.choice(acts)(chain[: self.rng.randrange(1, 11)])
        self.session.close()

    def load(self, seeds):
        self.asked += len(seeds)
        matched = self.session.match([KEYS[seed] for seed in seeds], self.rng.choice([0.0, 0.02]))
        copies = [
            self.session.readable()[int(slot["offset"]) : int(slot["offset"]) + int(slot["nbytes"])].tobytes()
            for slot in matched.slots
        ]
        generations = self.session.generations()[matched.slots["offset"] // PAGE]
        assert (generations == matched.slots["generation"]).all(), "a leased slot was granted again"
        assert copies == [PAYLOADS[seed] for seed in seeds[: len(copies)]], "wrong bytes"
        self.session.release(matched.lease)
        self.reads += len(copies)

    def save(self, seeds):
        reserved = self.session.reserve([KEYS[s] for s in seeds], [len(PAYLOADS[s]) for s in seeds], 0)
        granted = np.flatnonzero(reserved.grants["state"] == GrantState.GRANTED).tolist()
        for i in granted:
            offset, payload = int(reserved.grants["offset"][i]), PAYLOADS[seeds[i]]
            self.session.writable()[offset : offset + len(payload)] = np.frombuffer(payload, np.uint8)
        assert all(self.session.commit(reserved.ticket, granted)) or not reserved.ticket

    def move(self, seeds):
        self.hierarchy.move([KEYS[seed] for seed in seeds], self.rng.choice(OWN))

    def prefetch(self, seeds):
        self.hierarchy.prefetch([KEYS[seed] for seed in seeds], TierNumber.CPU)

    def condemn(self, seeds):
        if self.rng.random() < 0.2:
            self.session.condemn([KEYS[seeds[-1]]], "condemned")

    def die(self, seeds):
        if self.rng.random() < 0.3:
            self.session.match([KEYS[seed] for seed in seeds], 0.0)
            self.asked += len(seeds)
            self.session.reserve([KEYS[s] for s in seeds], [len(PAYLOADS[s]) for s in seeds], 0)
            self.session.close()
            self.session = LocalSession(self.hierarchy)


def nvme_on(folders: list[Path], arena: Arena) -> Tier:
    """1 MiB of it, over as many devices."""
    tiers = {str(folder): NvmeTier(folder, (1 << 20) // len(folders), arena, direct=False) for folder in folders}
    return Several("nvme", tiers) if len(tiers) > 1 else tiers.popitem()[1]


@pytest.mark.parametrize("devices", [1, 2])
def test_many_engines_on_one_small_host(tmp_path: Path, devices: int):
    arena = Arena.private(CAPACITY)
    store = LocalStore()
    index = LocalIndex(store, store.register("test"))
    tiers = {
        TierNumber.NVME: nvme_on([tmp_path / str(number) for number in range(devices)], arena),
        TierNumber.GPU: GpuTier(256 << 10, arena, "cpu"),
    }
    hierarchy = Hierarchy(arena, tiers, index, limits=Limits(CAPACITY // 2, CAPACITY // 4))
    engines = [Engine(hierarchy, number) for number in range(4)]
    failures: list[BaseException] = []

    def run(engine: Engine) -> None:
        try:
            engine.run()
        except BaseException as exc:  # noqa: BLE001 - handed to the test's own thread
            failures.append(exc)

    threads = [threading.Thread(target=run, args=(engine,)) for engine in engines]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120.0)
    try:
        assert not failures, failures
        hierarchy.mover.drain()
        state, status = hierarchy.state, hierarchy.status()
        pool = state.cpu.pool
        assert sum(engine.reads for engine in engines) > 100
        assert state.stats.hits.total() + state.stats.misses.total() == sum(engine.asked for engine in engines)
        assert pool.used == sum(map(pool.size_class, state.at)), "a slot leaked"
        assert (status["leases"], status["sessions"], status["reservations"], status["staging"]) == (0, 0, 0, 0)
        assert not {"keeper_error", "mover_error", "staging_error", "bad_commit"} & status["faults"].keys()
        assert not state.forgetting
        assert {key: state.table.best(row) for key, row in state.table.rows.items()} == {
            key: replicas[0].tier for key, replicas in store.replicas.items()
        }
        session = LocalSession(hierarchy)
        for chain in CHAINS:
            session.match([KEYS[seed] for seed in chain], 5.0)
    except SessionUnavailable:
        raise AssertionError("the host lost its sessions") from None
    finally:
        hierarchy.close()
