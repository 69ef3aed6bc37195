"""Who runs, and the status."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from kvtier import __version__
from kvtier.client.door import ask_status
from kvtier.config import Config
from kvtier.errors import KVTierError, SessionError
from kvtier_services.cluster import state
from kvtier_services.cluster.down import is_alive
from kvtier_services.cluster.parts import about
from kvtier_services.cluster.state import Running
from kvtier_services.cluster.up import enter
from kvtier_services.monitor.snapshot import snapshot
from kvtier_services.settings import Settings, host_name

TIMEOUT = 10.0


def running(config: Config) -> tuple[Running | None, bool]:
    """What the state file tells of, and whether that is still there."""
    known = state.read(Settings(config).state_file)
    return known, known is not None and is_alive(known)


@contextmanager
def snapshots(config: Config, known: Running) -> Iterator[Callable[[], dict[str, Any]]]:
    """Be able to ask for the status, again and again: the controller if it answers, else this host's door.

    Yields:
        Gives a snapshot, as seen from this host; see `kvtier_services.monitor.snapshot`.
    """
    settings = Settings(config)
    enter(known)
    from kvtier_services.cluster import actors

    def here() -> dict[str, Any]:
        return about(settings) | {"here": host_name()}

    def door(why: str) -> dict[str, Any]:
        host: dict[str, Any] = {"host": host_name(), "socket": known.socket}
        try:
            host |= {"serving": True, "hierarchy": ask_status(known.socket)}
        except SessionError as exc:
            host |= {"serving": False, "fault": str(exc)}
        return snapshot(here() | {"version": __version__, "fault": why}, [host])

    controller = actors.ActorCall(actors.CONTROLLER, known.namespace)

    def ask() -> dict[str, Any]:
        try:
            answer: dict[str, Any] = controller("status", timeout=TIMEOUT)
        except (KVTierError, OSError) as exc:
            return door(f"the controller does not answer: {exc}")
        return answer | here()

    with ExitStack() as stack:
        try:
            stack.enter_context(actors.connected(known.address, known.namespace, known.host))
        except KVTierError as exc:
            ask = partial(door, str(exc))
        yield ask
