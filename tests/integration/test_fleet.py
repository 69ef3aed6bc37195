"""Two hosts in two processes, with real sockets and a real Redis: what one computed is a hit on the other."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from kvtier.client.local import LocalSession
from kvtier.testing.index import eventually
from kvtier.testing.payloads import key_of
from tests.door_fixture import ROOT, stop
from tests.fleet_host import FleetHost
from tests.redis_fixture import redis, shared_redis  # noqa: F401

NBYTES, COUNT = 256 << 10, 40


class Far:
    """A host in a process of its own."""

    def __init__(self, server, name: str, blocks: int, nbytes: int) -> None:
        command = [sys.executable, "-m", "tests.fleet_host", name, server.address.url, server.address.password_file]
        self.process = subprocess.Popen(
            [*command, str(blocks), str(nbytes)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
        )
        self.door = self.process.stdout.readline().strip()

    def tell(self, command: str):
        """Tell it something; what it answers."""
        self.process.stdin.write(f"{command}\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def kill(self) -> None:
        self.process.send_signal(signal.SIGCONT)
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()


@pytest.fixture
def fleet(redis, shared_redis, monkeypatch) -> Iterator:  # noqa: F811
    """Makes host b here and other hosts far away."""
    monkeypatch.setenv("KVTIER_HOST", "b")
    made: list[Far] = []
    near: list[FleetHost] = []

    def far(name: str, blocks: int = COUNT + 8, nbytes: int = NBYTES) -> Far:
        made.append(Far(shared_redis, name, blocks, nbytes))
        return made[-1]

    def here(blocks: int = COUNT + 8, nbytes: int = NBYTES) -> FleetHost:
        near.append(FleetHost(shared_redis.address.url, shared_redis.address.password_file, blocks, nbytes))
        return near[-1]

    yield here, far
    for host in near:
        host.close()
    for host in made:
        host.kill()


def meets(host: FleetHost) -> bool:
    """Whether a host knows that it is not alone."""
    return eventually(host.hierarchy.state.index.others)


def comes(host: FleetHost, seeds: range) -> bool:
    """Whether a chain is a hit in the end; on a busy machine a lookup may be late, which is a miss."""
    return eventually(lambda: host.load(seeds, 10.0) == len(seeds))


def test_what_one_host_saved_is_a_hit_on_the_other(fleet):
    here, far = fleet
    a, b = far("a"), here()
    assert a.tell(f"save 0 {COUNT}") == COUNT
    assert meets(b)
    assert comes(b, range(COUNT))
    assert b.status()["hits"]["peer"] == COUNT
    assert b.load(range(COUNT), 0.0) == COUNT
    assert b.status()["hits"]["cpu"] >= COUNT
    (peer,) = b.status()["peers"]["hosts"]
    assert (peer["host"], peer["blocks"], peer["fault"]) == ("a", COUNT, "")
    lent = a.tell("status")
    assert lent["lent"] == COUNT
    assert (lent["leases"], lent["held"]) == (0, [])
    assert lent["lending"]["served"]["blocks"] == COUNT


def test_a_host_that_is_killed_while_it_gives_is_a_miss(fleet):
    """What came whole is a hit with the right bytes; the rest is a miss, in time, and no slot is lost."""
    here, far = fleet
    count, nbytes = 160, 1 << 20
    a, b = far("a", count + 8, nbytes), here(count + 8, nbytes)
    count = a.tell(f"save 0 {count}")
    assert meets(b)
    began, found = time.monotonic(), []
    thread = threading.Thread(target=lambda: found.append(b.load(range(count), 20.0)))
    thread.start()
    stats = b.hierarchy.state.stats
    assert eventually(lambda: stats.moves["peer", "cpu"] > 0 or not thread.is_alive())
    os.kill(a.process.pid, signal.SIGKILL)
    thread.join()
    assert time.monotonic() - began < 20.0
    assert found[0] <= count
    b.hierarchy.mover.stager.drain()
    state = b.hierarchy.state
    assert state.cpu.pool.used == sum(map(state.cpu.pool.size_class, state.at))


def test_a_host_that_hangs_holds_nobody_up(fleet):
    here, far = fleet
    a, b = far("a"), here()
    assert a.tell(f"save 0 {COUNT}") == COUNT
    assert meets(b)
    stop(a.process)
    began = time.monotonic()
    assert b.load(range(COUNT), 0.5) == 0
    assert time.monotonic() - began < 5.0
    assert b.save(range(100, 105)) == 5, "b works"
    assert b.load(range(100, 105), 0.0) == 5


def test_local_hits_wait_for_neither_redis_nor_another_host(fleet, shared_redis):  # noqa: F811
    """Both hang, and others ask for what only they could give."""
    here, far = fleet
    a, b = far("a", 400), here(400)
    assert a.tell("save 1000 300") == 300
    assert meets(b)
    assert b.save(range(COUNT)) == COUNT
    elsewhere, unheard, over = iter(range(1000, 1300, 4)), iter(range(10_000, 10**6, 4)), threading.Event()

    def ask() -> None:
        session = LocalSession(b.hierarchy)
        while not over.is_set():
            for first in (next(elsewhere, 0), next(unheard)):
                session.release(session.match([key_of(seed) for seed in range(first, first + 4)], 0.2).lease)
        session.close()

    def typical() -> float:
        """Seconds of a local hit, whether or not it may wait for more; none waits as long as a host is waited for."""
        taken, mine = [], [key_of(seed) for seed in range(COUNT)]
        for number in range(200):
            began = time.monotonic()
            matched = b.session.match(mine, 5.0 * (number % 2))
            taken.append(time.monotonic() - began)
            assert len(matched.slots) == COUNT
            b.session.release(matched.lease)
            time.sleep(0.002)
        assert max(taken) < 0.5
        return sorted(taken)[len(taken) // 2]

    well = typical()
    stop(a.process)
    others = [threading.Thread(target=ask) for _ in range(4)]
    for thread in others:
        thread.start()
    try:
        assert typical() < 5 * well + 0.005
        assert eventually(lambda: b.hierarchy.state.stats.faults["peer_lost"] > 0), "nobody has asked it"
        os.kill(shared_redis.pid, signal.SIGSTOP)
        assert typical() < 5 * well + 0.005
        assert b.hierarchy.state.stats.misses["index_unavailable"] > 0, "nobody has asked it"
    finally:
        over.set()
        os.kill(shared_redis.pid, signal.SIGCONT)
        for thread in others:
            thread.join()


def test_a_host_that_began_anew_has_nothing_of_its_life_before(fleet):
    here, far = fleet
    a, b = far("a"), here()
    assert a.tell(f"save 0 {COUNT}") == COUNT
    assert meets(b)
    a.kill()
    far("a").tell("save 1000 3")
    assert eventually(lambda: b.hierarchy.state.index.match([b"x" * 34]) == [()])
    assert b.load(range(COUNT), 5.0) == 0
    assert comes(b, range(1000, 1003))


def test_a_host_that_goes_hands_its_blocks_over(fleet):
    here, far = fleet
    a, b = far("a"), here(blocks=16 * COUNT)
    assert a.tell(f"save 0 {COUNT}") == COUNT
    assert meets(b)
    handed = a.tell("drain 20")
    assert handed == {"offered": COUNT, "taken": COUNT, "handed": COUNT}, b.status()["faults"]
    assert a.tell("save 500 2") == 0
    a.kill()
    assert b.load(range(COUNT), 0.0) == COUNT
