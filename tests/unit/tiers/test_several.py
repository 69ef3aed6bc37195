"""Several devices are one tier; when one fails or goes away, the others go on, and what it has is back with it."""

from __future__ import annotations

import errno
import threading
from contextlib import closing
from pathlib import Path

import pytest

import kvtier
from kvtier.errors import ConfigError, TierUnavailable
from kvtier.memory.arena import Arena
from kvtier.testing.payloads import key_of
from kvtier.testing.tier import Desk
from kvtier.tiers.nvme import NvmeTier
from kvtier.tiers.several import Several
from kvtier.tiers.several.homes import Homes
from kvtier.tiers.several.tier import PAUSE
from tests.device_fixture import Device
from tests.unit.tiers.conftest import Clock, FaultyDisk

NBYTES = 5000
SEEDS = range(40)


class Pair:
    """Two devices as one tier, and a desk over it."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.arena = Arena.private(4 << 20)
        self.a, self.b = Device(self.arena), Device(self.arena)
        self.open(a=self.a, b=self.b)

    def open(self, **devices: Device) -> None:
        """Once more, as after a restart."""
        self.tier = Several("nvme", devices, clock=self.clock)
        self.desk = Desk(self.tier, self.arena, sizes=dict.fromkeys(range(1000), NBYTES))

    def write(self, seeds) -> list[bool]:
        return self.desk.write(seeds, NBYTES)

    def of(self, device: Device) -> list[int]:
        """Seeds of what a device has."""
        return [seed for seed in range(1000) if key_of(seed) in device.has()]


@pytest.fixture
def pair():
    made = Pair()
    yield made
    made.tier.close()


def test_blocks_are_spread_and_come_from_where_they_are(pair):
    assert all(pair.write(SEEDS))
    assert 10 <= len(pair.of(pair.a)) <= 30
    assert not pair.a.has() & pair.b.has()
    assert len(pair.a.has() | pair.b.has()) == len(SEEDS)
    assert all(pair.desk.read(SEEDS))


@pytest.mark.parametrize("call", ["read", "write"])
def test_a_batch_is_with_all_devices_at_the_same_time(pair, call):
    pair.write(SEEDS)
    both_there = threading.Barrier(2, timeout=10.0)
    pair.a.hook = pair.b.hook = both_there.wait
    assert all(pair.desk.read(SEEDS) if call == "read" else pair.write(SEEDS))
    pair.a.hook = pair.b.hook = lambda: None


def test_nothing_touches_the_slots_any_more_when_a_call_fails(pair):
    """The caller gives them away then."""
    pair.write(SEEDS)
    for failing, slow in ((pair.a, pair.b), (pair.b, pair.a)):
        go_on, fails = threading.Event(), threading.Event()
        ended: list[BaseException] = []

        def fail(fails=fails) -> None:
            fails.set()
            raise RuntimeError("a bug there")

        def call(ended=ended) -> None:
            with pytest.raises(RuntimeError, match="a bug there") as error:
                pair.desk.read(SEEDS)
            ended.append(error.value)

        failing.hook, slow.hook = fail, go_on.wait
        thread = threading.Thread(target=call)
        thread.start()
        assert fails.wait(10.0)
        thread.join(0.05)
        assert not ended
        go_on.set()
        thread.join(10.0)
        assert len(ended) == 1
        failing.hook = slow.hook = lambda: None


def test_while_a_device_is_away_the_other_one_serves_and_takes_its_share(pair):
    pair.write(SEEDS)
    of_a, of_b = pair.of(pair.a), pair.of(pair.b)
    pair.a.away = True
    assert pair.desk.read(of_b) == [True] * len(of_b)
    assert pair.desk.read([*of_a, *of_b]) == [False] * len(of_a) + [True] * len(of_b)
    assert pair.desk.contains([of_a[0], of_b[0]]) == [False, True]
    assert pair.tier.inventory().keys == [key_of(seed) for seed in of_b]
    assert all(pair.write(range(40, 80)))
    assert set(range(40, 80)) <= set(pair.of(pair.b))
    usage = pair.tier.usage()
    assert (usage.fault, usage.blocks) == ("a: away", len(of_b) + 40)
    assert {device: said.fault for device, said in pair.tier.devices.items()} == {"a": "away", "b": ""}


def test_a_call_that_is_about_nobody_who_is_there_says_so(pair):
    pair.write(SEEDS)
    pair.a.away = True
    with pytest.raises(TierUnavailable, match="away: a"):
        pair.desk.read(pair.of(pair.a))
    pair.b.away = True
    for call in (
        lambda: pair.write([1]),
        lambda: pair.desk.read(SEEDS),
        lambda: pair.desk.contains([1]),
        lambda: pair.tier.remove([key_of(1)]),
        pair.tier.inventory,
    ):
        with pytest.raises(TierUnavailable):
            call()
    assert pair.tier.usage().fault == "a: away; b: away"


def test_what_a_device_has_is_back_with_it_and_what_it_lost_is_told(pair):
    pair.write(SEEDS)
    of_a = pair.of(pair.a)
    pair.a.away = True
    pair.desk.read(SEEDS)
    with pytest.raises(TierUnavailable):
        pair.tier.returned("a")
    pair.a.away = False
    pair.a.evict(key_of(of_a[0]))
    pair.a.evicted.clear()  # its process did not live to tell
    has, gone = pair.tier.returned("a")
    assert has.keys == [key_of(seed) for seed in of_a[1:]]
    assert gone == [key_of(of_a[0])]
    assert pair.desk.read(of_a) == [False] + [True] * (len(of_a) - 1)
    pair.a.lose_all()
    has, gone = pair.tier.returned("a")
    assert (len(has), len(gone)) == (0, len(of_a) - 1)
    assert pair.tier.inventory().keys == [key_of(seed) for seed in pair.of(pair.b)]


def test_what_was_removed_while_a_device_was_away_does_not_come_back_with_it(pair):
    pair.write(SEEDS)
    one, two, *_ = pair.of(pair.a)
    pair.a.away = True
    pair.tier.remove([key_of(one), key_of(two)])
    pair.write([two])
    assert two in pair.of(pair.b)
    pair.a.away = False
    assert pair.desk.contains([one, two]) == [False, True]
    assert key_of(one) not in pair.tier.inventory().keys
    has, gone = pair.tier.returned("a")
    assert not {key_of(one), key_of(two)} & set(has.keys)
    assert gone == []
    assert not {one, two} & set(pair.of(pair.a))
    assert pair.desk.read([one, two]) == [False, True]


def test_of_a_block_that_was_saved_again_elsewhere_one_copy_stays(pair):
    pair.write(SEEDS)
    again = pair.of(pair.a)[:3]
    pair.a.away = True
    assert all(pair.write(again))
    pair.a.away = False
    has, _ = pair.tier.returned("a")
    assert not {key_of(seed) for seed in again} & set(has.keys)
    assert not pair.a.has() & pair.b.has()
    assert all(pair.desk.read(SEEDS))


def test_only_the_device_that_has_a_block_can_say_that_it_went(pair):
    pair.write(SEEDS)
    one, two, *_ = pair.of(pair.a)
    pair.a.away = True
    pair.write([one])
    pair.a.away = False
    for seed in (one, two):
        pair.a.evict(key_of(seed))
    assert pair.tier.dropped() == [key_of(two)]
    assert pair.desk.read([one, two]) == [True, False]
    assert pair.tier.dropped() == []


def test_after_a_restart_with_more_or_fewer_devices_blocks_are_found_where_they_are(pair):
    pair.write(SEEDS)
    of_a = pair.of(pair.a)
    c = Device(pair.arena)
    pair.open(c=c, b=pair.b, a=pair.a)
    assert all(pair.desk.read(SEEDS))
    assert all(pair.write(SEEDS)), "what is stored is not written anew"
    assert c.has() == set()
    assert all(pair.write(range(40, 100)))
    assert 5 <= len(pair.of(c)) <= 35
    pair.open(a=pair.a)
    assert pair.desk.read(SEEDS) == [seed in of_a for seed in SEEDS]
    assert pair.tier.inventory().keys == [key_of(seed) for seed in pair.of(pair.a)]


def test_two_copies_of_an_earlier_life_become_one(pair):
    pair.write(SEEDS)
    again = pair.of(pair.a)[:3]
    pair.a.away = True
    pair.write(again)
    pair.a.away = False
    pair.open(a=pair.a, b=pair.b)
    assert not pair.a.has() & pair.b.has()
    assert all(pair.desk.read(SEEDS))
    assert len(pair.tier.inventory()) == len(SEEDS)


def test_a_device_that_is_away_at_the_start_is_taken_up_when_it_comes(pair):
    pair.write(SEEDS)
    of_a = pair.of(pair.a)
    pair.a.away = True
    pair.open(a=pair.a, b=pair.b)
    assert pair.desk.read(SEEDS) == [seed not in of_a for seed in SEEDS]
    pair.a.away = False
    has, gone = pair.tier.returned("a")
    assert (has.keys, gone) == ([key_of(seed) for seed in of_a], [])
    assert all(pair.desk.read(SEEDS))


def test_a_further_device_takes_blocks_from_all_and_moves_none_between_the_others():
    """Rendezvous hashing: each of n devices has about 1/n, and a block moves only to the device that is added."""
    names = [f"/disk{n}" for n in range(5)]
    homes = Homes(names)
    keys = [key_of(seed) for seed in range(2000)]
    before = [homes.pick(key, names[:4]) for key in keys]
    after = [homes.pick(key, names) for key in keys]
    assert all(new in (old, names[4]) for old, new in zip(before, after, strict=True))
    for devices, picked in ((names[:4], before), (names, after)):
        share = len(keys) / len(devices)
        # 5 standard deviations of a binomial share
        assert all(abs(picked.count(device) - share) < 5 * share**0.5 for device in devices)
    assert [homes.pick(key, reversed(names)) for key in keys] == after


@pytest.fixture
def disks() -> dict[str, FaultyDisk]:
    return {"a": FaultyDisk(), "b": FaultyDisk()}


@pytest.fixture
def desk(tmp_path: Path, disks, clock: Clock):
    arena = Arena.private(4 << 20)
    tiers = {n: NvmeTier(tmp_path / n, 4 << 20, arena, disk=disk, clock=clock) for n, disk in disks.items()}
    with closing(Several("nvme", tiers, clock=clock)) as tier:
        yield Desk(tier, arena)


def blocks(desk: Desk) -> dict[str, int]:
    desk.tier.usage()
    return {device: usage.blocks for device, usage in desk.tier.devices.items()}


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC, errno.EROFS])
def test_what_a_failing_device_does_not_take_goes_to_the_next_until_it_is_well(desk, disks, clock, error):
    assert all(desk.write(SEEDS, NBYTES))
    before = blocks(desk)
    disks["a"].errors["pwritev"] = error
    assert all(desk.write(range(40, 80), NBYTES))
    assert blocks(desk) == {"a": before["a"], "b": before["b"] + 40}
    fault = desk.tier.usage().fault
    assert fault.startswith("a: writing to")
    assert "b:" not in fault
    assert all(desk.read(range(80))), "what was written before is still read"
    calls = disks["a"].calls["pwritev"]
    assert all(desk.write(range(80, 120), NBYTES))
    assert disks["a"].calls["pwritev"] == calls, "it is left alone"
    clock.now += PAUSE
    assert all(desk.write(range(120, 160), NBYTES)), "it is tried again, and fails"
    assert disks["a"].calls["pwritev"] > calls
    assert blocks(desk)["a"] == before["a"]

    disks["a"].errors.clear()
    clock.now += PAUSE
    assert all(desk.write(range(160, 200), NBYTES))
    assert blocks(desk)["a"] > before["a"]
    assert desk.tier.usage().fault == ""
    assert all(desk.read(range(200)))
    assert desk.tier.usage().counters["write_error"] >= 2


def test_blocks_that_cannot_be_read_are_misses_and_are_saved_again_elsewhere(desk, disks):
    assert all(desk.write(SEEDS, NBYTES))
    before = blocks(desk)
    disks["a"].errors["preadv"] = errno.EIO
    answers = desk.read(SEEDS)
    assert answers.count(False) == before["a"]
    assert desk.tier.usage().fault.startswith("a: reading in")
    assert all(desk.write(SEEDS, NBYTES))
    assert blocks(desk)["b"] == len(SEEDS)
    assert all(desk.read(SEEDS))


def test_a_device_whose_reads_failed_gets_blocks_again_although_nothing_was_read_since(desk, disks, clock):
    desk.write(SEEDS, NBYTES)
    before = blocks(desk)
    disks["a"].errors["preadv"] = errno.EIO
    desk.read(SEEDS)
    disks["a"].errors.clear()
    assert desk.tier.usage().fault
    clock.now += PAUSE
    for first in (40, 80):
        assert all(desk.write(range(first, first + 40), NBYTES))
    assert blocks(desk)["a"] - before["a"] > 20
    assert all(desk.read(range(80)))
    assert desk.tier.usage().fault == ""


def test_opened_in_process_all_folders_are_used_and_none_stays_locked(tmp_path):
    paths = [str(tmp_path / name) for name in ("a", "b")]
    tables = {"cpu": {"capacity": "4MiB"}, "nvme": {"capacity": "4MiB", "path": paths}}
    with kvtier.open(tables) as cache:
        status = cache.status()
        assert next(tier["capacity"] for tier in status["tiers"] if tier["tier"] == "nvme") == 8 << 20
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(ConfigError, match="file"):
        kvtier.open({**tables, "nvme": {"capacity": "4MiB", "path": [*paths, str(tmp_path / "file")]}})
    kvtier.open(tables).close()
