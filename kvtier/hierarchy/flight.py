"""Blocks that are on their way together, and who waits for them."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field


def running() -> Future[int]:
    """A future that one who waits cannot cancel for the others."""
    future: Future[int] = Future()
    future.set_running_or_notify_cancel()
    return future


@dataclass(slots=True, eq=False)
class Staging:
    """Blocks of one chain on their way.

    Attributes:
        step: done when some more have arrived, or it is over; another one takes its place.
        done: how many arrived, when all are there or given up.
        legs: what must end before it is over: its own, and the flights that bring some of the blocks already.
        lives: of the rows of the blocks that it brings itself; what is known of a block anew, it does not bring.
        pins: slots of those that arrived, held until it is over.
        followers: flights that wait for this one.
    """

    step: Future[int] = field(default_factory=running)
    done: Future[int] = field(default_factory=running)
    legs: int = 0
    lives: dict[bytes, int] = field(default_factory=dict)
    pins: list[int] = field(default_factory=list)
    followers: list[Staging] = field(default_factory=list)


def steps_of(staging: Staging) -> list[Future[int]]:
    """The futures of those who wait for this flight, directly or not; others take their places. The lock is held."""
    flights = {staging: None}
    queue = [staging]
    while queue:
        new = [one for one in queue.pop().followers if one not in flights]
        flights.update(dict.fromkeys(new))
        queue += new
    steps = [flight.step for flight in flights]
    for flight in flights:
        flight.step = running()
    return steps
