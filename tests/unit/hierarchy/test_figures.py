"""What a status says of a host, beyond plain counts."""

from __future__ import annotations

import pytest

from kvtier.hierarchy.ledger import STUCK
from kvtier.hierarchy.stats import LONGEST_SAVED, MOST_RAW, Histogram, Stats
from kvtier.testing.payloads import key_of
from kvtier.tiers.base import TierNumber
from tests.hierarchy_fixture import NBYTES, SLOT_NBYTES, Host, fill, keys, reserve, save


def test_a_value_at_a_bound_is_in_the_bucket_below_it():
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 2.5, float("inf")):
        histogram.observe(value)
    assert histogram.as_dict()["buckets"] == [2, 2, 2]


def test_the_hottest_prefixes_are_ends_and_not_beginnings():
    """A system prompt of three blocks, two conversations behind it, and another chain."""
    with Host() as host:
        session = host.session()
        for chain in ([1, 2, 3, 10, 11], [1, 2, 3, 20], [50, 51]):
            save(session, chain)
        for chain, times in (([1, 2, 3, 10, 11], 3), ([1, 2, 3, 20], 5), ([1, 2, 3], 20), ([50, 51], 9)):
            for _ in range(times):
                session.release(session.match(keys(chain), 0.0).lease)
        host.now += 7
        hot = session.status()["hot"]
        found = [(one["key"], one["blocks"], one["hits"]) for one in hot]
        assert found == [
            (key_of(3)[:8].hex(), 3, 28),
            (key_of(51)[:8].hex(), 2, 9),
            (key_of(20)[:8].hex(), 4, 5),
            (key_of(11)[:8].hex(), 5, 3),
        ]
        assert (hot[0]["tokens"], hot[0]["nbytes"], hot[0]["tiers"]) == (3 * 64, 3 * NBYTES, ["cpu"])
        assert (hot[0]["last_access"], hot[0]["keyspace"]) == (1000.0, key_of(3)[:8].hex())


def test_hot_prefixes_are_few_and_those_that_were_dropped_are_none():
    with Host() as host:
        session = host.session()
        for seed in range(20):
            save(session, [seed])
            session.release(session.match(keys([seed]), 0.0).lease)
        assert len(session.status()["hot"]) == 8
        for seed in range(19):
            session.evict(keys([seed]))
        assert [one["key"] for one in session.status()["hot"]] == [key_of(19)[:8].hex()]


def test_what_is_old_is_stuck():
    with Host() as host:
        session = host.session()
        save(session, [1, 2])
        session.match(keys([1, 2]), 0.0)
        reserve(session, [9])
        host.now += STUCK
        assert session.status()["stuck"] == {"lease": 0, "reservation": 0}
        session.match(keys([1]), 0.0)
        host.now += 1
        status = session.status()
        assert status["stuck"] == {"lease": 1, "reservation": 1}
        assert status["oldest"] == {"lease": STUCK + 1, "reservation": STUCK + 1}
        assert status["leased"] == {"gpu": 0, "cpu": 3 * SLOT_NBYTES}


def test_the_age_of_what_made_room():
    with Host(blocks=8, nvme=None) as host:
        session = host.session()
        save(session, range(4))
        host.now += 100
        session.release(session.match(keys(range(2)), 0.0).lease)
        host.now += 50
        save(session, range(10, 14))
        save(session, range(20, 22))
        gone = [seed for seed in range(4) if session.inspect(keys([seed])) == [None]]
        assert {2, 3} <= set(gone)
        ages = session.status()["evicted"]["cpu"]
        assert (ages["count"], ages["sum"]) == (len(gone), sum(50.0 if seed < 2 else 150.0 for seed in gone))
        session.evict(keys(range(20)))
        assert session.status()["evicted"]["cpu"]["count"] == len(gone)


class TestCodecs:
    def commit(self, session, seeds, raw):
        reserved = reserve(session, seeds)
        return session.commit(reserved.ticket, fill(session, reserved, seeds), raw=raw)

    def test_a_client_says_how_large_its_kv_is(self):
        with Host() as host:
            session = host.session()
            self.commit(session, [1, 2], 3 * NBYTES)
            save(session, [3])
            assert session.status()["codecs"] == {"raw": {"stored_nbytes": 2 * NBYTES, "raw_nbytes": 6 * NBYTES}}

    @pytest.mark.parametrize("raw", [-1, 0, 1, NBYTES // MOST_RAW - 1, MOST_RAW * NBYTES + 1, 1 << 64, 1 << 200])
    def test_what_cannot_be_counts_for_nothing(self, raw):
        with Host() as host:
            session = host.session()
            assert self.commit(session, [1], raw) == [True]
            assert session.status()["codecs"] == {}

    def test_what_nobody_wrote_is_not_counted(self):
        with Host() as host:
            session = host.session()
            assert session.commit(reserve(session, [1]).ticket, [], raw=NBYTES) == []
            assert session.status()["codecs"] == {}


def test_seconds_saved_are_within_reason():
    stats = Stats()
    for rate in (0.0, -1.0, float("nan"), float("inf")):
        stats.save_computing(1000, rate)
    assert stats.saved_seconds == 0
    stats.save_computing(1000, 500.0)
    assert stats.saved_seconds == 2.0
    stats.save_computing(1000, 1e-300)
    assert stats.saved_seconds == 2.0 + LONGEST_SAVED


def test_asked_again_for_the_same_engine_counts_for_nothing():
    with Host() as host:
        session = host.session()
        save(session, [1, 2])
        session.match(keys([1, 2, 3]), 0.0)
        before = session.status()
        session.match(keys([1, 2, 3]), 0.0, again=True)
        after = session.status()
        assert after["window"]["asked"] == before["window"]["asked"] == 3
        assert after["seconds"]["match"]["count"] == before["seconds"]["match"]["count"] == 1


def test_a_stream_counts_each_block_once_in_the_window_too():
    with Host(stored=[1, 2, 3]) as host:
        session = host.session()
        first = session.match(keys([1, 2, 3, 4]), 0.0, stream=True, prefill=0.0)
        assert first.staging in (0, 3)
        host.mover.stager.drain()
        session.match(keys([1, 2, 3, 4]), 1.0, stream=True, after=len(first.slots))
        status = session.status()
        asked = sum(status["hits"].values()) + sum(status["misses"].values())
        assert (status["window"]["asked"], status["window"]["distinct"]) == (asked, 4)


def test_blocks_are_counted_as_they_come_and_go():
    """Against the table, row by row."""
    with Host(blocks=12, stored=range(50, 55)) as host:
        session = host.session()
        for first in (0, 10, 20, 30):
            save(session, range(first, first + 6))
            session.match(keys(range(50, 53)), 1.0)
            host.mover.drain()
        session.evict(keys([0, 20, 51]))
        session.move(keys([30, 31]), TierNumber.NVME, 5.0)
        table = host.state.table
        there = {
            tier: sum(table.has(row, tier) for row in table.rows.values()) for tier in (TierNumber.CPU, TierNumber.NVME)
        }
        shown = {tier["tier"]: tier["blocks"] for tier in session.status()["tiers"]}
        assert shown == {tier.name.lower(): count for tier, count in there.items()}
