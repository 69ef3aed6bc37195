"""What those who follow a host are told: each tier's blocks, in order, never without a word about what is missing."""

from __future__ import annotations

from kvtier.hierarchy.news import Entered, Left, News, Run
from kvtier.tiers.base import TierNumber
from tests.hierarchy_fixture import Host, keys, save

CPU, NVME = TierNumber.CPU, TierNumber.NVME


def follow(host: Host, **limits: int) -> News:
    with host.state.lock:
        host.state.news = News(host.state.table, **limits)
    return host.state.news


def test_a_saved_chain_is_one_run_behind_its_parent():
    with Host() as host:
        session, news = host.session(), follow(host)
        save(session, range(3))
        save(session, range(5))
        first, second = news.take()[0]
        assert [type(first), first.tier, second.tier] == [Entered, CPU, CPU]
        assert [(run.keys, run.parent) for run in first.runs] == [(keys(range(3)), None)]
        assert [(run.keys, run.parent) for run in second.runs] == [(keys([3, 4]), keys([2])[0])]
        assert first.runs[0].tokens > 0
        assert news.take() == ([], False)


def test_lookups_and_refused_saves_tell_nothing():
    with Host() as host:
        session, news = host.session(), follow(host)
        save(session, range(3))
        news.take()
        session.release(session.match(keys(range(4)), 0.0).lease)
        save(session, range(3))
        session.inspect(keys(range(3)))
        session.where(keys(range(3)))
        assert (news.waiting, news.take()) == (0, ([], False))


def test_every_tier_is_told_of_by_itself():
    with Host() as host:
        session, news = host.session(), follow(host)
        save(session, range(2))
        host.hierarchy.move(keys(range(2)), NVME).result(5.0)
        changes, lost = news.take()
        assert not lost
        assert [(type(change), change.tier) for change in changes] == [(Entered, CPU), (Entered, NVME), (Left, CPU)]
        assert sorted(changes[2].keys) == sorted(keys(range(2)))


def test_what_is_cleared_leaves_each_tier_that_had_it():
    with Host() as host:
        session, news = host.session(), follow(host)
        save(session, range(2))
        host.hierarchy.prefetch(keys(range(2)), CPU).result(5.0)
        news.take()
        assert session.evict(keys(range(2))) == 2
        changes, _ = news.take()
        assert {(type(change), change.tier) for change in changes} == {(Left, CPU)}
        assert {key for change in changes for key in change.keys} == set(keys(range(2)))


def test_more_than_may_wait_is_lost_and_said():
    with Host() as host:
        session, news = host.session(), follow(host, waiting=3)
        save(session, range(2))
        save(session, range(4))
        assert news.waiting == 0
        save(session, range(5))
        assert news.take() == ([], True)
        save(session, range(6))
        (change,), lost = news.take()
        assert not lost
        assert change.runs == [Run(keys([5]), keys([4])[0], change.runs[0].tokens)]


def test_the_parts_are_all_there_is():
    with Host(stored=range(10, 14)) as host:
        session, news = host.session(), follow(host)
        save(session, range(5))
        session.evict(keys([4]))
        told: dict[TierNumber, set[bytes]] = {CPU: set(), NVME: set()}
        start, parts = 0, 0
        while start >= 0:
            with host.state.lock:
                found, start = news.part(start, 3)
            parts += 1
            for entered in found:
                told[entered.tier].update(key for run in entered.runs for key in run.keys)
        assert told == {CPU: set(keys(range(4))), NVME: set(keys(range(10, 14)))}
        assert parts == 3


def test_what_came_from_an_earlier_life_has_no_known_parent():
    with Host(stored=range(3)) as host:
        news = follow(host)
        with host.state.lock:
            (entered,), _ = news.part(0, 100)
        assert {run.parent for run in entered.runs} == {None}
        assert {tuple(run.keys) for run in entered.runs} == {(key,) for key in keys(range(3))}
