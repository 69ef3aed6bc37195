"""A tier in another process, seen from the hierarchy."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

from kvtier.errors import ClosedError, TierUnavailable
from kvtier.tiers.base import Inventory, Slots, TierUsage
from kvtier.tiers.shared import Places
from kvtier_services.actors import wire

HELLO_TIMEOUT = 300.0
"""Seconds for a tier to open: recovery of a large store, CUDA's start."""
COPY_TIMEOUT = 30.0
"""Seconds for one batch of payloads; a process that takes longer is ended."""
ASK_TIMEOUT = 5.0
USAGE_PATIENCE = 0.5


class Call(Protocol):
    """Calls a method of a tier's process.

    Raises what the method raised when that is a `KVTierError`, `TimeoutError` when there was no answer in time, and
    anything else when the process cannot be reached.
    """

    def __call__(self, method: str, *args: object, timeout: float) -> Any:
        """Call and wait for the answer."""
        ...


class RemoteTier:
    """`Tier` over calls to a process that has the arena mapped. Keys and slots travel, payloads do not.

    It never connects by itself: somebody calls `connect` at the start and after `connected` has turned false, and then
    looks at the inventory. Until then every call is refused at once.

    Attributes:
        name: of the tier.
        label: for people; "gpu(host)" for an emulated GPU.
        pid: of the process that serves it; 0 when there is none.
        notes: what a person should know about its opening.
        connects: how often it was connected.
        overweight: bytes of the largest call or answer by method, less 64 for each key that it is about.
    """

    def __init__(self, name: str, call: Call, *, label: str, arena: str, fence: Callable[[], object]) -> None:
        """Not connected yet.

        Args:
            name: of the tier.
            call: reaches the process.
            label: for people.
            arena: `arena_mark` of the arena.
            fence: ends the process and returns when it is certain that it touches the arena no more.
        """
        self.name = name
        self.label = label
        self.pid = 0
        self.notes: tuple[str, ...] = ()
        self.connects = 0
        self._call = call
        self._arena = arena
        self._fence = fence
        self._lock = threading.Lock()
        self._asking = threading.Lock()
        self._pass = ""
        self._epoch, self._handle = 0, b""
        self._fault = "not connected yet"
        self._dropped: list[bytes] = []
        self._closed = False
        self._usage = TierUsage(0, 0, 0)
        self.overweight: Counter[str] = Counter()

    @property
    def connected(self) -> bool:
        """Whether calls are let through."""
        return bool(self._pass)

    @property
    def fault(self) -> str:
        """Why not; empty when they are."""
        return "" if self._pass else self._fault

    def connect(self, timeout: float = HELLO_TIMEOUT) -> bool:
        """Introduce this hierarchy to the process.

        False when it cannot serve now (`fault` says why); then it is certain too that nothing that was asked before, by
        this hierarchy or by one before it, is still under way.
        """
        try:
            answer = self._call("hello", self._arena, timeout=timeout)
        except Exception as exc:  # noqa: BLE001 - whatever the process or the way to it does: the tier is away
            self._lost(exc)
            self._fence()
            return False
        with self._lock:
            self.pid, self.notes = answer["pid"], tuple(answer["notes"])
            self._dropped.clear()
            self._epoch, self._handle = answer["epoch"], answer["handle"]
            self._pass = answer["pass"]
            self.connects += 1
        return True

    def write(self, keys: Sequence[bytes], slots: Slots) -> list[bool]:
        return self._copy("write", keys, slots)

    def read(self, keys: Sequence[bytes], slots: Slots) -> list[bool]:
        return self._copy("read", keys, slots)

    def remove(self, keys: Sequence[bytes]) -> None:
        self._ask("remove", wire.join(keys))

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        return [flag != 0 for flag in self._ask("contains", wire.join(keys))]

    def inventory(self) -> Inventory:
        return wire.unpack_inventory(self._ask("inventory", timeout=HELLO_TIMEOUT))

    def dropped(self) -> list[bytes]:
        """See `Tier`; answers from what came with other answers, without a call, so it may be asked under a lock."""
        self._check_open()
        with self._lock:
            dropped, self._dropped = self._dropped, []
        return dropped

    def usage(self) -> TierUsage:
        """See `Tier`; never raises: while the process is away, the last that it said, with the fault.

        One question at a time: while a process is slow, those who ask do not pile up.
        """
        if not self._asking.acquire(timeout=USAGE_PATIENCE):
            return replace(self._usage, fault=f"the {self.name} tier is slow to answer")
        try:
            usage, dropped = self._ask("usage")
        except TierUnavailable as exc:
            return replace(self._usage, fault=self.fault or str(exc))
        finally:
            self._asking.release()
        self._usage = TierUsage(**usage)
        with self._lock:
            self._dropped += wire.split(dropped)
        return self._usage

    @property
    def epoch(self) -> int:
        """See `SharedTier`; 0 while the process is away: what was attached of its memory is not leased then."""
        return self._epoch if self._pass else 0

    def share(self) -> bytes:
        """See `SharedTier`."""
        return self._handle if self._pass else b""

    def places(self, keys: Sequence[bytes]) -> Places:
        """See `SharedTier`."""
        return wire.unpack_places(self._ask("places", wire.join(keys)))

    def close(self) -> None:
        """Serve nothing more; the process goes on and keeps what it has."""
        with self._lock:
            self._pass, self._fault, self._closed = "", "closed", True

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(f"the {self.name} tier was closed")

    def _copy(self, method: str, keys: Sequence[bytes], slots: Slots) -> list[bool]:
        args = wire.join(keys), wire.pack_slots(slots)
        answer = self._ask(method, *args, timeout=COPY_TIMEOUT, copies=True)
        heaviest = max(sum(map(len, args)), len(answer)) - 64 * len(keys)
        self.overweight[method] = max(self.overweight[method], heaviest)
        flags, dropped = wire.unpack_answer(answer)
        with self._lock:
            self._dropped += dropped
        return flags

    def _ask(self, method: str, *args: bytes, timeout: float = ASK_TIMEOUT, copies: bool = False) -> Any:
        self._check_open()
        number = self._pass
        if not number:
            raise TierUnavailable(f"the {self.name} tier is away: {self._fault}")
        try:
            return self._call(method, number, *args, timeout=timeout)
        except TierUnavailable as exc:
            self._lost(exc, number)
            raise
        except Exception as exc:
            late = isinstance(exc, TimeoutError)
            if copies or not late:
                self._lost(exc, number)
                self._fence()
            what = f"did not answer {method} in {timeout:g} s" if late else f"is away: {exc}"
            raise TierUnavailable(f"the {self.name} tier {what}") from exc

    def _lost(self, exc: Exception, number: str | None = None) -> None:
        """Let no call through any more, if the failed one had the current pass."""
        with self._lock:
            if number in (None, self._pass):
                self._pass, self.pid = "", 0
                self._fault = " ".join(str(exc).split()) or type(exc).__name__
