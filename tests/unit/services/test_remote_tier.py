"""A tier behind calls is a tier, and whoever may still touch a slot is cut off before the slot is given away."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from kvtier.errors import ClosedError, TierUnavailable
from kvtier.memory.arena import Arena
from kvtier.testing.memory_tier import MemoryTier
from kvtier.testing.tier import MakeTier, TierKit
from kvtier.tiers.base import Slots
from kvtier.tiers.gpu import GpuTier
from kvtier.tiers.nvme import NvmeTier
from kvtier_services.actors import remote as remote_module
from kvtier_services.actors.fence import arena_mark, fence, lock_path
from kvtier_services.actors.remote import RemoteTier
from kvtier_services.actors.service import TierService


class Process:
    """A tier's process, as far as the hierarchy sees it; it can stop answering."""

    def __init__(self, service: TierService) -> None:
        self.service = service
        self.trouble: Exception | None = None
        self.calls: list[str] = []

    def __call__(self, method, *args, timeout):
        self.calls.append(method)
        assert timeout > 0
        if self.trouble is not None:
            raise self.trouble
        return getattr(self.service, method)(*args)


@pytest.fixture
def arena(tmp_path):
    owned = Arena.own(tmp_path / "arena", 16 << 20)
    yield owned
    owned.close()


class RemoteKit(TierKit):
    """Every test writes through one mapping of the arena, and the tier through another."""

    @pytest.fixture
    def arena(self, tmp_path):
        owned = Arena.own(tmp_path / "arena", 16 << 20)
        yield owned
        owned.close()


class TestRemoteNvme(RemoteKit):
    @pytest.fixture
    def make_tier(self, tmp_path) -> MakeTier:
        def make(arena: Arena, capacity: int) -> RemoteTier:
            return remote(arena, lambda mapped: NvmeTier(tmp_path / "store", capacity, mapped), "nvme")[0]

        return make


class TestRemoteGpu(RemoteKit):
    @pytest.fixture
    def make_tier(self) -> MakeTier:
        def make(arena: Arena, capacity: int) -> RemoteTier:
            return remote(arena, lambda mapped: GpuTier(capacity, mapped, device="cpu"), "gpu")[0]

        return make


def remote(arena: Arena, open_tier, name: str = "nvme", fenced=None):
    process = Process(TierService(name, arena.folder, open_tier))
    fences = (lambda: fenced.append(name)) if fenced is not None else partial(fence, lock_path(arena.folder, name))
    tier = RemoteTier(name, process, label=name, arena=arena_mark(arena.folder), fence=fences)
    assert tier.connect(), tier.fault
    return tier, process


@pytest.fixture
def fenced() -> list[str]:
    return []


@pytest.fixture
def tier_and_process(arena, fenced):
    return remote(arena, lambda mapped: MemoryTier(mapped, 1 << 20), fenced=fenced)


SLOTS = Slots.of([0], [4096])
KEY = b"k" * 34


@pytest.mark.parametrize("trouble", [TimeoutError("late"), ConnectionError("gone"), RuntimeError("a bug there")])
def test_a_copy_that_ends_without_an_answer_is_fenced(tier_and_process, fenced, trouble):
    tier, process = tier_and_process
    for call in (tier.read, tier.write):
        assert tier.connect()
        fenced.clear()
        process.trouble = trouble
        with pytest.raises(TierUnavailable):
            call([KEY], SLOTS)
        assert fenced == ["nvme"]
        assert not tier.connected
        process.trouble = None


def test_a_late_answer_to_a_question_fences_nobody(tier_and_process, fenced):
    tier, process = tier_and_process
    process.trouble = TimeoutError("late")
    with pytest.raises(TierUnavailable):
        tier.contains([KEY])
    assert tier.connected
    assert fenced == []


def test_while_it_is_away_nobody_is_asked(tier_and_process):
    tier, process = tier_and_process
    process.trouble = ConnectionError("gone")
    with pytest.raises(TierUnavailable):
        tier.contains([KEY])
    process.calls.clear()
    for call in (tier.contains, tier.remove):
        with pytest.raises(TierUnavailable, match="nvme tier is away: gone"):
            call([KEY])
    assert process.calls == []


def test_usage_never_raises_and_says_the_fault(tier_and_process):
    tier, process = tier_and_process
    assert tier.usage().capacity == 1 << 20
    process.trouble = ConnectionError("gone")
    usage = tier.usage()
    assert (usage.capacity, usage.fault) == (1 << 20, "gone")


def test_a_slow_process_is_asked_for_its_usage_by_one_at_a_time(tier_and_process, monkeypatch):
    tier, process = tier_and_process
    monkeypatch.setattr(remote_module, "USAGE_PATIENCE", 0.0)
    usage = tier.usage()
    with tier._asking:
        process.calls.clear()
        assert tier.usage() == replace(usage, fault="the nvme tier is slow to answer")
        assert process.calls == []
    assert tier.usage() == usage


def test_a_restarted_process_answers_no_old_pass(tier_and_process, arena, fenced):
    tier, process = tier_and_process
    process.service.stop()
    process.service = TierService("nvme", arena.folder, lambda mapped: MemoryTier(mapped, 1 << 20))
    with pytest.raises(TierUnavailable, match="was restarted"):
        tier.read([KEY], SLOTS)
    assert fenced == [], "it answered: nothing is under way"
    assert not tier.connected
    assert tier.connect()
    assert tier.read([KEY], SLOTS) == [False]
    assert tier.connects == 2


def test_a_hello_that_fails_is_fenced(tier_and_process, fenced):
    tier, process = tier_and_process
    process.trouble = TimeoutError("still opening")
    assert not tier.connect()
    assert fenced == ["nvme"]
    assert tier.fault == "still opening"


def test_a_second_hierarchy_takes_over(tier_and_process, arena):
    first, process = tier_and_process
    second = RemoteTier("nvme", process, label="nvme", arena=arena_mark(arena.folder), fence=lambda: None)
    assert second.connect()
    with pytest.raises(TierUnavailable, match="serves another hierarchy"):
        first.contains([KEY])
    assert second.contains([KEY]) == [False]


def test_a_tier_serves_only_the_arena_that_is_there(arena, tmp_path):
    process = Process(TierService("nvme", arena.folder, lambda mapped: MemoryTier(mapped, 1 << 20)))
    stranger = RemoteTier("nvme", process, label="nvme", arena="1:2:3", fence=lambda: None)
    assert not stranger.connect()
    assert "is not the one of the hierarchy that asks" in stranger.fault


def test_why_a_tier_does_not_open_is_said(arena):
    def open_tier(mapped):
        raise OSError("no such device")

    process = Process(TierService("nvme", arena.folder, open_tier))
    tier = RemoteTier("nvme", process, label="nvme", arena=arena_mark(arena.folder), fence=lambda: None)
    assert not tier.connect()
    assert tier.fault == "the nvme tier: no such device"
    assert not fence(lock_path(arena.folder, "nvme")), "it holds no lock"


def test_after_close_it_is_closed(tier_and_process):
    tier, _ = tier_and_process
    tier.close()
    with pytest.raises(ClosedError):
        tier.read([KEY], SLOTS)


def test_a_new_hello_waits_for_what_is_under_way(arena):
    from concurrent.futures import ThreadPoolExecutor

    tiers = []

    def open_tier(mapped):
        tiers.append(MemoryTier(mapped, 1 << 20))
        return tiers[-1]

    tier, process = remote(arena, open_tier)
    tiers[0].gate.clear()
    with ThreadPoolExecutor(2) as threads:
        reading = threads.submit(tier.read, [KEY], SLOTS)
        while process.calls[-1] != "read":
            pass
        second = RemoteTier("nvme", process, label="nvme", arena=arena_mark(arena.folder), fence=lambda: None)
        greeting = threads.submit(second.connect)
        while process.calls[-1] != "hello":
            pass
        assert not greeting.done()
        tiers[0].gate.set()
        assert reading.result(5.0) == [False]
        assert greeting.result(5.0)
