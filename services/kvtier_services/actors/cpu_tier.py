"""The CPU tier's process: the brain of one host."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields
from functools import partial
from typing import Any, Protocol

from kvtier.errors import KVTierError, SessionUnavailable
from kvtier.hierarchy.cache import Hierarchy, Limits, Rules
from kvtier.hierarchy.flush import flush
from kvtier.hierarchy.sharing import HandedOver
from kvtier.hierarchy.state import State
from kvtier.index.base import Index
from kvtier.memory.arena import Arena
from kvtier.memory.pinning import Pinner
from kvtier.peers.base import Lender
from kvtier.tiers.base import Tier, TierNumber
from kvtier_services.actors.events import open_events
from kvtier_services.actors.folders import make_folder, share_arena, sweep_arena, write_secret
from kvtier_services.actors.hands import Hand, Hands, Held, status_of
from kvtier_services.settings import Settings, host_name

log = logging.getLogger(__name__)

LOOK = 0.5
"""Seconds between looks at the other tiers' processes."""
RETRY = 1.0
"""Seconds until a start that failed is tried again."""
INDEX_HELLO, POLL = 2.0, 0.05
"""Seconds that whoever waits for a start waits for the index besides: it has only begun to read."""
FIRST_HELLO = 15.0
"""Seconds that a start waits for each tier; later than that they are connected while the door is open."""


class Door(Protocol):
    """Where engines come in."""

    @property
    def tally(self) -> Any:
        """What came through it, as a dataclass of counters by the name of the call."""
        ...

    def remote(self) -> dict[str, Any] | None:
        """What the door for clients of other hosts says of itself, as plain values; None where there is none."""
        ...

    async def start(self) -> None:
        """Listen."""
        ...

    async def stop(self) -> None:
        """End all sessions."""
        ...


class Exporter(Protocol):
    """Where Prometheus reads."""

    url: str
    fault: str

    def close(self) -> None:
        """Stop."""
        ...


@dataclass(frozen=True, slots=True)
class Serving:
    """How a host serves, for who asks on a thread of its own.

    Attributes:
        why_not: why it does not; empty while it does.
        tenants: what each tenant of the remote door has, as plain values.
    """

    why_not: Callable[[], str]
    tenants: Callable[[], list[dict[str, Any]]]


class Publisher(Protocol):
    """What routers follow."""

    def close(self) -> None:
        """Say that nothing is to be had here any more."""
        ...


class Peers(Protocol):
    """The other hosts of the fleet."""

    @property
    def tier(self) -> Tier:
        """What fetches from them."""
        ...

    @property
    def door(self) -> str:
        """Where they reach this host; empty when they cannot."""
        ...

    def serve(self, lender: Lender) -> None:
        """Lend them blocks from now on."""
        ...

    def status(self) -> dict[str, Any]:
        """How serving them fares, as plain values."""
        ...

    def close(self) -> None:
        """Serve nobody any more."""
        ...


def _counts(tally: Any) -> dict[str, dict[str, int]]:
    return {field.name: dict(getattr(tally, field.name)) for field in fields(tally)}


def _arena(arena: Arena) -> dict[str, Any]:
    return {"ready": arena.ready, "capacity": arena.capacity, "fault": arena.fault}


@dataclass(frozen=True, slots=True)
class Parts:
    """What the CPU tier's process is made of, besides the hierarchy.

    Attributes:
        hands: the other tiers; several of a tier for as many devices.
        index: opens the index.
        door: makes the door of a hierarchy.
        exporter: starts the exporter of a hierarchy; never raises.
        writer_gone: whether a cut-off session of an arena is known to write no more.
        peers: opens the way to other hosts and theirs to this one; it may find that there are none.
    """

    hands: Mapping[TierNumber, Sequence[Hand]]
    index: Callable[[Settings, str], Index]
    door: Callable[[Hierarchy, Settings], Door]
    exporter: Callable[[Hierarchy, Settings, Serving], Exporter]
    writer_gone: Callable[[Arena], Callable[[int], bool]]
    peers: Callable[[Arena, Settings], Peers | None] | None = None


class CpuTierActor:
    """Owns the arena, the hierarchy, the index, the exporter and the door of one host.

    All of it is started by `__init__`, on the running loop, because a restart reruns nothing else. A start that fails
    is tried again; `ready` and `status` say why it failed.
    """

    def __init__(self, settings: Settings, parts: Parts) -> None:
        self._settings = settings
        self._parts = parts
        self._started = time.time()
        self._fault = ""
        self._attempt = asyncio.Event()
        self._hierarchy: Hierarchy | None = None
        self._door: Door | None = None
        self._exporter: Exporter | None = None
        self._events: Publisher | None = None
        self._hands: Hands | None = None
        self._peers: Peers | None = None
        self._pin = Pinner(partial(log.warning, "arena not page-locked: %s"))
        self._running = asyncio.get_running_loop().create_task(self._run())

    async def ping(self) -> dict[str, Any]:
        """Who this is."""
        return {"pid": os.getpid(), "serving": self._door is not None}

    async def ready(self, timeout: float) -> dict[str, Any]:
        """Wait until the first attempt to start has ended; its status, with `fault` if it failed."""
        await asyncio.wait_for(self._attempt.wait(), timeout)
        until = time.monotonic() + min(timeout, INDEX_HELLO)
        hierarchy = self._hierarchy
        while hierarchy and not hierarchy.state.index.status()["ok"] and time.monotonic() < until:
            await asyncio.sleep(POLL)
        return await self.status()

    async def status(self) -> dict[str, Any]:
        """What this host has, does and lacks, as plain values."""
        hierarchy, exporter = self._hierarchy, self._exporter
        return {
            "host": host_name(),
            "pid": os.getpid(),
            "started": self._started,
            "serving": self._door is not None,
            "fault": self._fault,
            "socket": str(self._settings.socket),
            "arena_dir": str(self._settings.arena_dir),
            "pinning": self._pin.fault,
            "arena": _arena(hierarchy.arena) if hierarchy else None,
            "metrics": {"url": exporter.url, "fault": exporter.fault} if exporter else None,
            "door": _counts(self._door.tally) if self._door else None,
            "remote": self._door.remote() if self._door else None,
            "hands": self._hands.status() if self._hands else [],
            "peers": self._peers.status() if self._peers else None,
            "hierarchy": await asyncio.to_thread(status_of, hierarchy) if hierarchy else None,
        }

    async def drain(self, seconds: float) -> dict[str, int]:
        """Take no more saves, and hand the hottest blocks over to other hosts; `stop` comes next.

        Args:
            seconds: that it may take.
        """
        hierarchy = self._hierarchy
        if hierarchy is None:
            return asdict(HandedOver())
        return asdict(await asyncio.to_thread(hierarchy.hand_over, seconds))

    async def check_index(self, seconds: float, how: str) -> dict[str, Any]:
        """Compare all blocks with what the index says of this host; see `kvtier.hierarchy.checking`.

        Args:
            seconds: that it may take.
            how: "check", or "repair" to mend what differs.

        Raises:
            SessionUnavailable: the index does not answer, or the host has not started.
        """
        if self._hierarchy is None:
            raise SessionUnavailable(f"the host has not started: {self._fault or 'it begins'}")
        return await asyncio.to_thread(self._hierarchy.check_index, seconds, repair=how == "repair")

    async def stop(self, flush_seconds: float) -> dict[str, int]:
        """Close the door, write down what only the CPU tier has, let go of the arena and delete its files.

        Args:
            flush_seconds: that writing down may take.

        Returns:
            How many blocks were written down, and how many were lost.
        """
        self._running.cancel()
        door, self._door = self._door, None
        if door is not None:
            await door.stop()
        hierarchy, self._hierarchy = self._hierarchy, None
        if hierarchy is None:
            return {"written": 0, "lost": 0}
        return await asyncio.to_thread(self._close, hierarchy, flush_seconds)

    def _why_not(self) -> str:
        """Why the host does not serve; empty while it does."""
        if self._door is None:
            return self._fault or "the door is shut: the host begins, or ends"
        draining = self._hierarchy is not None and self._hierarchy.state.draining
        return "the host is being emptied: it takes no saves" if draining else ""

    def _tenants(self) -> list[dict[str, Any]]:
        remote = self._door.remote() if self._door is not None else None
        tenants: list[dict[str, Any]] = remote["tenants"] if remote else []
        return tenants

    async def _run(self) -> None:
        while True:
            try:
                await self._open()
                self._fault = ""
            except (KVTierError, OSError) as exc:
                self._fault = str(exc)
            self._attempt.set()
            if not self._fault:
                break
            await asyncio.sleep(RETRY)
        if self._hands is not None and self._hierarchy is not None:
            state = self._hierarchy.state
            await asyncio.gather(*(self._watch(self._hands, held, state) for held in self._hands.held))

    async def _watch(self, hands: Hands, held: Held, state: State) -> None:
        """Look after one process, on a thread of its own: it may hang."""
        threads = ThreadPoolExecutor(1, "kvtier-look")
        try:
            while True:
                await asyncio.sleep(LOOK)
                try:
                    await asyncio.get_running_loop().run_in_executor(threads, hands.look_after, held, state)
                except Exception:
                    log.exception("looking after a tier failed: tier=%s", held.hand.name)
        finally:
            threads.shutdown(wait=False)

    async def _open(self) -> None:
        if self._hierarchy is None:
            self._hierarchy = await asyncio.to_thread(self._build)
        door = self._parts.door(self._hierarchy, self._settings)
        await door.start()
        self._door = door

    def _build(self) -> Hierarchy:
        settings, parts = self._settings, self._parts
        cpu, nvme = settings.config.cpu, settings.config.nvme
        make_folder(settings.run_dir, "run_dir", settings.config.group)
        for file, secret in settings.secrets.items():
            write_secret(file, secret.text)
        make_folder(settings.arena_dir, "arena_dir", settings.config.group)
        arena = Arena.own(settings.arena_dir, int(cpu.capacity), mode=settings.config.mode, pin=self._pin)
        try:
            share_arena(settings.arena_dir, settings.config.group)
            self._hands = Hands(parts.hands, settings.arena_dir, FIRST_HELLO)
            peers = self._peers = parts.peers(arena, settings) if parts.peers else None
            hierarchy = Hierarchy(
                arena,
                self._hands.tiers | ({TierNumber.PEER: peers.tier} if peers else {}),
                parts.index(settings, peers.door if peers else ""),
                limits=Limits.of(arena.capacity, high=cpu.high, low=cpu.low, pinned=cpu.pinned),
                rules=Rules(cpu.policy, nvme.admission, nvme.endurance, settings.config.fleet.replicate),
                writer_gone=parts.writer_gone(arena),
            )
        except BaseException:
            if self._peers is not None:
                self._peers.close()
                self._peers.tier.close()
            arena.close()
            raise
        if peers is not None:
            peers.serve(hierarchy.lending)
        self._exporter = parts.exporter(hierarchy, settings, Serving(self._why_not, self._tenants))
        self._events = open_events(hierarchy, settings)
        return hierarchy

    def _close(self, hierarchy: Hierarchy, flush_seconds: float) -> dict[str, int]:
        if self._peers is not None:
            self._peers.close()
        if self._events is not None:
            self._events.close()
        written, lost = flush(hierarchy, flush_seconds)
        index = hierarchy.state.index
        index.forget(index.node)  # nobody need try to reach it
        hierarchy.close()
        if self._exporter is not None:
            self._exporter.close()
        sweep_arena(self._settings.arena_dir)  # while the lock is held: a new owner's files must not be among them
        hierarchy.arena.close()
        return {"written": written, "lost": lost}
