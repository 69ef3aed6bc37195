"""The GPU tier in a process of its own, engines in others: what they read in its memory is right or not read."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from kvtier.hierarchy.cache import Hierarchy
from kvtier.index.local import LocalIndex, LocalStore
from kvtier.memory.arena import Arena
from kvtier.tiers.base import TierNumber
from kvtier_services.actors.fence import arena_mark, fence, lock_path
from kvtier_services.actors.reconcile import reconcile
from kvtier_services.actors.remote import RemoteTier
from kvtier_services.gateway.control import writer_gone
from tests.device_child import CHAINS, SPEC, TOKENS, Worker, connected, kv_of, tokens_of
from tests.door_fixture import ROOT, door_in_thread, folders

GPU = TierNumber.GPU
PATIENCE = 60.0


def eventually(check: Callable[[], bool]) -> bool:
    """Poll until `check` holds; False when it does not in time."""
    deadline = time.monotonic() + PATIENCE
    while not check():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


class Child:
    """A process that runs `tests.device_child`."""

    def __init__(self, *args: object) -> None:
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "services")])}
        command = [sys.executable, "-m", "tests.device_child", *map(str, args)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.process = subprocess.Popen(command, env=environ, cwd=ROOT, text=True, **pipes)

    def says(self) -> dict:
        line = self.process.stdout.readline()
        assert line, f"the child ended with {self.process.wait(5.0)}"
        return json.loads(line)

    def ends(self) -> dict:
        """Stop an engine; what it says at its end."""
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self.says()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(10.0)
        for pipe in (self.process.stdin, self.process.stdout):
            pipe.close()


class Host:
    """A door in this process over a GPU tier in another."""

    def __init__(self, place: tuple[Path, Path]) -> None:
        self.socket, folder = place
        self.arena = Arena.own(folder, 8 << 20)
        self._worker_socket = self.socket.with_name("worker.sock")
        self.worker = self._start()
        cut_off = partial(fence, lock_path(folder, "gpu"))
        self.gpu = RemoteTier(
            "gpu", Worker(self._worker_socket), label="gpu(host)", arena=arena_mark(folder), fence=cut_off
        )
        assert self.gpu.connect(), self.gpu.fault
        store = LocalStore()
        index = LocalIndex(store, store.register("unit"))
        self.hierarchy = Hierarchy(self.arena, {GPU: self.gpu}, index, writer_gone=writer_gone(folder))

    def _start(self) -> Child:
        child = Child("worker", self._worker_socket, self.arena.folder)
        child.says()
        return child

    def restart_worker(self) -> None:
        """Kill it, and take the next one up, as the CPU tier's process does."""
        self.worker.kill()
        with pytest.raises(Exception, match="gpu"):
            self.gpu.contains([bytes(34)])
        self.worker = self._start()
        assert self.gpu.connect(), self.gpu.fault
        reconcile(self.hierarchy.state, GPU)

    def close(self) -> None:
        self.hierarchy.close()
        self.worker.kill()
        self.arena.close()


@pytest.fixture
def host() -> Iterator[Host]:
    with folders() as place:
        host = Host(place)
        with door_in_thread(host.hierarchy, host.socket) as door:
            host.door = door
            yield host
        host.close()


@contextmanager
def engine(host: Host, *args: object) -> Iterator[Child]:
    child = Child("engine", host.socket, *args)
    try:
        child.says()
        yield child
    finally:
        child.kill()


@contextmanager
def opened(host: Host):
    with connected(host.socket) as cache:
        yield cache.keyspace(SPEC, model="m", revision="1")


def promoted(space, chain: int) -> np.ndarray:
    kv = kv_of(chain)
    assert space.save(tokens_of(chain), kv).result(PATIENCE).refused == ""
    assert space.prefetch(tokens_of(chain), tier="gpu").result(PATIENCE) == 4
    return kv


def load(space, chain: int) -> tuple[int, dict[str, int], np.ndarray]:
    out = np.zeros_like(kv_of(chain))
    with space.match(tokens_of(chain)) as hit:
        return hit.load(out), hit.tiers, out


def test_a_full_hit_is_one_call_to_the_host_and_none_to_the_gpu_tier(host):
    with opened(host) as space:
        kv = promoted(space, 0)
        load(space, 0)
        host.arena.memory[:] = 0xA5
        before = dict(host.door.calls)
        for _ in range(5):
            count, tiers, out = load(space, 0)
            assert (count, tiers) == (TOKENS, {"gpu": TOKENS})
            assert np.array_equal(out, kv)
        made = {name: n - before.get(name, 0) for name, n in host.door.calls.items() if n > before.get(name, 0)}
        assert made == {"Match": 5}
        assert host.door.calls["Device"] == 1
        assert host.hierarchy.status()["hits"]["gpu"] == 20


def test_a_worker_that_was_killed_is_noticed_and_its_successor_attached(host):
    with opened(host) as space:
        kv = promoted(space, 0)
        load(space, 0)
        with space.match(tokens_of(0)) as held:
            assert held.tiers == {"gpu": TOKENS}
            host.restart_worker()
            assert held.load(np.zeros_like(kv)) == 0
        assert load(space, 0)[:2] == (TOKENS, {"cpu": TOKENS})
        assert space.prefetch(tokens_of(0), tier="gpu").result(PATIENCE) == 4
        count, tiers, out = load(space, 0)
        assert (count, tiers) == (TOKENS, {"gpu": TOKENS})
        assert np.array_equal(out, kv)
        assert host.door.calls["Device"] == 2


def test_while_the_worker_is_away_loads_are_out_of_the_arena(host):
    with opened(host) as space:
        kv = promoted(space, 0)
        load(space, 0)
        host.worker.process.send_signal(signal.SIGKILL)
        host.worker.process.wait(10.0)
        host.gpu.usage()
        count, tiers, out = load(space, 0)
        assert (count, tiers) == (TOKENS, {"cpu": TOKENS})
        assert np.array_equal(out, kv)


def test_an_engine_that_dies_holding_leases_there_holds_them_no_more(host):
    with opened(host) as space, engine(host, 1) as dying:
        assert eventually(lambda: host.hierarchy.status()["hits"].get("gpu", 0) > 0)
        dying.process.send_signal(signal.SIGKILL)
        dying.process.wait(10.0)
        assert eventually(lambda: host.hierarchy.status()["leases"] == 0)
        for chain in range(CHAINS):
            space.evict(tokens_of(chain))
        assert eventually(lambda: host.gpu.usage().used == 0)


def test_an_engine_that_cannot_open_it_is_served_out_of_the_arena(host):
    with engine(host, 1, "no-memory") as blind, engine(host, 2) as sees:
        assert eventually(lambda: host.hierarchy.status()["hits"].get("gpu", 0) > 20)
        said, other = blind.ends(), sees.ends()
    assert said["wrong"] == other["wrong"] == 0
    assert said["counters"] == {"device_refused": 1}
    assert "gpu" not in said["served"]
    assert said["served"]["cpu"] > 0
    assert "elsewhere is not here" in said["device"]
    assert other["device"] == "attached on cpu"
    assert other["served"]["gpu"] > 0
    assert host.hierarchy.status()["faults"]["device_refused"] == 1


@pytest.mark.slow
def test_evictions_and_killed_workers_under_load_never_give_wrong_bytes(host):
    """12 chains share room for 9 in the GPU tier while two engines load and save all of them."""
    with engine(host, 1) as one, engine(host, 2) as two, opened(host) as space:
        random = np.random.default_rng(0)
        for _ in range(3):
            until = time.monotonic() + 1.0
            while time.monotonic() < until:
                chain = int(random.integers(CHAINS))
                space.prefetch(tokens_of(chain), tier="gpu").result(PATIENCE)
                space.evict(tokens_of(int(random.integers(CHAINS))))
            host.restart_worker()
        before = host.hierarchy.status()["hits"]["gpu"]
        assert eventually(lambda: host.hierarchy.status()["hits"]["gpu"] > before + 20)
        ends = [one.ends(), two.ends()]
    for said in ends:
        assert said["wrong"] == 0
        assert said["served"]["gpu"] > 0
        assert said["rounds"] > 50
    assert eventually(lambda: host.hierarchy.status()["leases"] == 0)
