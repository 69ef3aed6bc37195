"""The index on Sentinels and Clusters, of real servers that are killed, stopped, emptied and failed over."""

from __future__ import annotations

import signal
import time
from dataclasses import replace

import pytest
from redis import RedisError

from kvtier.index.address import RedisAddress
from kvtier.index.base import Replica
from kvtier.index.connect import connect, parts, reach
from kvtier.index.options import RedisIndexOptions
from kvtier.index.redis import RedisIndex
from kvtier.testing.index import IndexKit, eventually, key, shows, told
from tests.redis_servers import fleet

pytestmark = pytest.mark.slow

SHORT = RedisIndexOptions(lookup_timeout=0.1, update_timeout=0.5, heartbeat=0.1, pause=0.05, longest_pause=0.2)
MANY = [(key(number), 2, 10) for number in range(3000)]


@pytest.fixture
def servers():
    with fleet() as servers:
        yield servers


@pytest.fixture(scope="module")
def shared_cluster():
    with fleet() as servers:
        yield servers.cluster(3)


def url_of(servers, kind="cluster", path=""):
    return f"redis+{kind}://" + ",".join(server.where for server in servers) + path


def publish(index, held=MANY):
    index.publish(held)
    assert not index.needs_publish()
    return index


def found(index, held=MANY):
    """How many of the blocks are found here, with their tiers and sizes; -1 when there is no answer."""
    answer = index.match([key for key, _, _ in held])
    if answer is None:
        return -1
    return sum(
        (Replica(index.node, index.incarnation, tier, nbytes),) == replicas
        for (_, tier, nbytes), replicas in zip(held, answer, strict=True)
    )


class TestIndexOnACluster(IndexKit):
    @pytest.fixture
    def make_index(self, shared_cluster):
        for server in shared_cluster:
            server.ask("FLUSHALL")
        made = []

        def make(life):
            find, lookups, masters = parts(RedisAddress(url_of(shared_cluster[:1])), SHORT)
            for part in (lookups, masters):
                part.take(find.find())
            try:
                made.append(RedisIndex(lookups, masters, life, finder=find, options=SHORT))
            except BaseException:
                for part in (find, lookups, masters):
                    part.close()
                raise
            return made[-1]

        yield make
        for index in made:
            index.close()


def test_a_lookup_on_a_cluster_asks_every_master_once(shared_cluster):
    index = connect(RedisAddress(url_of(shared_cluster)), host="alice", options=SHORT)
    try:
        publish(index)
        gets = [
            server.client().info("commandstats").get("cmdstat_get", {"calls": 0})["calls"] for server in shared_cluster
        ]
        assert eventually(lambda: found(index) == len(MANY))
        now = [server.client().info("commandstats")["cmdstat_get"]["calls"] for server in shared_cluster]
        assert all(after - before > 500 for before, after in zip(gets, now, strict=True))
        assert sum(now) - sum(gets) < 2 * len(MANY)
    finally:
        index.close()


def test_a_cluster_loses_one_master_to_a_replica_and_another_to_a_flush(servers):
    masters = servers.cluster(3)
    replica = servers.replica(masters)
    index = connect(RedisAddress(url_of(masters)), host="alice", options=SHORT)
    try:
        publish(index)
        assert eventually(lambda: found(index) == len(MANY))
        masters[1].ask("FLUSHALL")
        assert eventually(index.needs_publish)
        publish(index)
        assert eventually(lambda: found(index) == len(MANY))
        masters[0].kill()
        began = time.monotonic()
        waits = []
        while found(index) < len(MANY) and time.monotonic() < began + 15:
            before = time.monotonic()
            index.match([key(1)])
            waits.append(time.monotonic() - before)
            if index.needs_publish():
                index.publish(MANY)
            time.sleep(0.01)
        assert found(index) == len(MANY), (index.status(), replica.ask("CLUSTER", "NODES"))
        assert sorted(waits)[len(waits) // 2] < 0.01  # the breaker is open: nobody waits
        index.add([key(5000)], 2, [10])
        told(index)
        assert shows(index, 5000, [Replica(index.node, index.incarnation, 2, 10)])
    finally:
        index.close()


def test_a_slot_that_moves_to_another_master_is_followed(servers):
    masters = servers.cluster(2)
    index = connect(RedisAddress(url_of(masters)), host="alice", options=SHORT)
    try:
        publish(index)
        source, target = masters
        mine, its = (server.ask("CLUSTER", "MYID").decode() for server in masters)
        slots = {int(source.ask("CLUSTER", "KEYSLOT", key(number))) for number in range(40)}
        slots = [slot for slot in slots if slot < 8192][:5]
        for slot in slots:
            target.ask("CLUSTER", "SETSLOT", slot, "IMPORTING", mine)
            source.ask("CLUSTER", "SETSLOT", slot, "MIGRATING", its)
            for moving in source.ask("CLUSTER", "GETKEYSINSLOT", slot, 100):
                source.ask("MIGRATE", "127.0.0.1", target.port, moving, 0, 5000)
        index.add([key for key, _, _ in MANY], 3, [11] * len(MANY))  # half way: asked for elsewhere
        told(index)
        for slot in slots:
            for server in masters:
                server.ask("CLUSTER", "SETSLOT", slot, "NODE", its)
        again = [(key, 3, 11) for key, _, _ in MANY]
        assert eventually(lambda: found(index, again) == len(MANY))
    finally:
        index.close()


def test_a_sentinel_promotes_a_replica_and_the_index_goes_on(servers):
    master = servers.server()
    replica = servers.server(f"replicaof 127.0.0.1 {master.port}")
    assert eventually(lambda: replica.client().info("replication")["master_link_status"] == "up")
    sentinel = servers.sentinel(master)
    assert eventually(lambda: b"slave" in str(sentinel.ask("SENTINEL", "REPLICAS", "main")).encode())
    address = RedisAddress(f"redis+sentinel://127.0.0.1:1,{sentinel.where}/main")
    index = connect(address, host="alice", options=SHORT)
    try:
        publish(index)
        assert eventually(lambda: found(index) == len(MANY))
        master.kill()
        assert index.match([key(1)]) is None
        began = time.monotonic()
        while found(index) < len(MANY) and time.monotonic() < began + 20:
            if index.needs_publish():
                index.publish(MANY)
            time.sleep(0.02)
        assert found(index) == len(MANY), index.status()
        assert replica.client().info("replication")["role"] == "master"
        assert eventually(lambda: bool(index.status()["ok"]))
    finally:
        index.close()


def test_an_index_does_not_need_its_sentinels_while_the_master_is_well(servers):
    master = servers.server()
    sentinels = [servers.sentinel(master) for _ in range(2)]
    index = connect(RedisAddress(url_of(sentinels, "sentinel", "/main")), host="alice", options=SHORT)
    try:
        publish(index)
        assert eventually(lambda: found(index) == len(MANY))
        sentinels[0].kill()
        sentinels[1].signal(signal.SIGSTOP)
        time.sleep(2.0)
        index.add([key(5000)], 2, [10])
        assert eventually(lambda: index.flush(0.5))
        assert shows(index, 5000, [Replica(index.node, index.incarnation, 2, 10)])
        assert found(index) == len(MANY)
        assert index.status()["ok"]
    finally:
        sentinels[1].signal(signal.SIGCONT)
        index.close()


def test_an_index_starts_before_its_sentinels(servers):
    sentinel = servers.sentinel(servers.server())
    sentinel.signal(signal.SIGSTOP)
    index = connect(RedisAddress(url_of([sentinel], "sentinel", "/main")), host="alice", options=SHORT)
    try:
        assert index.match([key(1)]) is None
        assert not index.status()["ok"]
        sentinel.signal(signal.SIGCONT)
        assert eventually(lambda: bool(index.status()["ok"]))
        publish(index)
        assert eventually(lambda: found(index) == len(MANY))
    finally:
        sentinel.signal(signal.SIGCONT)
        index.close()


def test_one_hung_master_of_a_cluster_costs_a_lookup_its_time_and_then_nothing(servers):
    masters = servers.cluster(3)
    index = connect(RedisAddress(url_of(masters)), host="alice", options=RedisIndexOptions(heartbeat=0.1))
    try:
        publish(index)
        assert eventually(lambda: found(index) == len(MANY))
        masters[2].signal(signal.SIGSTOP)
        waits = []
        for _ in range(50):
            before = time.monotonic()
            assert index.match([key for key, _, _ in MANY]) is None
            waits.append(time.monotonic() - before)
        assert max(waits) < 0.2, waits  # 20 ms, on a machine that stalls
        assert sorted(waits)[25] < 0.002
        masters[2].signal(signal.SIGCONT)
        assert eventually(lambda: found(index) == len(MANY))
    finally:
        index.close()


def test_lives_of_a_cluster_are_told_apart(servers):
    masters = servers.cluster(3)
    first = connect(RedisAddress(url_of(masters)), host="alice", options=SHORT)
    second = None
    try:
        publish(first)
        second = connect(RedisAddress(url_of(masters)), host="alice", options=SHORT)
        assert second.node == first.node
        assert second.incarnation > first.incarnation
        publish(second, MANY[:10])
        first.add([key(2)], 3, [99])
        first.flush(1.0)
        assert shows(second, 2, [Replica(second.node, second.incarnation, 2, 10)])
        assert shows(second, 2000, [])
        assert not first.status()["ok"]
        dead = sum(part.changed for part in second.sweep(trim=True))
        assert dead == len(MANY) - 10
        assert sum(server.ask("DBSIZE") for server in masters) < 10 + 3 + 10
    finally:
        first.close()
        if second:
            second.close()


def test_a_dead_host_leaves_nothing_on_any_master_of_a_cluster(servers):
    masters = servers.cluster(3)
    quick = replace(SHORT, bury_after=1.0)
    index = connect(RedisAddress(url_of(masters)), host="alice", options=quick)
    dead = connect(RedisAddress(url_of(masters)), host="dead", options=quick)
    try:
        publish(index)
        publish(dead, [(key(number), 3, 7) for number in range(2000, 4000)])
        assert eventually(lambda: len(index.nodes()) == 2)
        dead.close()
        time.sleep(2.5)  # the table's clock has seconds
        assert sum(part.changed for part in index.sweep(trim=True)) == 2000
        assert sum(part.changed for part in index.sweep(trim=True)) == 0
        assert eventually(lambda: [node.host for node in index.nodes()] == ["alice"])
        left = [server.client().keys("kvtier:told:*") for server in masters]
        assert [server.client().hkeys(*keys) for server, keys in zip(masters, left, strict=True)] == [
            [str(index.node).encode()]
        ] * 3
        assert found(index) == len(MANY)
        assert not index.needs_publish()
    finally:
        index.close()
        dead.close()


def test_a_cluster_that_can_be_reached_says_how_many_masters_it_has(servers):
    masters = servers.cluster(3)
    assert reach(RedisAddress(url_of(masters[:1])), 2.0) == 3
    masters[1].kill()
    with pytest.raises((RedisError, OSError)):
        reach(RedisAddress(url_of(masters[:1])), 0.5)
