"""A tier over three devices that come, go, evict and lose blocks, against a set."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvtier.errors import TierUnavailable
from kvtier.memory.arena import Arena
from kvtier.testing.payloads import key_of
from kvtier.testing.tier import Desk
from kvtier.tiers.several import Several
from tests.device_fixture import Device
from tests.unit.tiers.conftest import Clock

NAMES = ("one", "two", "three")
NBYTES = 5000
ALL = range(10)
SEEDS = st.lists(st.sampled_from(ALL), min_size=1, max_size=5, unique=True)
DEVICES = st.sampled_from(NAMES)


class SeveralMachine(RuleBasedStateMachine):
    """`stored` is what was acknowledged, not removed, and not reported as gone."""

    def __init__(self) -> None:
        super().__init__()
        self.arena = Arena.private(1 << 20)
        self.clock = Clock()
        self.devices = {name: Device(self.arena) for name in NAMES}
        self.stored: set[int] = set()
        self.open()

    def open(self) -> None:
        self.tier = Several("nvme", self.devices, clock=self.clock)
        self.desk = Desk(self.tier, self.arena, sizes=dict.fromkeys(ALL, NBYTES))

    def teardown(self) -> None:
        self.tier.close()

    def there(self) -> list[Device]:
        return [device for device in self.devices.values() if not device.away]

    def reachable(self) -> set[int]:
        """What the devices that are there have."""
        return {seed for seed in ALL if any(key_of(seed) in device.has() for device in self.there())}

    @rule(seeds=SEEDS)
    def write(self, seeds: list[int]) -> None:
        if not self.there():
            with pytest.raises(TierUnavailable):
                self.desk.write(seeds, NBYTES)
            return
        self.clock.now += 60.0
        assert all(self.desk.write(seeds, NBYTES)), "there is room on any device"
        self.stored.update(seeds)

    @rule(seeds=SEEDS)
    def remove(self, seeds: list[int]) -> None:
        try:
            self.desk.tier.remove([key_of(seed) for seed in seeds])
        except TierUnavailable:
            assert not self.there()
        self.stored.difference_update(seeds)

    @rule(name=DEVICES)
    def leave(self, name: str) -> None:
        self.devices[name].away = True

    @rule(name=DEVICES, lost=st.sets(st.sampled_from(ALL), max_size=3))
    def come_back(self, name: str, lost: set[int]) -> None:
        device = self.devices[name]
        if not device.away:
            return
        for seed in lost:
            device.evict(key_of(seed))
        device.evicted.clear()
        device.away = False
        has, gone = self.tier.returned(name)
        assert set(has.keys) == device.has()
        assert set(has.keys) <= {key_of(seed) for seed in self.stored}
        self.stored -= {seed for seed in ALL if key_of(seed) in gone}

    @rule(name=DEVICES, seed=st.sampled_from(ALL))
    def evict(self, name: str, seed: int) -> None:
        device = self.devices[name]
        if not device.away and key_of(seed) in device.has():
            device.evict(key_of(seed))
            assert self.tier.dropped() == [key_of(seed)]
            self.stored.discard(seed)

    @precondition(lambda self: len(self.there()) == len(NAMES))
    @rule()
    def restart(self) -> None:
        self.tier = Several("nvme", self.devices, clock=self.clock)
        self.desk = Desk(self.tier, self.arena, sizes=dict.fromkeys(ALL, NBYTES))

    @invariant()
    def what_is_there_is_found_and_nothing_else(self) -> None:
        expected = [seed in self.stored & self.reachable() for seed in ALL]
        try:
            assert self.desk.read(ALL) == expected
        except TierUnavailable:
            assert not any(expected)
        if self.there():
            assert self.desk.contains(ALL) == expected

    @invariant()
    def what_is_there_is_listed_and_there_once(self) -> None:
        if not self.there():
            return
        listed = self.tier.inventory().keys
        assert sorted(listed) == sorted(key_of(seed) for seed in self.stored & self.reachable())
        held = [key for device in self.there() for key in device.has()]
        assert sorted(held) == sorted(listed)


TestSeveralMachine = SeveralMachine.TestCase
TestSeveralMachine.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
