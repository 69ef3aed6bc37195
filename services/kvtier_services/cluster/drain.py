"""`kvtier drain` and `undrain`: a host gives away what it has and rests, until it is told to work again."""

from __future__ import annotations

from typing import Any

from kvtier_services.cluster.state import Running
from kvtier_services.cluster.up import enter

MARGIN = 15.0
"""Seconds, besides those for handing over and writing down, that each of the two may take."""


def drain(known: Running, host: str, seconds: float, flush_seconds: float) -> dict[str, Any]:
    """Drain a host; see `Controller.drain`.

    Raises:
        KVTierError: there is no such host, or no way to the fleet.
        OSError: the controller does not answer.
    """
    timeout = seconds + flush_seconds + 2 * MARGIN + 5.0
    answer: dict[str, Any] = _asked(known, "drain", host, seconds, flush_seconds, MARGIN, timeout=timeout)
    return answer


def undrain(known: Running, host: str) -> bool:
    """Let a drained host work again; False when it was not drained.

    Raises:
        KVTierError: there is no way to the fleet.
        OSError: the controller does not answer.
    """
    return bool(_asked(known, "undrain", host, timeout=60.0))


def _asked(known: Running, method: str, *args: object, timeout: float) -> Any:
    enter(known)
    from kvtier_services.cluster import actors

    with actors.connected(known.address, known.namespace, known.host):
        return actors.ActorCall(actors.CONTROLLER, known.namespace)(method, *args, timeout=timeout)
