"""Match: what is leased, what is staged, how it is counted."""

from __future__ import annotations

import threading

import pytest

from kvtier.errors import SessionUnavailable
from kvtier.hierarchy.cache import Limits
from kvtier.hierarchy.loading import Wish
from kvtier.tiers.base import TierNumber
from tests.hierarchy_fixture import NBYTES, SLOT_NBYTES, Host, holds, keys, save

LIMITS = Limits(session_leased=3 * SLOT_NBYTES, session_reserved=1 << 30)


def asked_is_hits_and_misses(host: Host, asked: int) -> None:
    assert host.stats.hits.total() + host.stats.misses.total() == asked


def test_the_longest_prefix_is_leased():
    with Host() as host:
        session = host.session()
        save(session, [1, 2, 3])
        save(session, [5])
        matched = session.match(keys([1, 2, 3, 4, 5]), 0.0)
        assert len(matched.slots) == 3
        assert holds(session, matched, [1, 2, 3])
        assert host.stats.lookups == {"partial": 1}
        assert {k: v for k, v in host.stats.misses.items() if v} == {"absent": 2}
        asked_is_hits_and_misses(host, 5)


def test_the_index_is_not_read_and_no_tier_is_asked():
    with Host() as host:
        session = host.session()
        save(session, [1, 2])
        calls, lookups = dict(host.nvme.calls), host.index.status()["lookups"]
        session.match(keys([1, 2]), 1.0)
        assert dict(host.nvme.calls) == calls
        assert host.index.status()["lookups"] == lookups


def test_a_quota_shortens_the_prefix():
    with Host(limits=LIMITS) as host:
        session, other = host.session(), host.session()
        save(session, range(5))
        first = session.match(keys(range(5)), 0.0)
        assert len(first.slots) == 3
        second = session.match(keys(range(5)), 0.0)
        assert (second.lease, len(second.slots), second.staging) == (0, 0, 0)
        assert len(other.match(keys(range(5)), 0.0).slots) == 3
        assert host.stats.misses["quota"] == 2 + 5 + 2
        asked_is_hits_and_misses(host, 15)
        session.release(first.lease)
        session.release(first.lease)
        assert len(session.match(keys(range(5)), 0.0).slots) == 3


def test_what_another_tier_has_is_staged_and_attributed_to_it():
    with Host(stored=[1, 2, 3]) as host:
        session = host.session()
        matched = session.match(keys([1, 2, 3, 4]), 5.0)
        assert len(matched.slots) == 3
        assert holds(session, matched, [1, 2, 3])
        assert matched.tiers.tolist() == [TierNumber.NVME] * 3
        assert host.stats.hits == {"nvme": 3}
        assert host.stats.tokens == {"nvme": 3 * 64}
        asked_is_hits_and_misses(host, 4)
        assert session.match(keys([1, 2, 3]), 0.0).tiers.tolist() == [TierNumber.CPU] * 3


def test_without_waiting_it_says_what_is_on_its_way():
    with Host(stored=[1, 2, 3]) as host:
        session = host.session()
        save(session, [1, 2])
        assert host.tiers_of(1) == ["nvme"], "stored already"
        matched = session.match(keys([1, 2, 3, 4]), 0.0)
        assert (len(matched.slots), matched.staging) == (0, 3)
        assert {k: v for k, v in host.stats.misses.items() if v} == {"staging": 3, "absent": 1}
        host.mover.drain()
        assert session.match(keys([1, 2, 3]), 0.0).tiers.tolist() == [TierNumber.NVME] * 3, "that is where it was"
        assert session.match(keys([1, 2, 3]), 0.0).tiers.tolist() == [TierNumber.CPU] * 3
        asked_is_hits_and_misses(host, 10)


def test_blocks_in_memory_behind_a_gap_are_on_their_way_too():
    with Host() as host:
        session = host.session()
        save(session, [1, 2, 3])
        session.move(keys([2]), TierNumber.NVME, 5.0)
        host.nvme.gate.clear()
        matched = session.match(keys([1, 2, 3]), 0.0)
        assert (len(matched.slots), matched.staging) == (1, 2)
        asked_is_hits_and_misses(host, 3)


def test_a_wait_that_is_too_short_gives_what_is_there():
    with Host(stored=[2]) as host:
        session = host.session()
        save(session, [1])
        host.nvme.gate.clear()
        matched = session.match(keys([1, 2]), 0.001)
        assert (len(matched.slots), matched.staging) == (1, 1)
        host.nvme.gate.set()


def test_many_who_ask_for_one_chain_cause_one_read():
    with Host(stored=range(8)) as host:
        host.nvme.gate.clear()
        sessions = [host.session() for _ in range(4)]
        for session in sessions:
            assert session.match(keys(range(8)), 0.0).staging == 8
        assert host.hierarchy.status()["staging"] == 8
        results = []
        threads = [
            threading.Thread(target=lambda s=s: results.append(len(s.match(keys(range(8)), 10.0).slots)))
            for s in sessions
        ]
        for thread in threads:
            thread.start()
        host.nvme.gate.set()
        for thread in threads:
            thread.join()
        assert results == [8] * 4
        assert host.nvme.calls["read"] == 1
        assert host.stats.moves["nvme", "cpu"] == 8
        assert host.hierarchy.status()["staging"] == 0


def test_one_who_waits_cannot_cancel_the_flight_of_all():
    """The door awaits the future, and asyncio hands a time-out down as a cancellation."""
    with Host(stored=[1]) as host:
        host.nvme.gate.clear()
        session = host.session()
        look = host.hierarchy.look(Wish(session._number, keys([1])))
        assert not look.staging.done.cancel()
        host.nvme.gate.set()
        assert look.staging.done.result(5.0) == 1


def test_a_chain_larger_than_the_arena_comes_up_as_far_as_it_goes():
    with Host(blocks=16, stored=range(40), limits=Limits(1 << 30, 1 << 30, high=1.0)) as host:
        session = host.session()
        matched = session.match(keys(range(40)), 10.0)
        assert len(matched.slots) == host.state.cpu.pool.capacity // SLOT_NBYTES
        assert holds(session, matched, range(40))
        assert host.stats.faults["staging_no_room"] >= 1
        session.release(matched.lease)
        host.check()


def test_what_a_tier_lost_is_forgotten_and_the_rest_of_the_chain_is_not():
    with Host(stored=[1, 2, 3]) as host:
        host.nvme.lose |= set(keys([2]))
        session = host.session()
        assert len(session.match(keys([1, 2, 3]), 5.0).slots) == 1
        assert host.tiers_of(2) == []
        assert host.tiers_of(3)
        assert host.stats.faults["nvme_lost"] == 1
        assert host.stats.dropped == {"nvme_lost": 1}
        host.check()


def test_a_staged_chain_leaves_from_its_tail_though_nobody_used_it():
    """An inventory does not say who is whose parent: the request does."""
    with Host(stored=range(6)) as host:
        session = host.session()
        session.match(keys(range(6)), 0.0)
        host.mover.drain()
        rows = host.state.policies[TierNumber.CPU].victims(2 * SLOT_NBYTES, host.state.pinned)
        assert [host.state.table.keys[row] for row in rows] == keys([5, 4])


def test_a_chain_that_names_a_block_twice_breaks_nothing():
    with Host() as host:
        session = host.session()
        save(session, [1])
        matched = session.match(keys([1, 1, 1]), 0.0)
        host.hierarchy.condemn(keys([1, 1]), "bad_header")
        session.release(matched.lease)
        host.mover.drain()
        assert host.state.cpu.pool.used == 0


def test_nothing_asked_nothing_leased():
    with Host() as host:
        matched = host.session().match([], 1.0)
        assert (matched.lease, len(matched.slots), len(matched.tiers)) == (0, 0, 0)


def test_a_session_that_ended_is_told_so():
    with Host() as host:
        session = host.session()
        session.close()
        session.close()
        for call in (
            lambda: session.match(keys([1]), 0.0),
            lambda: session.reserve(keys([1]), [NBYTES], 0),
            lambda: session.commit(1, [0]),
        ):
            with pytest.raises(SessionUnavailable):
                call()


def test_ends_of_sessions_give_their_leases_back():
    with Host() as host:
        session, other = host.session(), host.session()
        save(session, [1, 2])
        lease = session.match(keys([1, 2]), 0.0).lease
        other.match(keys([1]), 0.0)
        session.close()
        session.release(lease)
        assert [one["leased"] for one in host.hierarchy.inspect(keys([1, 2]))] == [True, False]
        other.close()
        assert host.hierarchy.status()["leased_nbytes"] == 0
        host.check()
