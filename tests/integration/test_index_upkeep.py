"""A host and a real index that are made to differ: found, counted, mended; and what the dead left is swept."""

from __future__ import annotations

import time

import pytest

from kvtier.client.local import LocalSession
from kvtier.errors import SessionUnavailable
from kvtier.hierarchy.cache import Hierarchy
from kvtier.hierarchy.checking import Check
from kvtier.index.base import Life, Replica
from kvtier.index.entry import pack_body, pack_owner
from kvtier.index.nodes import NODES
from kvtier.index.options import RedisIndexOptions
from kvtier.index.sweep import BATON
from kvtier.memory.arena import Arena
from kvtier.testing.index import ALICE, BOB, eventually, key, replica, shows, told
from kvtier.testing.payloads import key_of
from tests.hierarchy_fixture import NBYTES, SLOT_NBYTES, save
from tests.redis_fixture import QUICK, make_redis_index, redis, shared_redis  # noqa: F401

DEAD = Life(9, 5, "dead")
SWEEPING = RedisIndexOptions(lookup_timeout=0.25, heartbeat=0.05, sweep_every=0.2, sweep_rate=1e6, bury_after=1.0)


def value(*lives, tier=2, nbytes=10):
    return b"\x01" + b"".join(pack_owner(life) + pack_body(tier, nbytes) for life in lives)


def record(life, age=0.0):
    at = int(time.time() - age)
    return f'{{"incarnation":{life.incarnation},"host":"{life.host}","door":"","at":{at},"told":3}}'


def test_a_sweep_deletes_what_only_the_dead_told_and_trims_the_rest(redis, make_redis_index):  # noqa: F811
    alice, bob = make_redis_index(ALICE, run=False), make_redis_index(BOB, run=False)
    told(alice)
    told(bob)
    older = Life(ALICE.node, ALICE.incarnation - 1, "alice")
    redis.set(key(1), value(DEAD))
    redis.set(key(2), value(older))
    redis.set(key(3), value(DEAD, BOB, older))
    redis.set(key(4), value(BOB, ALICE))
    redis.set(key(5), b"\x02a version that is not known yet")
    redis.set(b"somebody else's", value(DEAD))
    parts = list(alice.sweep(trim=False))
    assert (sum(part.dead for part in parts), sum(part.partly for part in parts)) == (2, 1)
    assert redis.exists(key(1), key(2), key(3)) == 3
    assert sum(part.changed for part in alice.sweep(trim=True)) == 3
    assert redis.mget([key(1), key(2), key(3), key(4)]) == [None, None, value(BOB), value(BOB, ALICE)]
    assert redis.exists(key(5), b"somebody else's") == 2
    assert not any(part.dead or part.partly for part in alice.sweep(trim=True))


def test_hosts_take_turns_at_sweeping_in_the_background_and_one_does_it_at_a_time(redis, make_redis_index):  # noqa: F811
    redis.mset({key(number): value(DEAD) for number in range(3000)})
    indexes = [make_redis_index(life, options=SWEEPING) for life in (ALICE, BOB)]
    assert eventually(lambda: redis.dbsize() <= 2)
    assert eventually(lambda: all(index.status()["swept_rounds"] for index in indexes))
    assert sum(index.status()["swept_dead"] for index in indexes) == 3000
    assert redis.pttl(BATON) > 0


def test_a_sweep_keeps_its_pace(redis, make_redis_index):  # noqa: F811
    redis.mset({key(number): value(DEAD) for number in range(4000)})
    began = time.monotonic()
    slow = RedisIndexOptions(lookup_timeout=0.25, heartbeat=0.05, sweep_every=0.2, sweep_rate=8_000)
    make_redis_index(ALICE, options=slow)
    assert eventually(lambda: redis.dbsize() <= 2)
    assert time.monotonic() - began > 0.3


def test_a_host_that_was_silent_for_long_is_buried_and_publishes_when_it_is_back(redis, make_redis_index):  # noqa: F811
    alice, bob = (
        make_redis_index(ALICE, options=SWEEPING, run=False),
        make_redis_index(BOB, options=SWEEPING, run=False),
    )
    bob.publish([(key(1), 2, 10)])
    assert not bob.needs_publish()
    told(alice)
    redis.hset(NODES, BOB.node, record(BOB, age=100))
    redis.hset(NODES, DEAD.node, record(DEAD, age=100))
    redis.set(key(2), value(DEAD))
    list(alice.sweep(trim=True))
    assert not redis.exists(key(1), key(2))
    assert redis.hexists(NODES, DEAD.node)  # something referred to it in this round
    told(bob)
    assert bob.needs_publish()
    bob.publish([(key(1), 2, 10)])
    told(alice)
    assert shows(bob, 1, [replica(BOB, 2, 10)])
    list(alice.sweep(trim=True))
    assert not redis.hexists(NODES, DEAD.node)
    assert redis.hexists(NODES, BOB.node)
    assert redis.get(key(1)) == value(BOB)


def test_who_falls_silent_in_the_middle_of_a_round_keeps_what_it_told(redis, make_redis_index):  # noqa: F811
    alice, bob = (
        make_redis_index(ALICE, options=SWEEPING, run=False),
        make_redis_index(BOB, options=SWEEPING, run=False),
    )
    held = [(key(number), 2, 10) for number in range(2000)]
    bob.publish(held)
    told(alice)
    parts = iter(alice.sweep(trim=True))
    next(parts)
    redis.hset(NODES, BOB.node, record(BOB, age=100))
    assert sum(part.changed for part in parts) == 0  # it was not told that it has to publish again
    assert sum(part.changed for part in alice.sweep(trim=True)) == 2000
    told(bob)
    assert bob.needs_publish()


def test_who_is_not_in_the_node_table_sweeps_nothing(redis, make_redis_index):  # noqa: F811
    alice = make_redis_index(ALICE, run=False)
    told(alice)
    redis.set(key(1), value(BOB))
    redis.delete(NODES)  # lost; nobody knows who lives
    with pytest.raises(SessionUnavailable, match="node table"):
        list(alice.sweep(trim=True))
    assert redis.exists(key(1))


def test_publication_keeps_its_pace_and_leaves_lookups_alone(make_redis_index):  # noqa: F811
    paced = RedisIndexOptions(lookup_timeout=0.25, heartbeat=0.05, publish_rate=10_000)
    index = make_redis_index(ALICE, options=paced)
    began = time.monotonic()
    index.publish((key(number), 2, 10) for number in range(5_000))
    assert time.monotonic() - began > 0.4
    assert not index.needs_publish()
    assert shows(index, 4_999, [Replica(1, 100, 2, 10)])


@pytest.fixture(params=[SWEEPING], ids=["swept"])
def host(make_redis_index, request):  # noqa: F811
    """A host with 20 blocks, on a real index; swept all the time unless the test says otherwise."""
    index = make_redis_index(ALICE, options=request.param)
    arena = Arena.private(40 * SLOT_NBYTES)
    hierarchy = Hierarchy(arena, {}, index)
    save(LocalSession(hierarchy), range(20))
    assert eventually(lambda: not index.needs_publish() and index.flush(1.0))
    yield hierarchy
    hierarchy.close()


@pytest.mark.parametrize("host", [QUICK], indirect=True, ids=["unswept"])
def test_what_a_host_and_its_index_do_not_agree_on_is_found_and_mended(host, redis):  # noqa: F811
    assert Check(host.state, repair=False).run(10.0)["missing"] == 0
    redis.delete(key_of(3))
    redis.set(key_of(4), value(ALICE, tier=3, nbytes=NBYTES))
    said = Check(host.state, repair=False).run(10.0)
    assert (said["missing"], said["wrong"], said["blocks"], said["complete"]) == (1, 1, 20, True)
    assert Check(host.state, repair=True).run(10.0)["mended"] == 2
    said = Check(host.state, repair=False).run(10.0)
    assert (said["missing"], said["wrong"], said["stale"]) == (0, 0, 0)


def test_an_entry_without_a_block_goes_by_itself_when_a_sweep_meets_it(host, redis):  # noqa: F811
    redis.set(key(77), value(ALICE))
    redis.set(key(78), value(BOB, ALICE))
    assert eventually(lambda: not redis.exists(key(77)))
    assert host.status()["index"]["reconciled"]["stale"] >= 1
    assert all(replicas for replicas in host.state.index.match([key_of(seed) for seed in range(20)]))


def test_everything_is_told_again_after_a_flush(host, redis):  # noqa: F811
    redis.flushall()
    held = [key_of(seed) for seed in range(20)]
    assert eventually(lambda: all(host.state.index.match(held) or [()]))
    assert Check(host.state, repair=False).run(10.0)["missing"] == 0
