"""The controller: which hosts there are, and that each has its actors."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

from kvtier import __version__
from kvtier.errors import ConfigError
from kvtier_services.hosts import Fleet, Host, HostActors, ask
from kvtier_services.members import Ledger, Members
from kvtier_services.monitor.snapshot import snapshot
from kvtier_services.settings import Settings, host_name

log = logging.getLogger(__name__)

LOOK = 2.0
"""Seconds between looks at which hosts live."""
LOOK_TIMEOUT = 30.0
"""Seconds that a look may take; Ray's own calls wait for a head that is away, and not for ever."""
STATUS_TIMEOUT = 5.0
POLL = 0.1
ENDING, FLUSH = 3.0, 10.0
"""Seconds of a node's last ones that are kept back, and that are for writing down what only memory has."""


class Page(Protocol):
    """The status page."""

    url: str
    fault: str

    def close(self) -> None:
        """Serve nobody any more."""
        ...


def nobody_looks(_snapshot: Callable[[], dict[str, Any]]) -> Page | None:
    """No page."""
    return None


class Controller:
    """Starts the actors of each host as hosts come, and answers for all of them. Not on the data path.

    After a restart it finds the actors that are there; they live on without it. Which hosts are drained, and which
    have gone, is in its ledger.
    """

    def __init__(
        self,
        settings: Settings,
        fleet: Fleet,
        ledger: Ledger,
        *,
        about: Callable[[], dict[str, Any]] = dict,
        page: Callable[[Callable[[], dict[str, Any]]], Page | None] = nobody_looks,
    ) -> None:
        """Start looking after the hosts, on the running loop.

        Args:
            settings: of this kvtier.
            fleet: the machines.
            ledger: outlives this process.
            about: what the host that this runs on knows of Ray and Redis, for the status.
            page: opens the status page over snapshots; asked again as long as it has a fault. The page may ask for
                them from any thread, and waits there.
        """
        self._settings = settings
        self._fleet = fleet
        self._members = Members(ledger)
        self._about = about
        self._open_page = page
        self._page: Page | None = None
        self._tried = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._started = time.time()
        self._hosts: dict[str, Host] = {}
        self._actors: dict[str, HostActors] = {}
        self._looking = asyncio.Lock()
        self._threads = ThreadPoolExecutor(1, "kvtier-look")
        self._stopping = False
        self._ending: dict[str, asyncio.Task[None]] = {}
        self._running = self._loop.create_task(self._run())

    async def hosts(self) -> list[str]:
        """Names of the hosts that have their actors."""
        return sorted(self._actors)

    async def ready(self, timeout: float, host: str = "") -> list[dict[str, Any]]:
        """Wait until the actors of all live hosts have started, or failed to; a status for each host.

        Args:
            timeout: seconds.
            host: wait for this one to come, and for no other.
        """
        deadline = time.monotonic() + timeout
        await self._look()
        while host and host not in self._actors and time.monotonic() < deadline:
            await asyncio.sleep(POLL)
            await self._look()
        left = max(1.0, deadline - time.monotonic())
        return await self._ask(lambda actors: actors.ready(left), [host] if host else None)

    async def status(self) -> dict[str, Any]:
        """See `kvtier_services.monitor.snapshot`."""
        serving = await self._ask(lambda actors: actors.status(STATUS_TIMEOUT))
        about = {
            "version": __version__,
            "started": self._started,
            "here": host_name(),
            "controller": {"pid": os.getpid(), "started": self._started},
            "index": {"url": self._settings.redis_url},
            "page": await self.page(),
            **await asyncio.to_thread(self._about),
        }
        return snapshot(about, serving + self._members.away(set(self._actors)))

    async def page(self) -> dict[str, str]:
        """`url` of the status page, empty when there is none, and its `fault`; waits until it was tried to open it."""
        await self._tried.wait()
        page = self._page
        return {"url": page.url, "fault": page.fault} if page else {"url": "", "fault": ""}

    async def drain(self, host: str, seconds: float, flush_seconds: float, timeout: float) -> dict[str, Any]:
        """Let a host hand over what it has, end its actors, and start none there until `undrain`, whatever restarts.

        Args:
            host: its name.
            seconds: for handing over.
            flush_seconds: for writing down blocks that only its memory has.
            timeout: of each of the two, beyond that.

        Returns:
            What `HostActors.drain` and `stop` said.

        Raises:
            ConfigError: there is no such host.
        """
        async with self._looking:
            if host not in self._hosts and host not in self._members.known:
                known = ", ".join(sorted({*self._hosts, *self._members.known}))
                raise ConfigError(f"there is no host {host!r} in this fleet; name one of {known}")
            await self._in_thread(self._members.drain, host)
        return await self._end(host, seconds, flush_seconds, timeout)

    async def undrain(self, host: str) -> bool:
        """Let a drained host have actors again; False when it was not drained."""
        async with self._looking:
            was: bool = await self._in_thread(self._members.undrain, host)
        await self._look()
        return was

    async def leave(self, host: str, flush_seconds: float, timeout: float) -> dict[str, Any]:
        """End the actors of a host that leaves the fleet; unlike one that died, it is not missed.

        Its Ray node must end right after: while that lives, some later look starts them again.
        """
        async with self._looking:
            if host in self._actors:
                await self._in_thread(self._members.leaving, host)
        drain = min(float(self._settings.config.fleet.drain), flush_seconds)
        return await self._end(host, drain, flush_seconds, timeout)

    async def check_index(self, seconds: float, how: str) -> list[dict[str, Any]]:
        """Compare each host's blocks with the index, one host after the other; what each found.

        Args:
            seconds: that all who answer may take together; a host that does not takes none of them.
            how: "check", or "repair" to mend what differs.
        """
        heard = await self._ask(lambda actors: {"heard": bool(actors.status(STATUS_TIMEOUT))})
        answers = {one["host"]: one for one in heard}
        names = [one["host"] for one in heard if "heard" in one]
        deadline = time.monotonic() + seconds
        for number, name in enumerate(names):
            share = (deadline - time.monotonic()) / (len(names) - number)
            if share > 0.0:
                (answers[name],) = await self._ask(lambda actors, share=share: actors.check_index(share, how), [name])  # type: ignore[misc]
            else:
                answers[name] = {"host": name, "fault": "the time was over before its turn: give it more --seconds"}
        return list(answers.values())

    async def stop(self, flush_seconds: float, timeout: float) -> list[dict[str, Any]]:
        """End the actors of all hosts; for each host what was written down and lost."""
        self._stopping = True
        self._running.cancel()
        # A page ends with its last snapshot, which may wait for a host that hangs: the others are told meanwhile.
        closing = self._loop.run_in_executor(None, self._page.close) if self._page is not None else None
        async with self._looking:
            said = await self._ask(lambda actors: actors.stop(flush_seconds, timeout))
        if closing is not None:
            await closing
        return said

    async def _run(self) -> None:
        while True:
            try:
                if self._page is None or self._page.fault:
                    was = self._page.fault if self._page else ""
                    self._page = await asyncio.to_thread(self._open_page, self._snapshot)
                    if self._page and self._page.fault not in ("", was):
                        log.warning("%s", self._page.fault)
            except Exception:  # a page is no reason to have no tiers
                log.exception("opening the status page failed")
            self._tried.set()
            try:
                await self._look()
            except Exception:  # whatever Ray does: the next look may succeed
                log.exception("looking at the hosts failed")
            await asyncio.sleep(LOOK)

    def _snapshot(self) -> dict[str, Any]:
        """For the page, whose threads are not this loop's."""
        asked = asyncio.run_coroutine_threadsafe(self.status(), self._loop)
        try:
            return asked.result(2 * STATUS_TIMEOUT)
        except TimeoutError as exc:
            asked.cancel()  # the page asks again and again: none of them may go on for ever
            raise TimeoutError(f"the hosts did not answer in {2 * STATUS_TIMEOUT:g} s") from exc

    async def _look(self) -> None:
        async with self._looking:
            if self._stopping:
                return
            live = self._chosen(await self._in_thread(self._fleet.hosts))
            for name in set(self._hosts) - set(live):
                log.warning("host gone: host=%s", name)
                del self._hosts[name], self._actors[name]
            for name in await self._in_thread(self._members.seen, live):
                log.warning("host back: host=%s", name)
            if ended := await self._in_thread(self._fleet.sweep, list(live.values())):
                log.warning("actors of dead nodes ended: actors=%d", ended)
            for name, host in live.items():
                known = self._hosts.get(name)
                if host.ends and known and name not in self._ending:
                    await self._in_thread(self._members.leaving, name, host.ends)
                    self._ending[name] = asyncio.create_task(self._end_in_time(host))
                if (known is None or known.node != host.node) and not self._members.is_away(name):
                    self._actors[name] = await self._in_thread(self._fleet.start, self._settings, host)
                    self._hosts[name] = host

    async def _end(self, name: str, seconds: float, flush_seconds: float, timeout: float) -> dict[str, Any]:
        """End a host's actors, after it has handed over what it has; all others are looked after meanwhile."""
        actors, said = self._actors.get(name), {"host": name, "written": 0, "lost": 0}
        if actors is None:
            return said
        if seconds:
            said |= (await self._ask(lambda actors: actors.drain(seconds, seconds + timeout), [name]))[0]
        said |= (await self._ask(lambda actors: actors.stop(flush_seconds, flush_seconds + timeout), [name]))[0]
        async with self._looking:
            if self._actors.get(name) is actors:
                del self._hosts[name], self._actors[name]
        return said

    async def _end_in_time(self, host: Host) -> None:
        """What can be done for a host whose node ends soon: a SIGTERM reached it, or an autoscaler gave it up."""
        left = host.ends - time.time() - ENDING
        flush = max(0.0, min(FLUSH, left / 2))
        try:
            said = await self._end(host.name, max(0.0, left - flush), flush, ENDING)
            log.warning("host ends: host=%s said=%s", host.name, said)
        except Exception:
            log.exception("ending a host failed: host=%s", host.name)
        finally:
            self._ending.pop(host.name, None)

    def _chosen(self, hosts: Sequence[Host]) -> dict[str, Host]:
        """One node for each name: the one that has the actors, as long as it lives."""
        chosen: dict[str, Host] = {}
        for host in hosts:
            known = self._hosts.get(host.name)
            if host.name not in chosen or (known and host.node == known.node):
                chosen[host.name] = host
        return chosen

    async def _in_thread(self, call: Callable[..., Any], *args: object) -> Any:
        """Ray's own calls have time-outs that are not ours; one that hangs holds up the next, and nobody else."""
        pending = asyncio.get_running_loop().run_in_executor(self._threads, call, *args)
        try:
            return await asyncio.wait_for(pending, LOOK_TIMEOUT)
        except TimeoutError as exc:
            raise TimeoutError(f"Ray did not answer in {LOOK_TIMEOUT:g} s") from exc

    async def _ask(
        self, question: Callable[[HostActors], dict[str, Any]], names: Sequence[str] | None = None
    ) -> list[dict[str, Any]]:
        """Ask the actors of all hosts at once, or of these; a host that does not answer has a `fault`."""
        wanted = sorted(self._actors) if names is None else names
        asked = {name: (self._hosts[name], self._actors[name]) for name in wanted if name in self._actors}
        missing = [name for name in wanted if name not in asked]
        why = {name: "is drained" if self._members.is_drained(name) else "did not come" for name in missing}
        said = await ask(question, asked)
        return said + [{"host": name, "fault": f"the host {why[name]}"} for name in missing]
