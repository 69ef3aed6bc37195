"""Under full load, again and again, the NVMe tier's process or every process of the host is killed: whatever is served
is right, what is said to be there is there, and what NVMe has acknowledged is found again."""

from __future__ import annotations

import itertools
import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

import kvtier
from kvtier.client.scope import Chain
from kvtier.errors import SessionUnavailable
from kvtier_services import redis_server
from kvtier_services.cluster import node, process, state
from tests.cluster.engines import BRANCH, GUARDED, STEM, Engine, Shelf, served, shelves, starting
from tests.cluster.kit import Cluster, within

NVME_ROUNDS, HOST_ROUNDS = 10, 5
ENGINES = 3
SAMPLE = 120
"""Chains, of 540, that are looked at after each round."""
PATIENCE = 60.0
NVME = 256 << 20
SURE = NVME // 4
"""A block cannot have been evicted before as many bytes were written after it: the oldest eighth leaves at a time, and
what is carried over is at most half of what is written."""
WHOLE, EVICTED, LOST = "whole", "evicted", "lost"


class Guard:
    """Writes documents of its own to NVMe, and remembers which were acknowledged."""

    def __init__(self, cache: kvtier.Cache, on_shelf: list[Shelf]) -> None:
        self._cache = cache
        self._places = zip(itertools.cycle(on_shelf), itertools.count(GUARDED))
        self._acknowledged: list[tuple[int, Shelf, Chain]] = []
        self._before = self._last = 0

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Write while the context lasts, on a thread of its own."""
        done = threading.Event()
        thread = threading.Thread(target=self._write, args=(done,))
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join(PATIENCE)
            assert not thread.is_alive()

    def check(self) -> int:
        """All that was acknowledged and cannot have been evicted is there, and right; how many blocks that were."""
        whole = 0
        for at, shelf, chain in self._acknowledged:
            # Engines go on writing meanwhile. A busy host may say no; what it has lost it never says again.
            found = within(PATIENCE, lambda: self._found(at, shelf, chain))  # noqa: B023
            assert found != LOST, f"NVMe had acknowledged these blocks: {shelf.space.inspect(chain)}"
            whole += found == WHOLE
        self._acknowledged.clear()
        return whole * (STEM + BRANCH)

    def _found(self, at: int, shelf: Shelf, chain: Chain) -> str | None:
        """What became of a chain that was acknowledged when so many bytes had been written; None: not known now."""
        if served(shelf, chain) == STEM + BRANCH:
            return WHOLE
        if None not in shelf.space.inspect(chain) or not attached(self._cache):
            return None
        return LOST if self._written() - at <= SURE else EVICTED

    def _written(self) -> int:
        """Bytes written to NVMe since the guard began; what a host that is killed wrote last may not be counted."""
        moved = self._cache.status().get("moved_nbytes")
        if moved is not None:
            now = moved.get("cpu>nvme", 0)
            self._before += self._last if now < self._last else 0  # another process counts from 0
            self._last = now
        return self._before + self._last

    def _write(self, done: threading.Event) -> None:
        while not done.is_set():
            shelf, document = next(self._places)
            chain = shelf.chain(document, 0)
            at = self._written()
            saved = shelf.space.save(chain, shelf.computed(chain)).result()
            if saved.blocks and shelf.space.move(chain, "nvme", wait=5.0) == STEM + BRANCH:
                self._acknowledged.append((at, shelf, chain))


def no_phantoms(cache: kvtier.Cache, on_shelf: list[Shelf], chance: random.Random) -> int:
    """What the host says it has, it has, and nothing else; how many blocks of a sample that are.

    Nobody else uses it meanwhile. All is moved to NVMe first, so that nothing is evicted while it is read.
    """
    chains = [(shelf, chain) for shelf in on_shelf for chain in shelf.everything()]
    for shelf, chain in chains:
        shelf.space.move(chain, "nvme")
    evicted = nvme(cache)["counters"].get("evicted", 0)
    found = 0
    for shelf, chain in chance.sample(chains, SAMPLE):
        known = [block is not None for block in shelf.space.inspect(chain)]
        claimed = (*known, False).index(False)
        assert served(shelf, chain) == claimed, "a block was claimed, and is not served: a phantom"
        found += claimed
    for shelf in on_shelf:
        assert served(shelf, shelf.chain(GUARDED - 1, 0)) == 0, "nobody saved this"
    after = nvme(cache)
    assert after["counters"].get("evicted", 0) == evicted
    assert "corrupt" not in after["counters"]
    return found


def nvme(cache: kvtier.Cache) -> dict:
    return next(tier for tier in cache.status()["tiers"] if tier["tier"] == "nvme")


def nvme_serves(cache: kvtier.Cache) -> bool:
    with suppress(KeyError):
        return not nvme(cache)["fault"]
    return False


@contextmanager
def load(start: Callable[[], Engine]) -> Iterator[None]:
    """Engines that read, save and move, whatever happens to the host; what they load is right until they are ended."""
    engines = [start() for _ in range(ENGINES)]
    yield
    loaded = sum(engine.end()["loaded"] for engine in engines)
    assert loaded, "no load was on it"


@pytest.fixture
def roomy(cluster: Cluster) -> Cluster:
    cluster.config.write_text(cluster.config.read_text().replace('"128MiB"', f'"{NVME}"'))
    cluster.cli("up")
    return cluster


@pytest.mark.slow
def test_the_nvme_tiers_process_is_killed(roomy: Cluster, tmp_path: Path):
    chance, lock = random.Random(1), roomy.arena_dir / "hands" / "nvme.lock"
    sure = found = 0
    with kvtier.connect(roomy.socket) as cache, starting(roomy.socket, tmp_path) as start:
        on_shelf = shelves(cache)
        guard = Guard(cache, on_shelf)
        for _ in range(NVME_ROUNDS):
            with load(start):
                with guard.writing():
                    threading.Event().wait(chance.uniform(0.5, 2.5))
                    victim = int(lock.read_text())
                    os.kill(victim, signal.SIGKILL)
                within(PATIENCE, lambda: int(lock.read_text()) != victim and nvme_serves(cache))  # noqa: B023
                sure += guard.check()
            found += no_phantoms(cache, on_shelf, chance)
    assert sure > 20 * NVME_ROUNDS
    assert found > 100 * NVME_ROUNDS


@pytest.mark.slow
def test_every_process_of_the_host_is_killed(roomy: Cluster, tmp_path: Path):
    chance = random.Random(2)
    sure = found = 0
    with kvtier.connect(roomy.socket) as cache, starting(roomy.socket, tmp_path) as start:
        on_shelf = shelves(cache)
        guard = Guard(cache, on_shelf)
        for _ in range(HOST_ROUNDS):
            with load(start):
                with guard.writing():
                    threading.Event().wait(chance.uniform(1.0, 3.0))
                    kill_all(roomy)
                assert "cleaned up" in roomy.cli("up")
                within(PATIENCE, lambda: attached(cache) and nvme_serves(cache))
                sure += guard.check()
            found += no_phantoms(cache, on_shelf, chance)
    assert sure > 20 * HOST_ROUNDS
    assert found > 100 * HOST_ROUNDS


def kill_all(cluster: Cluster) -> None:
    """SIGKILL for actors, controller, Ray and Redis of a running kvtier."""
    known, redis = state.read(cluster.run_dir / "state.json"), redis_server.running(cluster.run_dir)
    assert known is not None
    assert redis is not None
    assert not process.end(lambda: [*process.marked(node.RUN_ENV, known.run), *_of(redis.pid)], 30.0)


def _of(pid: int) -> list[psutil.Process]:
    try:
        return [psutil.Process(pid)]
    except psutil.Error:
        return []


def attached(cache: kvtier.Cache) -> bool:
    try:
        cache.session.status()
    except SessionUnavailable:
        return False
    return True
