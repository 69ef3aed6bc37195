"""The fleet's index against a real Redis that is killed, stopped, emptied and restarted."""

from __future__ import annotations

import os
import signal
import socket
import time
from pathlib import Path

import psutil
import pytest
from redis import AuthenticationError, Redis

from kvtier.index.address import RedisAddress
from kvtier.index.base import Life, Replica
from kvtier.index.connect import connect
from kvtier.index.nodes import NODES, preferred_number, register
from kvtier.index.options import RedisIndexOptions
from kvtier.testing.index import ALICE, BOB, eventually, key, replica, shows, told
from kvtier_services import redis_server
from tests.redis_fixture import QUICK, make_redis_index, redis, server_in_temporary_folder, shared_redis  # noqa: F401

SHORT = RedisIndexOptions(lookup_timeout=0.02, update_timeout=0.2, heartbeat=0.05, pause=0.02, longest_pause=0.1)


@pytest.fixture
def own():
    """A server that the test may hurt, and its folder."""
    with server_in_temporary_folder() as (server, folder):
        yield server, folder


@pytest.fixture
def alice(own):
    index = connect(own[0].address, host="alice", options=SHORT)
    assert eventually(lambda: bool(index.status()["ok"]))
    yield index
    index.close()


def publish_one(index):
    index.publish([(key(1), 2, 10)])
    assert not index.needs_publish()
    return (Replica(index.node, index.incarnation, 2, 10),)


@pytest.fixture
def stopped(own):
    """Stops the server's process when called, and lets it go on at the end."""
    pid = own[0].pid
    yield lambda: os.kill(pid, signal.SIGSTOP)
    if psutil.pid_exists(pid):
        os.kill(pid, signal.SIGCONT)


def test_a_hung_redis_costs_a_lookup_its_timeout_and_then_nothing(own, alice, stopped):
    mine = publish_one(alice)
    assert eventually(lambda: alice.match([key(1)]) == [mine])
    stopped()
    for _ in range(SHORT.failures):
        start = time.monotonic()
        assert alice.match([key(1)] * 2048) is None
        assert time.monotonic() - start < 10 * SHORT.lookup_timeout  # 20 ms, on a machine that stalls
    opened, trips = alice.status()["breaker_opened"], alice.status()["round_trips"]
    assert opened == 1
    assert alice.status()["breaker_open"] is True
    for _ in range(1000):
        assert alice.match([key(1)]) is None
    assert alice.status()["round_trips"] == trips
    os.kill(own[0].pid, signal.SIGCONT)
    assert eventually(lambda: alice.match([key(1)]) == [mine])
    assert eventually(lambda: bool(alice.status()["ok"]))
    assert alice.status()["breaker_open"] is False
    assert not alice.needs_publish()


@pytest.mark.slow
def test_a_redis_that_hangs_for_half_a_minute_costs_next_to_nothing(own, stopped):
    """With the paces that hosts have."""
    server, _ = own
    index = connect(server.address, host="alice")
    held = [(key(number), 2, 10) for number in range(2048)]
    keys = [key for key, _, _ in held]
    try:
        index.publish(held)
        assert eventually(lambda: index.match(keys) is not None)
        stopped()
        waits, began = [], time.monotonic()
        while time.monotonic() < began + 30:
            before = time.monotonic()
            assert index.match(keys) is None
            waits.append(time.monotonic() - before)
            index.add([key(len(waits) % 100_000)], 2, [10])
            time.sleep(0.001)
        os.kill(server.pid, signal.SIGCONT)
        waited = [wait for wait in waits if wait > 0.005]
        assert max(waits) < 0.2, waited  # 20 ms, on a machine that stalls
        assert sum(waited) < 1.0, waited  # the breaker's few failures, and no more
        assert index.status()["queued"] <= 65_536
        back = time.monotonic()
        assert eventually(lambda: bool(index.status()["ok"]) and index.match(keys) is not None)
        assert eventually(lambda: index.flush(0.1) or index.needs_publish())
        assert time.monotonic() - back < 7  # the longest pause is 5 s
    finally:
        index.close()


def test_updates_told_while_redis_hangs_arrive_afterwards(own, alice, stopped):
    publish_one(alice)
    stopped()
    alice.add([key(2)], 2, [20])
    alice.discard([key(1)])
    assert not alice.flush(0.1)
    os.kill(own[0].pid, signal.SIGCONT)
    assert eventually(lambda: alice.flush(0.1))
    assert shows(alice, 1, [])
    assert shows(alice, 2, [Replica(alice.node, alice.incarnation, 2, 20)])


def test_a_killed_redis_is_a_miss_and_its_empty_successor_asks_for_publication(own, alice):
    server, folder = own
    mine = publish_one(alice)
    os.kill(server.pid, signal.SIGKILL)
    psutil.Process(server.pid).wait(5)
    assert alice.match([key(1)]) is None
    assert eventually(lambda: not alice.status()["ok"])
    again = redis_server.start(folder)
    assert again.url == server.url
    assert eventually(alice.needs_publish)
    assert publish_one(alice) == mine
    assert eventually(lambda: alice.match([key(1)]) == [mine])
    assert eventually(lambda: bool(alice.status()["ok"]))


def test_a_flush_asks_for_publication(redis, make_redis_index):  # noqa: F811
    alice = make_redis_index(ALICE)
    publish_one(alice)
    redis.flushall()
    assert eventually(alice.needs_publish)
    publish_one(alice)
    assert shows(alice, 1, [replica(ALICE, 2, 10)])


def test_a_failover_to_a_replica_that_lags_asks_for_publication(redis, make_redis_index):  # noqa: F811
    alice = make_redis_index(ALICE, run=False)
    publish_one(alice)
    past = redis.hget(NODES, ALICE.node)
    alice.add([key(2)], 2, [20])
    told(alice)
    assert not alice.needs_publish()
    redis.hset(NODES, ALICE.node, past)
    alice.add([key(3)], 2, [30])
    told(alice)
    assert alice.needs_publish()


def test_scripts_survive_that_redis_forgot_them(redis, make_redis_index):  # noqa: F811
    alice = make_redis_index(ALICE)
    publish_one(alice)
    redis.script_flush()
    alice.add([key(2)], 2, [20])
    told(alice)
    assert shows(alice, 2, [replica(ALICE, 2, 20)])
    assert not alice.needs_publish()


def test_a_batch_drops_dead_replicas_next_to_its_own(redis, make_redis_index):  # noqa: F811
    alice, bob = make_redis_index(ALICE, run=False), make_redis_index(BOB, run=False)
    bob.add([key(1)], 2, [1])
    told(bob)
    rebob = make_redis_index(Life(BOB.node, BOB.incarnation + 1, "bob"), run=False)
    told(rebob)
    assert len(redis.get(key(1))) == 12
    alice.add([key(1)], 2, [1])
    told(alice)
    assert len(redis.get(key(1))) == 12
    assert alice.match([key(1)]) == [(replica(ALICE, 2, 1),)]
    alice.discard([key(1)])
    told(alice)
    assert not redis.exists(key(1))


def test_registering_gives_a_host_its_number_and_a_new_incarnation(redis):  # noqa: F811
    first, second = register(redis, "alice", ""), register(redis, "alice", "a:1")
    assert first.node == second.node == preferred_number("alice")
    assert second.incarnation == first.incarnation + 1
    assert abs(first.incarnation - time.time()) < 60
    redis.hset(NODES, preferred_number("bob"), b'{"host":"other","incarnation":1,"door":"","at":0,"told":0}')
    assert register(redis, "bob", "").node == preferred_number("bob") % 65_535 + 1
    assert register(redis, "bob", "").node == preferred_number("bob") % 65_535 + 1


def test_an_index_starts_without_redis_and_works_when_it_comes(own, tmp_path):
    server, folder = own
    password = tmp_path / "password"
    password.write_text("not known yet")
    redis_server.stop(folder)
    index = connect(RedisAddress(server.url, str(password)), host="alice", options=SHORT)
    try:
        index.add([key(1)], 2, [10])
        assert index.match([key(1)]) is None
        assert index.node == preferred_number("alice")
        password.write_text(Path(redis_server.start(folder).password_file).read_text())
        assert shows(index, 1, [Replica(index.node, index.incarnation, 2, 10)])
        assert eventually(lambda: bool(index.status()["ok"]))
    finally:
        index.close()


def test_a_provisional_life_that_is_refused_registers(redis, make_redis_index):  # noqa: F811
    redis.hset(NODES, ALICE.node, b'{"host":"other","incarnation":1,"door":"","at":0,"told":0}')
    index = make_redis_index(Life(ALICE.node, 5, "alice", provisional=True))
    assert eventually(lambda: index.node == preferred_number("alice"))
    mine = publish_one(index)
    assert eventually(lambda: index.match([key(1)]) == [mine])


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_block_costs_at_most_160_bytes(redis, make_redis_index, replicas):  # noqa: F811
    for life in (ALICE, BOB)[:replicas]:
        index = make_redis_index(life)
        index.add([key(1)], 2, [1 << 20])
        told(index)
    assert redis.object("encoding", key(1)) == b"embstr"
    hash_table = 16  # a bucket is 8 bytes, and the table is at worst twice too large
    assert redis.memory_usage(key(1)) + hash_table <= 160
    assert redis.ttl(key(1)) == -1


def test_a_lookup_is_one_command_of_redis(redis, make_redis_index):  # noqa: F811
    index = make_redis_index(ALICE, run=False)
    index.add([key(number) for number in range(2048)], 2, [10] * 2048)
    told(index)
    before = {name: calls["calls"] for name, calls in redis.info("commandstats").items()}
    assert all(index.match([key(number) for number in range(2048)]))
    after = {name: calls["calls"] for name, calls in redis.info("commandstats").items()}
    changed = {name: after[name] - before.get(name, 0) for name in after if after[name] != before.get(name, 0)}
    changed.pop("cmdstat_info")
    changed.pop("cmdstat_auth", None)  # the connection's first use
    changed.pop("cmdstat_client", None)
    assert changed == {"cmdstat_mget": 1}


def test_a_password_is_required_and_only_the_socket_listens(shared_redis):  # noqa: F811
    client = Redis.from_url(shared_redis.url)
    with pytest.raises(AuthenticationError):
        client.ping()
    client.close()
    kinds = {connection.family for connection in psutil.Process(shared_redis.pid).net_connections("all")}
    assert kinds == {socket.AF_UNIX}


def test_a_host_that_leaves_is_dead_at_once_and_its_next_life_is_another(own):
    server, _ = own
    alice, bob = (connect(server.address, host=name, options=SHORT) for name in ("alice", "bob"))
    publish_one(alice)
    assert eventually(lambda: bob.match([key(1)]) and bob.others())
    alice.forget(alice.node)
    time.sleep(3 * SHORT.heartbeat)
    assert bob.others(), "it goes when it is closed"
    first = alice.incarnation
    alice.close()
    assert eventually(lambda: not bob.others())
    assert bob.match([key(1)]) == [()]
    again = connect(server.address, host="alice", options=SHORT)
    assert eventually(lambda: bool(again.status()["ok"]))
    assert again.node == alice.node
    assert again.incarnation > first
    assert bob.match([key(1)]) == [()]
    for index in (again, bob):
        index.close()


def test_connections_are_made_anew_as_often_as_they_break(redis, make_redis_index):  # noqa: F811
    index = make_redis_index(ALICE)
    mine = publish_one(index)
    for _ in range(150):
        redis.client_kill_filter(_type="normal", skipme=True)
        assert eventually(lambda: index.match([key(1)]) == [(mine[0],)])
    assert eventually(lambda: bool(index.status()["ok"]))
