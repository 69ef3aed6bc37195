"""The machines of a fleet and what runs on them, and how all are asked at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

from kvtier.errors import KVTierError
from kvtier_services.settings import Settings


@dataclass(frozen=True, slots=True)
class Host:
    """One machine of the cluster.

    Attributes:
        name: its host name.
        node: its Ray node.
        address: of that node.
        gpus: how many GPUs Ray sees there.
        tiers: that its node declares as resources, `kvtier.TIER`; none: whatever the settings say.
        ends: when Ray ends its node, in seconds since the epoch; 0 as long as nobody has told it to.
    """

    name: str
    node: str
    address: str
    gpus: int = 0
    tiers: tuple[str, ...] = ()
    ends: float = 0.0


class HostActors(Protocol):
    """The actors of one host. Each call waits, in the calling thread, and raises when nobody answers in time."""

    def ready(self, timeout: float) -> dict[str, Any]:
        """Wait until they have started, or failed to; the status."""
        ...

    def status(self, timeout: float) -> dict[str, Any]:
        """Status of the host."""
        ...

    def check_index(self, seconds: float, how: str) -> dict[str, Any]:
        """Compare the host's blocks with the index, "check" or "repair"."""
        ...

    def drain(self, seconds: float, timeout: float) -> dict[str, int]:
        """Hand over to other hosts what only this one has; blocks that were `offered`, `taken` and `handed`."""
        ...

    def stop(self, flush_seconds: float, timeout: float) -> dict[str, int]:
        """End them; blocks written down and lost."""
        ...


class Fleet(Protocol):
    """The machines, and what runs on them. Calls wait in the calling thread."""

    def hosts(self) -> Sequence[Host]:
        """The live ones; one name may have several nodes."""
        ...

    def start(self, settings: Settings, host: Host) -> HostActors:
        """Start the actors of a host, or find those that run."""
        ...

    def sweep(self, live: Sequence[Host]) -> int:
        """End for good all actors of nodes that are not among these, so that none comes back; how many."""
        ...


async def ask(
    question: Callable[[HostActors], dict[str, Any]], asked: Mapping[str, tuple[Host, HostActors]]
) -> list[dict[str, Any]]:
    """What each of these hosts says, in their order; one that does not answer is answered for with `fault`.

    All are asked at once. The threads are of this call alone and end with it, at the latest when the question's own
    time is over: however many hosts do not answer, and however many ask them, nobody waits for a thread.

    Args:
        question: asked in a thread.
        asked: hosts and their actors, by name.
    """
    threads = ThreadPoolExecutor(max(1, len(asked)), "kvtier-ask")
    try:
        said = (_answer(threads, question, host, actors) for host, actors in asked.values())
        return list(await asyncio.gather(*said))
    finally:
        threads.shutdown(wait=False)


async def _answer(
    threads: ThreadPoolExecutor, question: Callable[[HostActors], dict[str, Any]], host: Host, actors: HostActors
) -> dict[str, Any]:
    about = {"host": host.name, "node": host.node, "address": host.address}
    try:
        return about | await asyncio.get_running_loop().run_in_executor(threads, question, actors)
    except Exception as exc:  # noqa: BLE001 - one host's trouble is not another's
        why = " ".join(str(exc).split())[:500]
        told = isinstance(exc, KVTierError)  # by the process itself
        return about | {"fault": why if told else f"the CPU tier's process does not answer: {why}"}
