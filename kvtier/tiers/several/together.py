"""Calls to several devices at the same time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, suppress
from typing import TypeVar

from kvtier.errors import ClosedError, TierUnavailable
from kvtier.tiers.base import Tier

T = TypeVar("T")

CALLS = 8
"""Calls to one device at a time, besides those on their callers' own threads."""


class Together:
    """Tiers by the names of their devices, each with threads of its own: a device that hangs takes none of the others'.

    Args:
        tiers: by device.
    """

    def __init__(self, tiers: Mapping[str, Tier]) -> None:
        self._tiers = dict(tiers)
        self._threads = {device: ThreadPoolExecutor(CALLS, "kvtier-device") for device in tiers}

    def ask(self, calls: Mapping[str, Callable[[Tier], T]]) -> dict[str, T]:
        """Call devices; what those answered that are there. When it returns or raises, nothing is under way any more.

        Raises:
            ClosedError: they were closed.
        """
        if not calls:
            return {}
        *others, (last, inline) = calls.items()
        answers: dict[str, T] = {}
        futures: list[Future[None]] = []

        def note(device: str, call: Callable[[Tier], T]) -> None:
            with suppress(TierUnavailable):
                answers[device] = call(self._tiers[device])

        try:
            for device, call in others:
                futures.append(self._submit(device, note, call))
            note(last, inline)
        finally:
            wait(futures)
        for future in futures:
            future.result()
        return {device: answers[device] for device in calls if device in answers}

    def close(self) -> None:
        """Close all of them, whatever becomes of one."""
        with ExitStack() as last_first:
            for threads in self._threads.values():
                last_first.callback(threads.shutdown)
            for tier in self._tiers.values():
                last_first.callback(tier.close)

    def _submit(
        self, device: str, note: Callable[[str, Callable[[Tier], T]], None], call: Callable[[Tier], T]
    ) -> Future[None]:
        try:
            return self._threads[device].submit(note, device, call)
        except RuntimeError as exc:  # its threads were shut down
            raise ClosedError(f"the tier on {device} was closed") from exc
