"""A CPU tier's actor as a plain object, with fakes for what the layers above give it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from kvtier.config import Config, CpuConfig, NvmeConfig, Size
from kvtier.index.local import LocalIndex, LocalStore
from kvtier.testing.memory_tier import MemoryTier
from kvtier.tiers.base import TierNumber
from kvtier_services.actors.cpu_tier import CpuTierActor, Parts
from kvtier_services.actors.hands import Hand
from kvtier_services.actors.service import TierService
from kvtier_services.settings import Settings


@dataclass
class Tally:
    calls: Counter = field(default_factory=Counter)


class FakeDoor:
    tally = Tally()

    def __init__(self) -> None:
        self.log: list[str] = []
        self.trouble: list[Exception] = []

    async def start(self) -> None:
        self.log.append("start")
        if self.trouble:
            raise self.trouble.pop()

    async def stop(self) -> None:
        self.log.append("stop")


class FakeExporter:
    url, fault = "http://here", ""

    def close(self) -> None:
        pass


class FakeHand:
    """A tier's process in this process; `restart` loses what it had."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.trouble: Exception | None = None
        self.restart()

    def restart(self) -> None:
        def open_tier(arena):
            self.tier = MemoryTier(arena, 1 << 20)
            return self.tier

        self.service = TierService("nvme", self._settings.arena_dir, open_tier)

    def __call__(self, method, *args, timeout):
        if self.trouble:
            raise self.trouble
        return getattr(self.service, method)(*args)


def settings_in(folder: Path, capacity: int = 4 << 20) -> Settings:
    return Settings(
        Config(
            run_dir=str(folder / "run"),
            arena_dir=str(folder / "arena"),
            cpu=CpuConfig(capacity=Size(capacity)),
            nvme=NvmeConfig(path=str(folder / "nvme")),
        )
    )


def open_local(_settings: Settings) -> LocalIndex:
    store = LocalStore()
    return LocalIndex(store, store.register("unit"))


def make_actor(settings: Settings, door: FakeDoor, hand: FakeHand | None = None) -> CpuTierActor:
    """Inside a running loop."""
    hands = {TierNumber.NVME: [Hand("nvme", "nvme", hand)]} if hand else {}
    parts = Parts(hands, open_local, lambda *_: door, lambda *_: FakeExporter(), lambda _: lambda _: True)
    return CpuTierActor(settings, parts)
