"""The CPU tier's actor as a plain object: it starts by itself, says why it cannot, and takes its tiers up again."""

from __future__ import annotations

import asyncio
import dataclasses
import grp
import os
import threading

import msgspec
import pytest

from kvtier.client.local import LocalSession
from kvtier.errors import ConfigError
from kvtier.index.local import LocalStore
from kvtier.memory.arena import Arena
from kvtier.testing.memory_peers import Network
from kvtier.testing.session import found, save
from kvtier.tiers.base import TierNumber
from kvtier_services.actors import cpu_tier
from tests.unit.services.host import FakeDoor, FakeHand, make_actor, make_host, settings_in


@pytest.fixture
def door() -> FakeDoor:
    return FakeDoor()


@pytest.fixture
def settings(tmp_path, monkeypatch):
    monkeypatch.setattr(cpu_tier, "RETRY", 0.01)
    monkeypatch.setattr(cpu_tier, "LOOK", 0.01)
    return settings_in(tmp_path)


async def until(check) -> None:
    for _ in range(1000):
        if check():
            return
        await asyncio.sleep(0.005)
    pytest.fail("not in time")


async def test_it_starts_by_itself_and_stops_without_a_trace(settings, door):
    actor = make_actor(settings, door, FakeHand(settings))
    status = await actor.ready(10.0)
    assert (status["serving"], status["fault"]) == (True, "")
    assert status["metrics"] == {"url": "http://here", "fault": ""}
    assert [(hand["tier"], hand["connected"], hand["connects"]) for hand in status["hands"]] == [("nvme", True, 1)]
    assert {tier["tier"] for tier in status["hierarchy"]["tiers"]} == {"cpu", "nvme"}
    assert status["arena"] == {"ready": 4 << 20, "capacity": 4 << 20, "fault": ""}
    assert await actor.stop(1.0) == {"written": 0, "lost": 0}
    assert door.log == ["start", "stop"]
    assert not settings.arena_dir.exists()


async def test_a_failed_start_is_said_and_tried_again(settings, door):
    owner = Arena.own(settings.arena_dir, 1 << 20)
    door.trouble = [ConfigError("the socket is taken")]
    actor = make_actor(settings, door)
    try:
        owner.close()
        status = await actor.ready(10.0)
        assert (status["serving"], status["fault"]) == (False, "the socket is taken")
        await until(lambda: door.log == ["start", "start"])
        await until(lambda: actor._fault == "")
        assert (await actor.status())["serving"]
    finally:
        await actor.stop(0.0)


async def test_an_arena_that_does_not_fit_is_a_fault(tmp_path, door):
    actor = make_actor(settings_in(tmp_path, capacity=1 << 60), door)
    status = await actor.ready(10.0)
    assert "set cpu.capacity to at most" in status["fault"]
    assert status["hierarchy"] is None
    assert await actor.stop(0.0) == {"written": 0, "lost": 0}


async def test_a_tier_that_is_away_at_the_start_is_taken_up_later(settings, door):
    hand = FakeHand(settings)
    hand.trouble = ConnectionError("not yet")
    actor = make_actor(settings, door, hand)
    status = await actor.ready(10.0)
    assert status["serving"]
    assert status["hands"][0]["fault"] == "not yet"
    hand.trouble = None
    await until(lambda: actor._hands.held[0].remote.connected)
    await actor.stop(0.0)


async def test_what_a_tier_lost_with_its_process_is_forgotten(settings, door):
    hand = FakeHand(settings)
    actor = make_actor(settings, door, hand)
    await actor.ready(10.0)
    session = LocalSession(actor._hierarchy)
    await asyncio.to_thread(save, session, 0, 3)
    assert await asyncio.to_thread(session.move, [*_chain(3)], TierNumber.NVME, 5.0) == 3
    hand.service.stop()
    hand.restart()
    await until(lambda: actor._hands.held[0].remote.connects == 2)
    await until(lambda: len(actor._hierarchy.state.table) == 0)
    assert await asyncio.to_thread(found, session, 0, 3) == 0
    assert (await actor.status())["hierarchy"]["dropped"] == {"nvme_lost": 3}
    session.close()
    await actor.stop(0.0)


async def test_what_a_tier_kept_is_known_again(settings, door):
    hand = FakeHand(settings)
    actor = make_actor(settings, door, hand)
    await actor.ready(10.0)
    session = LocalSession(actor._hierarchy)
    await asyncio.to_thread(save, session, 0, 3)
    assert await asyncio.to_thread(session.move, [*_chain(3)], TierNumber.NVME, 5.0) == 3
    session.close()
    assert await actor.stop(0.0) == {"written": 0, "lost": 0}

    again = make_actor(settings, FakeDoor(), hand)
    kept = hand.tier._stored
    hand.service._open_tier = lambda arena: _with(hand, arena, kept)
    await again.ready(10.0)
    session = LocalSession(again._hierarchy)
    matched = await asyncio.to_thread(session.match, [*_chain(3)], 2.0)
    assert len(matched.slots) == 3
    session.close()
    await again.stop(0.0)


async def test_devices_come_and_go_one_by_one(settings, door):
    one, two = hands = [FakeHand(settings, name) for name in ("nvme-1", "nvme-2")]
    actor = make_actor(settings, door, *hands)
    status = await actor.ready(10.0)
    assert [(hand["tier"], hand["device"]) for hand in status["hands"]] == [
        ("nvme-1", "/nvme-1"),
        ("nvme-2", "/nvme-2"),
    ]
    session = LocalSession(actor._hierarchy)
    keys = [*_chain(40)]
    await asyncio.to_thread(save, session, 0, 40)
    assert await asyncio.to_thread(session.move, keys, TierNumber.NVME, 5.0) == 40
    of_one, of_two = ([key for key in keys if key in hand.tier._stored] for hand in hands)
    assert min(len(of_one), len(of_two)) >= 10

    def matched(key: bytes) -> int:
        found = session.match([key], 2.0)
        session.release(found.lease)
        return len(found.slots)

    def gone(_arena):
        raise ConnectionError("gone")

    kept = one.tier._stored
    one.die(gone)
    await until(lambda: actor._hands.held[0].remote.fault == "gone")
    assert [await asyncio.to_thread(matched, key) for key in of_two] == [1] * len(of_two)
    assert await asyncio.to_thread(matched, of_one[0]) == 0
    (nvme,) = [tier for tier in (await actor.status())["hierarchy"]["tiers"] if tier["tier"] == "nvme"]
    assert nvme["fault"] == "/nvme-1: gone"
    assert {device["device"]: device["fault"] for device in nvme["devices"]} == {"/nvme-1": "gone", "/nvme-2": ""}

    lost = of_one.pop()
    one.restart({key: kept[key] for key in of_one})
    await until(lambda: actor._hands.held[0].remote.connects == 2)
    await until(lambda: len(actor._hierarchy.state.table) == 39)
    assert [await asyncio.to_thread(matched, key) for key in of_one] == [1] * len(of_one)
    assert await asyncio.to_thread(matched, lost) == 0
    assert two.tier._stored.keys() == set(of_two)
    assert actor._hands.held[1].remote.connects == 1
    session.close()
    await actor.stop(0.0)


async def test_a_device_whose_process_hangs_holds_up_no_other(settings, door):
    """It is looked after on a thread of its own."""
    go_on = threading.Event()
    one, two = hands = [FakeHand(settings, name) for name in ("nvme-1", "nvme-2")]
    actor = make_actor(settings, door, *hands)
    await actor.ready(10.0)
    hangs = threading.Event()

    def hang(_arena):
        hangs.set()
        go_on.wait()
        raise ConnectionError("it hung")

    one.die(hang)
    try:
        await until(hangs.is_set)
        before = two.service
        two.restart()
        before.stop()
        await until(lambda: actor._hands.held[1].remote.connects == 2)
        assert not actor._hands.held[0].remote.connected
    finally:
        go_on.set()
        await actor.stop(0.0)


async def test_a_group_gets_into_the_arena_and_nobody_else(tmp_path, door):
    group = grp.getgrgid(os.getgid())
    settings = settings_in(tmp_path)
    settings = dataclasses.replace(settings, config=msgspec.structs.replace(settings.config, group=group.gr_name))
    actor = make_actor(settings, door)
    await actor.ready(10.0)
    modes = {path.name: path.stat().st_mode & 0o7777 for path in settings.arena_dir.iterdir() if path.name != "lock"}
    assert modes == {"arena": 0o660, "clients": 0o2770, "tables": 0o660}
    assert settings.arena_dir.stat().st_mode & 0o7777 == 0o770
    assert (settings.arena_dir / "clients").stat().st_gid == group.gr_gid
    await actor.stop(0.0)


async def test_stopping_writes_down_what_only_memory_has(settings, door):
    hand = FakeHand(settings)
    actor = make_actor(settings, door, hand)
    await actor.ready(10.0)
    session = LocalSession(actor._hierarchy)
    await asyncio.to_thread(save, session, 0, 4)
    session.close()
    assert await actor.stop(5.0) == {"written": 4, "lost": 0}
    assert len(hand.tier._stored) == 4


async def test_what_cannot_be_written_down_is_counted(settings, door):
    actor = make_actor(settings, door)
    await actor.ready(10.0)
    session = LocalSession(actor._hierarchy)
    await asyncio.to_thread(save, session, 0, 4)
    session.close()
    assert await actor.stop(5.0) == {"written": 0, "lost": 4}


async def test_a_host_that_is_drained_hands_over_and_is_forgotten(tmp_path):
    store, network = LocalStore(), Network()
    near, far = (make_host(settings_in(tmp_path / name), store, network, name) for name in "ab")
    await near.ready(10.0)
    assert (await far.ready(10.0))["peers"] == {"door": "b:1"}
    session = LocalSession(near._hierarchy)
    assert await asyncio.to_thread(save, session, 0, 4) == 4
    assert await near.drain(10.0) == {"offered": 4, "taken": 4, "handed": 4}
    assert await asyncio.to_thread(save, session, 10, 4) == 0
    session.close()
    await near.stop(1.0)
    assert [node.host for node in store.nodes.values() if node.alive] == ["b"]
    reader = LocalSession(far._hierarchy)
    assert await asyncio.to_thread(found, reader, 0, 4) == 4
    reader.close()
    await far.stop(1.0)


def _chain(count: int):
    from kvtier.testing.session import chain

    return chain(0, count)


def _with(hand: FakeHand, arena: Arena, stored: dict):
    from kvtier.testing.memory_tier import MemoryTier

    hand.tier = MemoryTier(arena, 1 << 20)
    hand.tier._stored = stored
    return hand.tier
