"""Where a prompt is, of hosts that share a real Redis: through one's door, whatever becomes of Redis."""

from __future__ import annotations

import os
import signal
import time
from contextlib import ExitStack, contextmanager

import pytest

from kvtier.client.door import DoorSession, ask_where
from kvtier.hierarchy.cache import Hierarchy
from kvtier.index.connect import connect
from kvtier.index.options import RedisIndexOptions
from kvtier.memory.arena import Arena
from kvtier.testing.session import CAPACITY, chain, eventually, save
from tests.door_fixture import door_in_thread, folders
from tests.redis_fixture import server_in_temporary_folder

OPTIONS = RedisIndexOptions(lookup_timeout=0.25, heartbeat=0.05, pause=0.02, longest_pause=0.1)


class House:
    """One host with its door."""

    def __init__(self, hierarchy: Hierarchy, session: DoorSession, socket) -> None:
        self.hierarchy, self.session, self.socket = hierarchy, session, socket

    def where(self, first: int, count: int) -> dict[str, int]:
        return {place.host: place.blocks for place in self.session.where(chain(first, count)).places}


@contextmanager
def house(name: str, server):
    with ExitStack() as stack:
        socket, folder = stack.enter_context(folders())
        arena = Arena.own(folder, CAPACITY)
        stack.callback(arena.close)
        hierarchy = Hierarchy(arena, {}, connect(server.address, host=name, options=OPTIONS))
        stack.callback(hierarchy.close)
        stack.enter_context(door_in_thread(hierarchy, socket))
        session = DoorSession(socket, call_timeout=5.0)
        stack.callback(session.close)
        yield House(hierarchy, session, socket)


@pytest.fixture
def fleet():
    with (
        server_in_temporary_folder() as (server, _),
        house("one", server) as one,
        house("two", server) as two,
    ):
        save(one.session, 0, 2)
        save(two.session, 0, 5)
        assert eventually(lambda: one.where(0, 8) == {"two": 5, "one": 2})
        yield one, two, server


def test_every_host_says_the_same_the_longest_first(fleet):
    one, two, _ = fleet
    assert list(one.where(0, 8)) == ["two", "one"]
    assert eventually(lambda: two.where(0, 8) == {"two": 5, "one": 2})
    (first, _) = ask_where(one.socket, chain(0, 8)).places
    assert (first.host, first.here, first.tiers) == ("two", False, {"cpu": 5})
    assert one.where(50, 2) == {}


def test_what_is_evicted_is_said_no_more(fleet):
    one, two, _ = fleet
    two.session.evict(chain(3, 2))
    assert eventually(lambda: one.where(0, 8) == {"two": 3, "one": 2})


def test_a_redis_that_hangs_costs_its_time_out_once_and_the_other_hosts(fleet):
    one, _, server = fleet
    os.kill(server.pid, signal.SIGSTOP)
    try:
        began = time.monotonic()
        placement = one.session.where(chain(0, 8))
        assert time.monotonic() - began < 2.0
        assert (placement.complete, [place.host for place in placement.places]) == (False, ["one"])
        assert eventually(lambda: _fast(one))
    finally:
        os.kill(server.pid, signal.SIGCONT)
    assert eventually(lambda: one.where(0, 8) == {"two": 5, "one": 2})


def _fast(one: House) -> bool:
    """While the breaker is open nobody waits."""
    began = time.monotonic()
    return not one.session.where(chain(0, 8)).complete and time.monotonic() - began < OPTIONS.lookup_timeout / 2
