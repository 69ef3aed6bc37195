"""What the index says of a host is what the host has: published, compared, mended, checked."""

from __future__ import annotations

import threading

import pytest

from kvtier.errors import SessionUnavailable
from kvtier.hierarchy import checking, publishing
from kvtier.hierarchy.checking import Check
from kvtier.hierarchy.limits import Limits
from kvtier.hierarchy.publishing import ROUND, Publisher, inventory
from kvtier.index.base import Replica
from kvtier.testing.payloads import key_of
from kvtier.tiers.base import TierNumber
from tests.hierarchy_fixture import NBYTES, Host, keys, save

CPU, NVME = TierNumber.CPU, TierNumber.NVME
PLENTY = Limits(session_leased=1 << 30, session_reserved=1 << 30, staging_reserve=0.0)
UNKNOWN = b"\1" * 34


@pytest.fixture
def host():
    """A host with ten blocks, whose own publisher has ended."""
    with Host(blocks=40, limits=PLENTY) as host:
        host.hierarchy.publisher.close()
        save(host.session(), range(10))
        yield host


class Clock:
    now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def publisher(host, clock):
    publisher = Publisher(host.state, clock)
    publisher.step()
    assert not host.index.needs_publish()
    publisher.counts.clear()
    return publisher


def spoil(host):
    """Make the index wrong of three blocks: one lacks, one is elsewhere, one is not here."""
    replicas, me = host.index._store.replicas, (host.index.node, host.index.incarnation)
    del replicas[key_of(1)]
    replicas[key_of(2)] = (Replica(*me, NVME, NBYTES),)
    replicas[UNKNOWN] = (Replica(*me, CPU, 5),)


def test_an_inventory_is_every_block_with_its_best_tier_and_size(host):
    session = host.session()
    assert host.hierarchy.move(keys(range(5, 10)), NVME).result() == 5
    assert session.evict(keys([9])) == 1
    expected = {(key_of(seed), CPU if seed < 5 else NVME, NBYTES) for seed in range(9)}
    assert set(inventory(host.state)) == expected
    assert len(list(inventory(host.state))) == 9


def test_others_may_work_while_an_inventory_is_published(host, monkeypatch):
    monkeypatch.setattr(publishing, "PART", 4)
    session, saved = host.session(), []

    def slowly():
        for number, entry in enumerate(inventory(host.state)):
            if number == 5:
                other = threading.Thread(target=lambda: saved.append(save(session, range(20, 24))))
                other.start()
                other.join(10.0)
                assert session.evict(keys([9])) == 1
            yield entry

    host.index.publish(slowly())
    assert saved == [4]
    assert host.index._store.replicas.keys() == host.state.table.rows.keys() == set(keys([*range(9), *range(20, 24)]))


def test_blocks_that_the_index_lacks_or_has_elsewhere_are_told_again(host, publisher, clock):
    spoil(host)
    clock.now += ROUND
    publisher.step()
    assert (publisher.counts["missing"], publisher.counts["wrong"], publisher.counts["stale"]) == (1, 1, 0)
    assert host.index.lacking(list(inventory(host.state))) == []
    assert host.hierarchy.status()["index"]["reconciled"].keys() == {"compared", "missing", "wrong", "stale"}


def test_entries_that_a_sweep_met_are_held_against_the_table(host, publisher):
    spoil(host)
    met = [(UNKNOWN, CPU, 5), (key_of(2), NVME, NBYTES), (key_of(3), CPU, NBYTES)]
    host.index.claims = lambda: met
    publisher.step()
    assert publisher.counts == {"stale": 1, "wrong": 1}
    assert host.index.match([UNKNOWN, key_of(3)]) == [
        (),
        (Replica(host.index.node, host.index.incarnation, CPU, NBYTES),),
    ]


def test_an_entry_that_was_right_again_before_anybody_looked_is_not_counted(host, publisher):
    host.index.claims = lambda: [(key_of(1), NVME, NBYTES), (UNKNOWN, CPU, 5)]
    publisher.step()
    assert not publisher.counts


def test_the_whole_table_is_compared_in_a_round_a_part_at_a_time(host, publisher, clock, monkeypatch):
    monkeypatch.setattr(publishing, "PART", 2)
    monkeypatch.setattr(publishing, "SAMPLES_EVERY", 1e9)
    publisher._sample_due = 1e12
    asked = []
    lacking = host.index.lacking
    host.index.lacking = lambda held: asked.append(len(held)) or lacking(held)
    rows = len(host.state.table.keys)
    for _ in range(int(ROUND) + 60):
        clock.now += 1.0
        publisher.step()
    assert max(asked) == 2
    assert 10 <= sum(asked) <= 10 + 4
    assert rows == 10


def test_a_sample_with_many_wrong_ones_speeds_the_round_up(host, publisher, clock, monkeypatch):
    monkeypatch.setattr(publishing, "PART", 1)
    monkeypatch.setattr(publishing, "SAMPLE", 5)
    host.index._store.replicas.clear()
    publisher._row = 0
    publisher._due = clock.now + ROUND
    clock.now += publishing.SAMPLES_EVERY
    publisher.step()
    assert publisher.counts["missing"] >= 4
    for _ in range(20):
        clock.now += ROUND / 10 / publishing.HASTE
        publisher.step()
    assert host.index.lacking(list(inventory(host.state))) == []


def test_an_index_that_does_not_answer_is_asked_again_later(host, publisher, clock):
    spoil(host)
    host.index.lacking = lambda held: None
    clock.now += ROUND
    publisher.step()
    assert publisher.counts["compared"] == 0
    del host.index.lacking
    clock.now += ROUND
    publisher.step()
    assert publisher.counts["missing"] == 1


def test_a_check_counts_and_names_what_differs_and_changes_nothing(host, publisher):
    spoil(host)
    for _ in range(2):
        said = Check(host.state, repair=False).run(10.0)
        counts = {kind: said[kind] for kind in ("blocks", "entries", "missing", "wrong", "stale", "mended")}
        assert counts == {"blocks": 10, "entries": 10, "missing": 1, "wrong": 1, "stale": 1, "mended": 0}
        assert said["examples"] == {"missing": [key_of(1).hex()], "wrong": [key_of(2).hex()], "stale": [UNKNOWN.hex()]}
        assert said["complete"]
        assert not said["needs_publish"]


def test_a_check_that_repairs_leaves_nothing_to_find(host, publisher):
    spoil(host)
    assert host.hierarchy.check_index(10.0, repair=True)["mended"] == 3
    after = host.hierarchy.check_index(10.0, repair=False)
    assert [after[kind] for kind in ("missing", "wrong", "stale", "mended")] == [0, 0, 0, 0]
    assert host.index._store.replicas.keys() == host.state.table.rows.keys()


def test_a_check_without_time_says_that_it_was_not_all(host, publisher, clock, monkeypatch):
    monkeypatch.setattr(checking, "PART", 2)

    def ticking():
        clock.now += 1.0
        return clock.now

    said = Check(host.state, repair=False, clock=ticking).run(3.0)
    assert not said["complete"]
    assert said["blocks"] < 10


def test_a_check_of_an_index_that_does_not_answer_is_an_error(host, publisher, monkeypatch):
    monkeypatch.setattr(checking, "PAUSE", 0.0)
    host.index.lacking = lambda held: None
    with pytest.raises(SessionUnavailable, match="index does not answer"):
        Check(host.state, repair=False).run(1.0)


def test_the_publisher_survives_its_work(host):
    host.index.needs_publish = lambda: 1 / 0
    publisher = Publisher(host.state)
    publisher.start()
    for _ in range(1000):
        if host.stats.faults["publisher_error"] >= 2:
            break
        threading.Event().wait(0.01)
    publisher.close()
    assert host.stats.faults["publisher_error"] >= 2
