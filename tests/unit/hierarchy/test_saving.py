"""Reserve and commit: who gets a slot, what becomes visible, what is given back."""

from __future__ import annotations

import threading
from dataclasses import replace

import numpy as np
import pytest

from kvtier.block import PAGE
from kvtier.errors import UsageError
from kvtier.hierarchy import room
from kvtier.hierarchy.answers import GrantState
from kvtier.hierarchy.cache import Limits
from kvtier.testing.payloads import payload_of
from kvtier.tiers.base import TierNumber
from kvtier.tiers.cpu import CpuTier
from tests.hierarchy_fixture import NBYTES, SLOT_NBYTES, Host, fill, holds, keys, reserve, save, states

GRANTED, STORED, BUSY, REFUSED = GrantState
PLENTY = Limits(session_leased=1 << 30, session_reserved=1 << 30, staging_reserve=0.0)


def test_what_is_stored_or_being_stored_is_not_granted_again():
    with Host() as host:
        session, other = host.session(), host.session()
        save(session, [1])
        first = reserve(session, [1, 2, 3])
        assert states(first) == [STORED, GRANTED, GRANTED]
        assert states(reserve(other, [1, 2, 4], start=1)) == [BUSY, GRANTED]
        assert first.reason == ""


def test_blocks_are_visible_with_their_commit_and_not_before():
    with Host() as host:
        session, other = host.session(), host.session()
        reserved = reserve(session, [1, 2])
        written = fill(session, reserved, [1, 2])
        assert len(other.match(keys([1, 2]), 0.0).slots) == 0
        assert session.commit(reserved.ticket, written) == [True, True]
        assert holds(other, other.match(keys([1, 2]), 0.0), [1, 2])
        assert (host.stats.stored, host.stats.stored_nbytes) == (2, 2 * NBYTES)


def test_what_was_not_written_is_given_back():
    with Host() as host:
        session = host.session()
        reserved = reserve(session, [1, 2, 3])
        fill(session, reserved, [1, 2, 3])
        assert session.commit(reserved.ticket, [0]) == [True]
        host.check()
        assert states(reserve(session, [1, 2, 3])) == [STORED, GRANTED, GRANTED]


def test_answers_follow_what_was_said_even_twice():
    with Host() as host:
        session = host.session()
        reserved = reserve(session, [1, 2])
        fill(session, reserved, [1, 2])
        assert session.commit(reserved.ticket, [1, 7, 1]) == [True, False, True]


@pytest.mark.parametrize("wrong", ["zeros", "foreign", "cut", "longer"])
def test_a_slot_that_holds_something_else_does_not_become_visible(wrong):
    with Host() as host:
        session = host.session()
        reserved = reserve(session, [1])
        if wrong == "foreign":
            fill(session, reserved, [2])
        elif wrong != "zeros":
            fill(session, reserved, [1], NBYTES - 64 if wrong == "cut" else NBYTES + 64)
        assert session.commit(reserved.ticket, [0]) == [False]
        assert host.stats.faults == {"bad_commit": 1}
        assert host.tiers_of(1) == []
        host.check()


def test_a_ticket_is_good_once_and_for_its_session():
    with Host() as host:
        session, other = host.session(), host.session()
        reserved = reserve(session, [1])
        written = fill(session, reserved, [1])
        assert other.commit(reserved.ticket, written) == [False]
        assert session.commit(reserved.ticket, written) == [True]
        assert session.commit(reserved.ticket, written) == [False]
        assert session.commit(999, []) == []


def meanwhile(monkeypatch, act) -> None:
    """Do something while a commit reads headers, without the lock."""
    read = CpuTier.headers

    def read_and_act(*args):
        act()
        return read(*args)

    monkeypatch.setattr(CpuTier, "headers", read_and_act)


def test_keys_are_busy_until_they_are_visible(monkeypatch):
    with Host() as host:
        session, other = host.session(), host.session()
        reserved = reserve(session, [1])
        written = fill(session, reserved, [1])
        seen = []
        meanwhile(monkeypatch, lambda: seen.append(states(reserve(other, [1]))))
        assert session.commit(reserved.ticket, written) == [True]
        assert seen == [[BUSY]]


def test_a_session_that_ends_during_its_commit_keeps_nothing(monkeypatch):
    with Host() as host:
        session = host.session()
        reserved = reserve(session, [1])
        written = fill(session, reserved, [1])
        meanwhile(monkeypatch, session.close)
        assert session.commit(reserved.ticket, written) == [False]
        assert host.tiers_of(1) == []
        host.check()


def test_a_ticket_is_committed_once_however_many_try(monkeypatch):
    with Host() as host:
        session = host.session()
        reserved = reserve(session, [1])
        written = fill(session, reserved, [1])
        second = []

        def again():
            monkeypatch.undo()
            second.append(session.commit(reserved.ticket, written))

        meanwhile(monkeypatch, again)
        assert session.commit(reserved.ticket, written) == [False]
        assert second == [[True]]
        host.check()


def test_what_another_tier_turned_out_to_have_is_visible():
    with Host() as host:
        session = host.session()
        reserved = reserve(session, [1])
        written = fill(session, reserved, [1])
        with host.state.lock:
            host.state.enter([host.state.learn(keys([1])[0], NBYTES)], TierNumber.NVME)
        assert session.commit(reserved.ticket, written) == [True]
        host.check()


def test_a_session_may_reserve_so_much_at_once():
    limits = Limits(session_leased=1 << 30, session_reserved=2 * SLOT_NBYTES)
    with Host(limits=limits) as host:
        session, other = host.session(), host.session()
        reserved = reserve(session, [1, 2, 3, 4])
        assert states(reserved) == [GRANTED, GRANTED, REFUSED, REFUSED]
        assert reserved.reason == "quota"
        assert host.stats.refused == {"quota": 2}
        assert states(reserve(session, [5])) == [REFUSED]
        assert states(reserve(other, [5])) == [GRANTED]
        session.commit(reserved.ticket, fill(session, reserved, [1, 2, 3, 4]))
        assert states(reserve(session, [1, 2, 3, 4])) == [STORED, STORED, GRANTED, GRANTED]


def test_a_payload_larger_than_the_tier_is_refused():
    with Host() as host:
        reserved = host.session().reserve(keys([1]), [100 * SLOT_NBYTES], 0)
        assert (states(reserved), reserved.reason, reserved.ticket) == ([REFUSED], "too_large", 0)


@pytest.mark.parametrize(("sizes", "start"), [([NBYTES], 0), ([NBYTES] * 3, 0), ([0, 1], 0), ([], 3), ([1] * 3, -1)])
def test_sizes_that_do_not_fit_the_keys_grant_nothing(sizes, start):
    with Host() as host:
        with pytest.raises(UsageError):
            host.session().reserve(keys([1, 2]), sizes, start)
        assert host.state.cpu.pool.used == 0


def test_nothing_to_reserve_is_fine():
    with Host() as host:
        reserved = host.session().reserve(keys([1]), [], 1)
        assert (reserved.ticket, len(reserved.grants), reserved.reason) == (0, 0, "")


def test_a_save_never_waits_for_what_only_memory_has():
    """The tier is full of blocks that NVMe could keep: refused, counted, and room for the next one."""
    with Host(blocks=16, limits=replace(PLENTY, high=1.0)) as host:
        session = host.session()
        assert save(session, range(14)) == 14
        reserved = reserve(session, [100, 101, 102])
        assert (states(reserved), reserved.reason) == ([GRANTED, GRANTED, REFUSED], "pressure")
        assert host.stats.refused == {"pressure": 1}
        session.commit(reserved.ticket, [])
        host.mover.drain()
        assert save(session, [100, 101, 102]) == 3
        assert host.stats.dropped == {}
        host.check()


def test_while_nvme_cannot_keep_up_what_would_be_written_last_leaves():
    """Chains of four. The oldest is being written; next in line are 7 6 5 4. The last two, 5 and 4, cannot leave before
    their descendants, and two are enough."""
    with Host(blocks=16, limits=replace(PLENTY, high=0.99, low=0.75)) as host:
        session = host.session()
        reached = threading.Event()
        host.nvme.hooks["write"] = reached.set
        host.nvme.gate.clear()
        for first in range(0, 16, 4):
            assert save(session, range(first, first + 4)) == 4
        assert reached.wait(10.0)
        assert save(session, [100, 101]) == 2
        assert host.stats.dropped == {"nvme_behind": 2}
        assert [seed for seed in range(16) if not host.tiers_of(seed)] == [6, 7]
        host.nvme.gate.set()
        host.mover.drain()
        assert host.stats.dropped == {"nvme_behind": 2}
        host.check()


def test_what_another_tier_has_too_makes_room_at_once():
    with Host(blocks=16, limits=PLENTY) as host:
        session = host.session()
        save(session, range(12))
        session.move(keys(range(12)), TierNumber.NVME, 5.0)
        session.prefetch(keys(range(12)), TierNumber.CPU).result(5.0)
        host.nvme.gate.clear()
        assert save(session, range(100, 108)) == 8
        assert host.tiers_of(0) == ["cpu", "nvme"]
        assert host.tiers_of(11) == ["nvme"]
        host.check()


def test_without_a_tier_below_the_oldest_leave():
    with Host(blocks=16, nvme=None, limits=PLENTY) as host:
        session = host.session()
        save(session, range(10))
        save(session, range(20, 26))
        session.release(session.match(keys(range(4)), 0.0).lease)
        host.mover.drain()
        assert len(host.state.table) == 16, "nothing leaves before its room is needed"
        assert save(session, range(30, 34)) == 4
        assert [seed for seed in range(10) if host.tiers_of(seed)] == list(range(6))
        assert host.stats.dropped == {"cpu_evicted": 4}
        host.check()


def test_a_save_does_not_evict_its_own_ancestors():
    """It would make room for blocks that nobody can reach any more."""
    with Host(blocks=16, nvme=None, limits=PLENTY) as host:
        session = host.session()
        save(session, range(16))
        reserved = reserve(session, range(20), start=16)
        assert set(states(reserved)) == {REFUSED}
        assert reserved.reason == "pressure"
        assert len(session.match(keys(range(16)), 0.0).slots) == 16


def test_leased_blocks_stay():
    with Host(blocks=16, nvme=None, limits=PLENTY) as host:
        session = host.session()
        save(session, range(16))
        matched = session.match(keys(range(14)), 0.0)
        assert save(session, range(50, 60)) == 2
        assert holds(session, matched, range(14))
        assert host.hierarchy.inspect(keys([0]))[0]["leased"]
        session.release(matched.lease)
        assert save(session, range(60, 66)) == 6
        host.check()


def test_a_middle_that_is_saved_anew_becomes_the_parent_of_what_was_there():
    with Host(nvme=None, limits=PLENTY) as host:
        session = host.session()
        save(session, [1, 2, 3])
        host.hierarchy.condemn(keys([2]), "bad_checksum")
        host.mover.drain()
        assert save(session, [1, 2, 3]) == 1
        table = host.state.table
        assert table.parent_of(table.rows[keys([3])[0]]) == table.rows[keys([2])[0]]
        lease = host.state.cpu.pool
        lease.retain(table.offset[[table.rows[keys([3])[0]]]])
        assert host.state.policies[TierNumber.CPU].victims(PAGE, host.state.pinned) == [], "the leased tail keeps all"


def test_the_reserve_for_staging_is_left_alone():
    limits = Limits(session_leased=1 << 30, session_reserved=1 << 30, staging_reserve=0.25)
    with Host(blocks=16, limits=limits) as host:
        session = host.session()
        host.nvme.gate.clear()
        assert save(session, range(16)) == 12
        host.nvme.gate.set()


class TestSizeClasses:
    """A second model gets its share."""

    def test_with_a_tier_below(self):
        with Host(blocks=64, limits=PLENTY) as host:
            session = host.session()
            for first in range(0, 64, 8):
                save(session, range(first, first + 8))
            for first in range(1000, 1064, 4):
                save(session, range(first, first + 4), 3 * SLOT_NBYTES - 100)
                host.mover.drain()
            large = [seed for seed in range(1000, 1064) if "cpu" in host.tiers_of(seed)]
            assert len(large) >= 10
            assert host.stats.dropped == {}
            host.check()

    def test_without_a_tier_below(self):
        with Host(blocks=64, nvme=None, limits=PLENTY) as host:
            session = host.session()
            for first in range(0, 64, 8):
                save(session, range(first, first + 8))
            for first in range(1000, 1032, 4):
                assert save(session, range(first, first + 4), 3 * SLOT_NBYTES - 100) == 4
            host.check()

    def test_first_blocks_of_a_size_of_their_own_do_not_empty_the_tier(self, monkeypatch):
        """As under plans with exact first tokens: each sequence leaves for about one other, in a few looks."""
        looks: list[int] = []
        choose = room.choose
        monkeypatch.setattr(room, "choose", lambda *args: looks.append(1) or choose(*args))
        with Host(blocks=1600, nvme=None, limits=PLENTY) as host:
            session = host.session()
            length, stored = 40, []
            for first in range(0, 100 * length, length):
                seeds = range(first, first + length)
                sizes = [2 * NBYTES, *[NBYTES] * (length - 1)]
                reserved = session.reserve(keys(seeds), sizes, 0)
                assert not reserved.reason
                for i, offset in enumerate(reserved.grants["offset"].tolist()):
                    payload = payload_of(seeds[i], sizes[i])
                    session.writable()[offset : offset + sizes[i]] = np.frombuffer(payload, np.uint8)
                assert all(session.commit(reserved.ticket, range(length)))
                stored.append(len(host.state.table))
            full = stored.index(max(stored))
            assert min(stored[full:]) > 0.8 * max(stored)
            assert len(looks) < 4 * len(stored)
            host.check()

    def test_nothing_leaves_for_nothing_where_something_is_pinned_in_every_segment(self):
        with Host(blocks=32, nvme=None, limits=PLENTY) as host:
            session = host.session()
            save(session, range(32))
            pool, state = host.state.cpu.pool, host.state
            heads = {pool.segment(offset): offset for offset in state.at}
            for offset in heads.values():
                pool.retain(state.table.offset[[state.at[offset]]])
            assert save(session, [1000], 20 * SLOT_NBYTES) == 0
            assert len(state.table) == 32
            assert host.stats.dropped == {}

    def test_a_pinned_segment_is_passed_over_for_one_that_can_be_emptied(self):
        with Host(blocks=64, nvme=None, limits=PLENTY) as host:
            session = host.session()
            for seed in range(64):
                save(session, [seed])
            matched = session.match(keys([1]), 0.0)
            session.release(session.match(keys([0]), 0.0).lease)
            assert save(session, [1000], 2 * SLOT_NBYTES) == 1
            assert holds(session, matched, [1])
            host.check()


def test_a_chain_that_meets_itself_is_refused():
    with Host() as host, pytest.raises(UsageError, match="twice"):
        reserve(host.session(), [1, 1])


def test_keys_that_claim_to_be_each_others_parents_can_still_be_evicted():
    with Host() as host:
        session = host.session()
        save(session, [1, 2])
        reserved = reserve(session, [2, 1, 3])
        session.commit(reserved.ticket, fill(session, reserved, [2, 1, 3]))
        policy = host.state.policies[TierNumber.CPU]
        assert sorted(policy.victims(3 * SLOT_NBYTES, lambda _: False)) == sorted(host.state.table.rows.values())


def test_seconds_that_are_no_seconds_are_not_counted():
    with Host() as host:
        session = host.session()
        for seconds in (float("nan"), float("inf"), -1.0):
            reserved = reserve(session, [9])
            session.commit(reserved.ticket, [], seconds)
        assert sum(host.stats.seconds["save"].buckets) == 0
