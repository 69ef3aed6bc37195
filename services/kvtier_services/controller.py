"""The controller: which hosts there are, and that each has its actors."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from kvtier import __version__
from kvtier_services.settings import Settings

log = logging.getLogger(__name__)

LOOK = 5.0
"""Seconds between looks at which hosts live."""
STATUS_TIMEOUT = 5.0


@dataclass(frozen=True, slots=True)
class Host:
    """One machine of the cluster.

    Attributes:
        name: its host name.
        node: its Ray node.
        address: of that node.
        gpus: how many GPUs Ray sees there.
    """

    name: str
    node: str
    address: str
    gpus: int = 0


class HostActors(Protocol):
    """The actors of one host. Each call waits, in the calling thread, and raises when nobody answers in time."""

    def ready(self, timeout: float) -> dict[str, Any]:
        """Wait until they have started, or failed to; the status."""
        ...

    def status(self, timeout: float) -> dict[str, Any]:
        """Status of the host."""
        ...

    def stop(self, flush_seconds: float, timeout: float) -> dict[str, int]:
        """End them; blocks written down and lost."""
        ...


class Controller:
    """Starts the actors of each host as hosts come, and answers for all of them. Not on the data path.

    After a restart it finds the actors that are there; they live on without it.
    """

    def __init__(
        self, settings: Settings, hosts: Callable[[], Sequence[Host]], start: Callable[[Settings, Host], HostActors]
    ) -> None:
        """Start looking after the hosts, on the running loop.

        Args:
            settings: of this kvtier.
            hosts: the live hosts.
            start: starts the actors of a host, or finds those that run.
        """
        self._settings = settings
        self._live = hosts
        self._start = start
        self._started = time.time()
        self._hosts: dict[str, Host] = {}
        self._actors: dict[str, HostActors] = {}
        self._looking = asyncio.Lock()
        self._stopping = False
        self._running = asyncio.get_running_loop().create_task(self._run())

    async def hosts(self) -> list[str]:
        """Names of the hosts that have their actors."""
        return sorted(self._actors)

    async def ready(self, timeout: float) -> list[dict[str, Any]]:
        """Wait until the actors of all live hosts have started, or failed to; a status for each host."""
        await self._look()
        return await self._ask(lambda actors: actors.ready(timeout))

    async def status(self) -> dict[str, Any]:
        """A snapshot of the fleet, as plain values."""
        return {
            "version": __version__,
            "controller": {"pid": os.getpid(), "started": self._started},
            "index": {"url": self._settings.redis_url},
            "hosts": await self._ask(lambda actors: actors.status(STATUS_TIMEOUT)),
        }

    async def stop(self, flush_seconds: float, timeout: float) -> list[dict[str, Any]]:
        """End the actors of all hosts; for each host what was written down and lost."""
        self._stopping = True
        self._running.cancel()
        async with self._looking:
            return await self._ask(lambda actors: actors.stop(flush_seconds, timeout))

    async def _run(self) -> None:
        while True:
            try:
                await self._look()
            except Exception:  # whatever Ray does: the next look may succeed
                log.exception("looking at the hosts failed")
            await asyncio.sleep(LOOK)

    async def _look(self) -> None:
        async with self._looking:
            if self._stopping:
                return
            live = {host.name: host for host in await asyncio.to_thread(self._live)}
            for name in set(self._hosts) - set(live):
                log.warning("host gone: host=%s", name)
                del self._hosts[name], self._actors[name]
            for name, host in live.items():
                if self._hosts.get(name) != host:
                    self._actors[name] = await asyncio.to_thread(self._start, self._settings, host)
                    self._hosts[name] = host

    async def _ask(self, question: Callable[[HostActors], dict[str, Any]]) -> list[dict[str, Any]]:
        """Ask the actors of all hosts at once; a host that does not answer is answered for with `fault`."""

        async def ask(name: str) -> dict[str, Any]:
            host = self._hosts[name]
            about = {"host": name, "node": host.node, "address": host.address}
            try:
                return about | await asyncio.to_thread(question, self._actors[name])
            except Exception as exc:  # noqa: BLE001 - one host's trouble is not another's
                return about | {"fault": f"the CPU tier's process does not answer: {' '.join(str(exc).split())[:500]}"}

        return list(await asyncio.gather(*map(ask, sorted(self._actors))))
