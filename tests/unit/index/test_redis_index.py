"""How `RedisIndex` behaves towards its server, by counts, on a clock that is set by hand."""

import pytest

from kvtier.index.base import Life, Replica
from kvtier.index.entry import pack_body, pack_owner
from kvtier.index.options import RedisIndexOptions
from kvtier.index.redis import RedisIndex
from kvtier.index.tell import Told
from tests.unit.index.fakes import FakeClock, FakeLookups, FakeRedis

ALICE = Life(1, 100, "alice")
BOB = Life(2, 7, "bob")
KEYS = [bytes([number]) * 34 for number in range(5)]
OPTIONS = RedisIndexOptions(batch=2, max_pending=4, failures=2, pause=0.1, longest_pause=1.0)


def value(life, tier, nbytes):
    return b"\x01" + pack_owner(life) + pack_body(tier, nbytes)


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def lookups(clock):
    return FakeLookups(clock)


@pytest.fixture
def updates():
    return FakeRedis()


@pytest.fixture
def index(lookups, updates, clock):
    return RedisIndex(lookups, updates.masters(), ALICE, options=OPTIONS, clock=clock, run=False)


def test_a_lookup_is_one_round_trip_whatever_it_finds(index, lookups, updates):
    lookups.values = {KEYS[0]: value(ALICE, 2, 9), KEYS[1]: value(BOB, 2, 9), KEYS[2]: b"junk"}
    assert index.match(KEYS) == [(Replica(1, 100, 2, 9),), (), (), (), ()]
    assert lookups.calls == ["get"]
    assert updates.calls == []


def test_an_empty_lookup_asks_nobody(index, lookups):
    assert index.match([]) == []
    assert lookups.calls == []


def test_a_host_that_the_table_does_not_know_is_looked_for_once_in_the_background(index, lookups, updates):
    index.step()
    lookups.values = {KEYS[0]: value(BOB, 2, 9)}
    updates.table[2] = {"incarnation": 7, "host": "bob", "door": "", "at": 49, "told": 0}
    assert index.match(KEYS[:1]) == [()]
    index.step()
    assert index.match(KEYS[:1]) == [(Replica(2, 7, 2, 9),)]
    assert index.others()
    lookups.values = {KEYS[0]: value(Life(3, 1, "nobody"), 2, 9)}
    for _ in range(5):
        index.match(KEYS[:1])
        index.step()
    assert updates.calls.count("nodes") == 3


def test_a_host_without_heartbeat_is_dead(index, lookups, updates):
    lookups.values = {KEYS[0]: value(BOB, 2, 9)}
    updates.table[2] = {"incarnation": 7, "host": "bob", "door": "", "at": 40, "told": 0}
    index.step()
    assert index.match(KEYS[:1]) == [()]
    assert not index.others()
    assert [(node.host, node.age, node.alive) for node in index.nodes() if node.node == 2] == [("bob", 10.0, False)]


def test_failing_lookups_open_the_breaker_and_the_background_closes_it(index, lookups, clock):
    lookups.down = True
    for _ in range(5):
        assert index.match(KEYS) is None
    assert lookups.calls == ["get"] * 2
    index.step()
    assert lookups.calls == ["get"] * 2
    clock.now += 0.11
    index.step()
    index.match(KEYS)
    assert lookups.calls == ["get", "get", "ping"]
    assert "timed out" in str(index.status()["reason"])
    lookups.down = False
    clock.now += 0.21
    index.step()
    lookups.values = {KEYS[0]: value(ALICE, 2, 9)}
    assert index.match(KEYS[:1]) == [(Replica(1, 100, 2, 9),)]
    assert index.status()["ok"]


def test_updates_are_told_in_batches_never_one_by_one(index, updates):
    index.add(KEYS[:3], 2, [1, 2, 3])
    index.discard(KEYS[2:4])
    assert updates.calls == []
    index.step()
    body = [pack_body(2, 1), pack_body(2, 2)]
    assert updates.batches == [{}, dict(zip(KEYS[:2], body, strict=True)), {KEYS[2]: b"", KEYS[3]: b""}]
    assert index.status()["told"] == 4


def test_nothing_is_sent_between_heartbeats_when_there_is_nothing_to_tell(index, updates, clock):
    index.step()
    for _ in range(10):
        clock.now += 0.09
        index.step()
    assert updates.calls == ["evalsha", "nodes"]
    clock.now += 0.2
    index.step()
    assert updates.calls == ["evalsha", "nodes"] * 2


def test_updates_wait_while_redis_is_away_and_attempts_pause_longer_and_longer(index, updates, clock):
    updates.down = True
    index.add(KEYS[:2], 2, [1, 1])
    for _ in range(1000):
        index.step()
        clock.now += 0.01
    assert len(updates.calls) == 13  # at 0 s, then after pauses of .1, .2, .4, .8 and 1 s each
    updates.down = False
    clock.now += 1.0
    index.step()
    assert set(updates.batches[-1]) == set(KEYS[:2])
    assert index.flush(0)


def test_too_many_updates_collapse_to_publishing_again(index, updates):
    index.publish([])
    assert not index.needs_publish()
    updates.down = True
    index.add(KEYS, 2, [1] * 5)
    assert index.needs_publish()
    assert index.status()["queued"] == 0
    assert index.status()["dropped"] == 5
    updates.down = False
    index.publish([(KEYS[0], 2, 1)])
    assert not index.needs_publish()
    assert updates.batches[-1] == {KEYS[0]: pack_body(2, 1)}


def test_what_redis_lost_is_to_be_published_again(index, updates):
    index.publish([])
    updates.answer = Told.LOST
    index.add(KEYS[:1], 2, [1])
    index.step()
    assert index.needs_publish()


def test_publishing_stays_due_when_redis_goes_away_in_the_middle(index, updates):
    def inventory():
        for key in KEYS:
            yield key, 2, 1
            updates.down |= key == KEYS[2]

    index.publish(inventory())
    assert index.needs_publish()


def test_publishing_stays_due_when_redis_loses_its_beginning(index, updates):
    def inventory():
        for key in KEYS[:4]:
            updates.answer = Told.LOST if key in KEYS[2:] else Told.WELL  # flushed: the second batch hears of it
            yield key, 2, 1

    index.publish(inventory())
    assert index.needs_publish()


def test_a_life_that_is_over_tells_nothing_more(index, updates):
    index.add(KEYS[:1], 2, [1])
    updates.answer = Told.SUPERSEDED
    index.step()
    index.add(KEYS, 2, [1] * 5)
    index.step()
    assert all(not batch for batch in updates.batches)
    assert index.flush(0)
    assert "registered again" in str(index.status()["reason"])


def test_forgetting_a_host_takes_effect_here_at_once(index, lookups, updates):
    lookups.values = {KEYS[0]: value(BOB, 2, 9)}
    updates.table[2] = {"incarnation": 7, "host": "bob", "door": "", "at": 50, "told": 0}
    index.step()
    assert index.match(KEYS[:1]) != [()]
    index.forget(2)
    assert index.match(KEYS[:1]) == [()]
    index.step()
    assert 2 not in updates.table
