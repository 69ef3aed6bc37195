"""The door across processes: what becomes of a session when one side dies, stops or comes back."""

from __future__ import annotations

import os
import signal
import socket as sockets
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import grpc
import numpy as np
import pytest

from kvtier.block import slot_nbytes
from kvtier.client import attachment
from kvtier.client.door import DoorSession, ask_status
from kvtier.errors import (
    ClosedError,
    ConfigError,
    DeadlineExceeded,
    ProtocolMismatch,
    SessionError,
    SessionUnavailable,
    UsageError,
)
from kvtier.hierarchy.answers import GrantState
from kvtier.memory.arena import Arena
from kvtier.rpc import kvtier_pb2 as pb
from kvtier.rpc.channel import open_channel
from kvtier.rpc.kvtier_pb2_grpc import DoorStub
from kvtier.rpc.protocol import PROTOCOL
from kvtier.testing.payloads import payload_of
from kvtier.testing.session import (
    CAPACITY,
    FULL,
    NBYTES,
    chain,
    eventually,
    fill,
    found,
    holds,
    host_over,
    reserve,
    save,
    states,
)
from kvtier_services.gateway.control import Door, writer_gone
from tests.door_fixture import ROOT, Child, Loop, door_in_thread, folders

SLOT_NBYTES = slot_nbytes(NBYTES)


@pytest.fixture
def place():
    with folders() as place:
        yield place


@pytest.fixture
def spawn():
    """Starts processes, and kills those that are left."""
    children = []

    def spawn(kind, *args):
        children.append(Child(kind, *map(str, args)))
        return children[-1]

    yield spawn
    for child in children:
        child.kill()


@pytest.fixture
def host_child(place, spawn):
    child = spawn("host", *place)
    child.says()
    return child


@pytest.fixture
def connect(place):
    opened = []

    def connect(**options):
        opened.append(DoorSession(place[0], **options))
        return opened[-1]

    yield connect
    for session in opened:
        session.close()


def cpu(place):
    """Status of the CPU tier."""
    return ask_status(place[0])["tiers"][0]


def nothing_leaked(place):
    usage = cpu(place)
    return usage["counters"]["quarantined"] == 0 and usage["used"] == usage["blocks"] * SLOT_NBYTES


def found_again(session, first, count):
    """As `found`, once the host is back."""

    def answers():
        try:
            return found(session, first, count) >= 0
        except SessionError:
            return False

    assert eventually(answers)
    return found(session, first, count)


class TestOneHost:
    """The host is a thread of this process."""

    @pytest.fixture
    def host(self, place):
        arena = Arena.own(place[1], 32 << 20)
        with host_over(arena, writer_gone(place[1])) as host:
            yield host
        arena.close()

    @pytest.fixture
    def door(self, host, place):
        with door_in_thread(host.hierarchy, place[0]) as door:
            yield door

    def test_a_full_hit_is_one_call_of_small_messages(self, door, host, connect):
        session = connect()
        save(session, 0, 32)
        door.calls.clear()
        index = host.hierarchy.state.index.status()
        moves = dict(host.hierarchy.state.stats.moves)
        assert found(session, 0, 32) == 32  # 2,048 tokens in blocks of 64
        assert eventually(lambda: session._line._at.sent == door.tally.notes["release"])
        assert dict(door.calls) == {"Match": 1}
        assert host.hierarchy.state.index.status() == index
        assert dict(host.hierarchy.state.stats.moves) == moves

    def test_no_message_of_a_hit_or_a_save_carries_blocks(self, door, connect):
        session = connect()
        count = 1000
        keys = chain(0, count)
        for first in range(0, count, 250):
            reserved = session.reserve(keys[: first + 250], [4096] * 250, first)
            memory = session.writable()
            for i, offset in enumerate(reserved.grants["offset"].tolist()):
                memory[offset : offset + 4096] = np.frombuffer(payload_of(first + i, 4096), np.uint8)
            assert all(session.commit(reserved.ticket, range(250)))
        assert found(session, 0, count) == count
        limit = (64 << 10) + 64 * count
        assert set(door.tally.request_nbytes) >= {"Match", "Reserve", "Commit"}
        assert max(door.tally.request_nbytes.values()) <= limit
        assert max(door.tally.reply_nbytes.values()) <= limit

    def test_the_socket_is_its_owners(self, door, place):
        assert place[0].stat().st_mode & 0o777 == 0o600

    def test_a_second_door_does_not_take_the_socket_over(self, door, host, place):
        loop = Loop()
        with pytest.raises(ConfigError, match="another process listens"):
            loop.run(Door(host.hierarchy, place[0]).start())
        loop.close()

    def test_what_a_dead_door_left_is_replaced_and_other_files_are_not(self, host, place):
        with sockets.socket(sockets.AF_UNIX) as stale:
            stale.bind(str(place[0]))
        with door_in_thread(host.hierarchy, place[0]):
            assert ask_status(place[0])["node"] == "kit"
        place[0].write_text("mine")
        loop = Loop()
        with pytest.raises(ConfigError, match="not a socket"):
            loop.run(Door(host.hierarchy, place[0]).start())
        loop.close()
        assert place[0].read_text() == "mine"

    def test_versions_that_do_not_match_say_so(self, door, connect, monkeypatch):
        monkeypatch.setattr(attachment, "PROTOCOL", 99)
        with pytest.raises(ProtocolMismatch, match=f"client speaks protocol 99, this host {PROTOCOL}"):
            connect()

    def test_the_host_refuses_sessions_without_a_lock(self, door, host, place):
        with open_channel(place[0]) as channel:
            notes = [pb.ClientNote(hello=pb.Hello(protocol=1)), pb.ClientNote(join=pb.Join(session=7))]
            with pytest.raises(grpc.RpcError) as caught:
                list(DoorStub(channel).Attach(iter(notes)))
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert host.hierarchy.state.ledger.sessions == {}

    def test_messages_that_make_no_sense_are_refused(self, door, connect, place):
        session = connect()
        number = session._line._at.session
        with open_channel(place[0]) as channel:
            stub = DoorStub(channel)
            for call, request, code in (
                (stub.Match, pb.MatchRequest(session=number, keys=b"short"), "FAILED_PRECONDITION"),
                (stub.Match, pb.MatchRequest(session=1), "ABORTED"),
                (stub.Move, pb.MoveRequest(session=number, tier=9), "INVALID_ARGUMENT"),
                (stub.Reserve, pb.ReserveRequest(session=number, nbytes=b"1234"), "INVALID_ARGUMENT"),
            ):
                with pytest.raises(grpc.RpcError) as caught:
                    call(request, timeout=5.0)
                assert caught.value.code().name == code
        assert session.status()["sessions"] == 1

    def test_a_call_that_nobody_waits_for_any_more_keeps_no_lease(self, door, host, connect):
        session = connect(call_timeout=0.3)
        save(session, 0, 2)
        door._calls._hierarchy = slow = _Slow(host.hierarchy)
        with pytest.raises(DeadlineExceeded):
            session.match(chain(0, 2), 0.0)
        slow.hierarchy_again.set()
        door._calls._hierarchy = host.hierarchy
        assert eventually(lambda: slow.looked and not host.hierarchy.state.ledger.leases)

    def test_a_session_comes_back_after_the_door_was_closed(self, host, place, connect):
        with door_in_thread(host.hierarchy, place[0]):
            session = connect()
            save(session, 0, 3)
            epoch, readable = session.epoch, session.readable()
        with pytest.raises(SessionUnavailable, match="is kvtier running"):
            found(session, 0, 3)
        began = time.monotonic()
        with pytest.raises(SessionUnavailable):
            found(session, 0, 3)
        assert time.monotonic() - began < 0.05
        with door_in_thread(host.hierarchy, place[0]):
            assert found_again(session, 0, 3) == 3
            assert session.epoch != epoch
            assert session.readable() is readable

    def test_a_reservation_outlives_its_stream_until_its_writer_has_left(self, host, place, connect):
        quarantined = host.hierarchy.state.cpu.quarantined
        with door_in_thread(host.hierarchy, place[0]):
            session = connect()
            writing = session.writing()
            writing.__enter__()
            reserved = reserve(session, 0, 2)
        assert eventually(lambda: sum(map(len, quarantined.values())) == 2)
        with door_in_thread(host.hierarchy, place[0]):
            assert found_again(session, 0, 2) == 0
            fill(session, reserved, 0)
            assert sum(map(len, quarantined.values())) == 2
            assert session.commit(reserved.ticket, [0, 1]) == [False, False]
            writing.__exit__(None, None, None)
            assert eventually(lambda: not quarantined)
        assert host.hierarchy.state.cpu.pool.used == 0

    def test_a_closed_session_says_so(self, door, connect):
        session = connect()
        session.close()
        session.release(1)
        session.condemn(chain(0, 1), "test")
        with pytest.raises(ClosedError):
            session.match(chain(0, 1), 0.0)

    def test_lock_files_do_not_stay(self, door, place, connect):
        session = connect()
        assert len(list((place[1] / "clients").iterdir())) == 1
        session.close()
        assert list((place[1] / "clients").iterdir()) == []


class _Slow:
    """A hierarchy whose `look` takes until it is told to go on."""

    def __init__(self, hierarchy):
        self._hierarchy = hierarchy
        self.looked = False
        self.hierarchy_again = threading.Event()

    def look(self, *args):
        self.hierarchy_again.wait(5.0)
        self.looked = True
        return self._hierarchy.look(*args)

    def __getattr__(self, name):
        return getattr(self._hierarchy, name)


def test_nobody_there_is_said_at_once(place):
    began = time.monotonic()
    with pytest.raises(SessionUnavailable, match=r"nobody answers at .*door.sock; is kvtier running"):
        DoorSession(place[0])
    with pytest.raises(SessionUnavailable, match="is kvtier running"):
        ask_status(place[0])
    assert time.monotonic() - began < 1.0


def test_a_host_that_hangs_costs_one_deadline_now_and_then(place, host_child, connect):
    session = connect(call_timeout=0.2)
    host_child.signal(signal.SIGSTOP)
    with pytest.raises(DeadlineExceeded):
        found(session, 0, 1)
    began = time.monotonic()
    with pytest.raises(DeadlineExceeded):
        found(session, 0, 1)
    assert time.monotonic() - began < 0.05
    host_child.signal(signal.SIGCONT)
    assert found_again(session, 0, 1) == 0


def test_a_killed_engine_gives_everything_back(place, host_child, spawn, connect):
    session = connect()
    save(session, 0, 3)
    engine = spawn("engine", place[0], 10)
    assert engine.says()["leased"] == 3
    assert session.status()["leases"] == 1
    assert states(reserve(session, 10, 4)) == [GrantState.BUSY] * 4
    engine.kill()
    assert eventually(lambda: session.status()["leases"] == 0)
    began = time.monotonic()
    assert eventually(lambda: nothing_leaked(place))
    assert time.monotonic() - began < 1.0
    assert states(reserve(session, 10, 4)) == [GrantState.GRANTED] * 4
    assert eventually(lambda: len(list((place[1] / "clients").iterdir())) == 1)


def test_slots_of_an_engine_that_was_cut_off_stay_quarantined_until_it_dies(place, spawn):
    host = spawn("host", *place)
    epoch = host.says()["epoch"]
    engine = spawn("engine", place[0], 10)
    engine.says()
    engine.signal(signal.SIGSTOP)
    host.kill()
    assert spawn("host", *place).says()["epoch"] != epoch
    for _ in range(3):  # several rounds of the keeper's tick
        time.sleep(0.1)
        assert cpu(place)["counters"]["quarantined"] > 0
        assert cpu(place)["used"] >= 4 * SLOT_NBYTES
    engine.kill()
    assert eventually(lambda: cpu(place)["used"] == 0)


def test_a_killed_host_comes_back_without_leaks(place, spawn, connect):
    host = spawn("host", *place)
    host.says()
    session = connect()
    save(session, 0, 3)
    epoch, old = session.epoch, session.match(chain(0, 3), 0.0)
    with session.writing():
        held = reserve(session, 10, 4)
        host.kill()
        with pytest.raises(SessionUnavailable):
            found(session, 0, 3)
        host = spawn("host", *place)
        host.says()
        assert found_again(session, 0, 3) == 0
        assert session.epoch != epoch
        assert not holds(session, old, 0)
        assert cpu(place)["counters"]["quarantined"] > 0
        fill(session, held, 10)
        assert session.commit(held.ticket, [0, 1, 2, 3]) == [False] * 4
    session.release(old.lease)
    assert eventually(lambda: cpu(place)["used"] == 0)
    half = CAPACITY // 2 // SLOT_NBYTES - 1
    assert save(session, 100, half) == half
    assert found(session, 100, half) == half
    assert nothing_leaked(place)


def test_a_new_arena_is_mapped_after_the_last_writer_of_the_old_one_has_left(place, spawn, connect):
    host = spawn("host", *place)
    host.says()
    session = connect()
    with session.writing():
        held = reserve(session, 0, 2)
        old = session.writable()
        host.kill()
        spawn("host", *place, 2 * CAPACITY).says()

        def refused():
            with pytest.raises(SessionUnavailable) as caught:
                found(session, 0, 2)
            return "saves into the old one must end first" in str(caught.value)

        assert eventually(refused)
        assert session.writable() is old
        fill(session, held, 0)
        assert session.commit(held.ticket, [0, 1]) == [False, False]
    assert found_again(session, 0, 2) == 0
    assert session.readable().nbytes == 2 * CAPACITY
    assert save(session, 0, FULL // 2) == FULL // 2


def test_threads_that_lose_the_host_all_find_it_again(place, spawn, connect):
    host = spawn("host", *place)
    host.says()
    session = connect()
    save(session, 0, 2)
    done = threading.Event()

    def work(number):
        while not done.is_set():
            try:
                matched = session.match(chain(0, 2), 0.0)
                session.release(matched.lease)
                save(session, 1000 * (number + 1), 2)
            except SessionError:
                continue

    with ThreadPoolExecutor(8) as threads:
        working = [threads.submit(work, number) for number in range(8)]
        try:
            host.kill()
            spawn("host", *place).says()
            assert found_again(session, 1_000_000, 1) == 0
        finally:
            done.set()
    assert [each.result() for each in working] == [None] * 8
    assert session.status()["sessions"] == 1
    assert eventually(lambda: session.status()["leases"] == 0)
    assert eventually(lambda: nothing_leaked(place))


FORK = """
import os, sys
from pathlib import Path
from kvtier.client.presence import Presence
from kvtier.memory.lock import is_free
folder = Path(sys.argv[1])
presence = Presence(folder)
path = folder / "clients" / f"{presence.session}.lock"
(come, go), (begun, begin) = os.pipe(), os.pipe()
if os.fork() == 0:
    os.write(begin, b"!")
    os.close(go)
    os.read(come, 1)
    os._exit(0)
os.read(begun, 1)
assert not is_free(path)
presence.forget()  # as the kernel does when the parent dies
assert is_free(path)
"""


def test_a_forked_child_does_not_keep_its_parents_lock(place):
    Arena.own(place[1], 1 << 20).close()
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", FORK, str(place[1])], check=True, env=environ, timeout=20.0)


def test_a_forked_child_is_told_to_open_its_own(place, host_child, connect):
    session = connect()
    session._line._pid -= 1  # forking a process in which gRPC runs would not be kind to pytest
    with pytest.raises(UsageError, match="fork"):
        session.match(chain(0, 1), 0.0)
    session.release(1)
    session._line._pid += 1
