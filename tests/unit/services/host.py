"""A CPU tier's actor as a plain object, with fakes for what the layers above give it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvtier.config import Config, CpuConfig, NvmeConfig, Size
from kvtier.index.local import LocalIndex, LocalStore
from kvtier.memory.arena import Arena
from kvtier.peers.base import Lender
from kvtier.testing.memory_peers import MemoryPeers, Network
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

    def remote(self) -> None:
        return None

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
    """A tier's process in this process; `restart` loses what it had, but what is named."""

    def __init__(self, settings: Settings, name: str = "nvme") -> None:
        self._settings = settings
        self.name = name
        self.trouble: Exception | None = None
        self.restart()

    def restart(self, stored: dict[bytes, bytes] | None = None) -> None:
        def open_tier(arena):
            self.tier = MemoryTier(arena, 1 << 20)
            self.tier._stored = dict(stored or {})
            return self.tier

        self.service = TierService(self.name, self._settings.arena_dir, open_tier)

    def die(self, hello: Callable[[str], dict[str, Any]]) -> None:
        """Let go of everything; `hello` is what the next hierarchy meets."""
        self.service.hello = hello
        self.service.stop()

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


def open_local(_settings: Settings, door: str) -> LocalIndex:
    store = LocalStore()
    return LocalIndex(store, store.register("unit", door))


class FakePeers:
    """A way to the other hosts of a network in this process."""

    def __init__(self, arena: Arena, network: Network, door: str) -> None:
        self.tier, self.door = MemoryPeers(arena, network, door), door
        self._arena, self._network = arena, network

    def serve(self, lender: Lender) -> None:
        self._network.hosts[self.door] = lender, self._arena

    def status(self) -> dict[str, Any]:
        return {"door": self.door}

    def close(self) -> None:
        self._network.hosts.pop(self.door, None)


def make_host(settings: Settings, store: LocalStore, network: Network, name: str) -> CpuTierActor:
    """One of several hosts that share an index; inside a running loop."""

    def open_index(_settings: Settings, door: str) -> LocalIndex:
        return LocalIndex(store, store.register(name, door))

    parts = Parts(
        {},
        open_index,
        lambda *_: FakeDoor(),
        lambda *_: FakeExporter(),
        lambda _: lambda _: True,
        lambda arena, _: FakePeers(arena, network, f"{name}:1"),
    )
    return CpuTierActor(settings, parts)


def make_actor(settings: Settings, door: FakeDoor, *nvme: FakeHand) -> CpuTierActor:
    """Inside a running loop; of several hands each is a device of the NVMe tier."""
    hands = {TierNumber.NVME: [Hand(hand.name, hand.name, hand, f"/{hand.name}") for hand in nvme]} if nvme else {}
    parts = Parts(hands, open_local, lambda *_: door, lambda *_: FakeExporter(), lambda _: lambda _: True)
    return CpuTierActor(settings, parts)
