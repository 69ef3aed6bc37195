"""What keyspaces take, and what is freed when one may not take more."""

from __future__ import annotations

import numpy as np

from kvtier.block import PAGE, SPACE_NBYTES, slot_nbytes
from kvtier.client.local import LocalSession
from kvtier.hierarchy import retention
from kvtier.hierarchy.accounts import Accounts
from kvtier.memory.arena import Arena
from kvtier.testing.payloads import key_of
from kvtier.testing.session import CAPACITY, NBYTES, PATIENCE, chain, found, host_over, save
from kvtier.tiers.base import TierNumber


def spaces_of(state, seeds):
    return frozenset(state.table.known_space(key_of(seed)[:SPACE_NBYTES]) for seed in seeds)


def test_a_keyspace_takes_what_its_blocks_take_in_each_tier():
    with host_over(Arena.private(CAPACITY)) as host:
        state, session, size = host.hierarchy.state, LocalSession(host.hierarchy), slot_nbytes(NBYTES)
        save(session, 0, 100)
        all_of_them, two = spaces_of(state, range(100)), spaces_of(state, (3, 7))
        assert state.accounts.held(TierNumber.CPU, all_of_them) == 100 * size
        assert state.accounts.held(TierNumber.CPU, two) == 2 * size
        session.move(chain(0, 100), TierNumber.NVME, PATIENCE)
        assert [state.accounts.held(tier, two) for tier in (TierNumber.CPU, TierNumber.NVME)] == [0, 2 * size]
        session.evict(chain(0, 100))
        assert state.accounts.held(TierNumber.NVME, all_of_them) == 0
        assert state.accounts.held(TierNumber.CPU, [-1, 1 << 20]) == 0


def test_only_blocks_of_the_named_keyspaces_are_shed_and_none_that_somebody_holds():
    with host_over(Arena.private(CAPACITY)) as host:
        state, session, size = host.hierarchy.state, LocalSession(host.hierarchy), slot_nbytes(NBYTES)
        for seed in range(6):
            save(session, seed, 1)
        session.match(chain(0, 1), 0.0)
        with state.lock:
            freed = retention.shed(state, spaces_of(state, (0, 1, 2, 3)), 2 * size)
            assert retention.shed(state, spaces_of(state, (0,)), size) == 0
        assert freed == 2 * size
        assert [found(session, seed, 1) for seed in range(6)] == [1, 0, 0, 1, 1, 1]
        assert state.stats.dropped["quota"] == 2


def test_children_leave_with_their_parents_and_keep_them_while_they_are_held():
    with host_over(Arena.private(CAPACITY)) as host:
        state, session, size = host.hierarchy.state, LocalSession(host.hierarchy), slot_nbytes(NBYTES)
        save(session, 0, 4)
        save(session, 10, 2)
        mine = spaces_of(state, (*range(4), 10, 11))
        leased = session.match(chain(10, 2), 0.0)
        with state.lock:
            assert retention.shed(state, mine, size) == size
            assert retention.shed(state, mine, size, frozenset(state.rows(chain(1, 1)))) == size
            assert [found(session, *one) for one in ((0, 4), (10, 2))] == [2, 2]
            assert retention.shed(state, mine, 100 * size) == 2 * size
        assert [found(session, *one) for one in ((0, 4), (10, 2))] == [0, 2]
        session.release(leased.lease)


def test_a_save_gets_no_more_than_its_allowance():
    with host_over(Arena.private(CAPACITY)) as host:
        session, size = LocalSession(host.hierarchy), slot_nbytes(NBYTES)
        for allowance, granted in ((0, 0), (size - 1, 0), (3 * size, 3)):
            reserved = host.hierarchy.reserve(session._number, chain(0, 5), [NBYTES] * 5, 0, allowance=allowance)
            assert np.count_nonzero(reserved.grants["generation"]) == granted
            assert reserved.reason == "quota"
            session.commit(reserved.ticket, [])


def test_pins_end_at_the_allowance():
    with host_over(Arena.private(CAPACITY)) as host:
        session, size = LocalSession(host.hierarchy), slot_nbytes(NBYTES)
        save(session, 0, 5)
        assert host.hierarchy.pin(session._number, chain(0, 5), 60.0, lambda: 2 * size).result(PATIENCE) == 2
        assert host.hierarchy.state.ledger.pinned_nbytes == 2 * size


def test_who_shares_a_tier_takes_no_more_than_that_and_others_what_they_like():
    accounts, spaces, sizes = Accounts(), np.array([1, 2, 1, 3], np.uint32), np.full(4, PAGE, np.int64)
    assert accounts.within(TierNumber.NVME, spaces, sizes).all()
    accounts.shares = lambda tier: [(frozenset({1, 3}), 3 * PAGE)] if tier is TierNumber.NVME else []
    accounts.enter(TierNumber.NVME, np.array([1], np.uint32), np.array([1], np.int64))
    assert accounts.within(TierNumber.NVME, spaces, sizes).tolist() == [True, True, True, False]
    assert accounts.within(TierNumber.CPU, spaces, sizes).all()
    assert accounts.within(TierNumber.NVME, spaces[:0], sizes[:0]).tolist() == []
