"""Who belongs to the fleet and is not serving: drained, or gone."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from typing import Any, Protocol

import msgspec

MISSED_FOR = 7 * 86400.0
"""Seconds after which a host that has gone is no longer listed."""
LEAVING = 30.0
"""Seconds within which the node of a host that leaves must have ended."""
MOST = 1024
"""Hosts that are remembered."""


class Ledger(Protocol):
    """A few bytes that outlive the controller's process."""

    def read(self) -> bytes:
        """What was written last; empty for nothing."""
        ...

    def write(self, page: bytes) -> None:
        """Replace it."""
        ...


class Member(msgspec.Struct, frozen=True):
    """What is known of a host.

    Attributes:
        address: of its node when it was last seen.
        drained: since when; 0 when it is not.
        gone: since when; 0 while it lives.
        leaving: until when its node is expected to end; 0 when it is not.
        node: its Ray node when it was last seen; another one is not the one that leaves.
    """

    address: str = ""
    drained: float = 0.0
    gone: float = 0.0
    leaving: float = 0.0
    node: str = ""


class Members:
    """All hosts that were seen. Not thread-safe: one call at a time.

    Attributes:
        known: by name.
    """

    def __init__(self, ledger: Ledger, clock: Callable[[], float] = time.time) -> None:
        self._ledger = ledger
        self._clock = clock
        self.known: dict[str, Member] = {}
        self._was_read = False

    def seen(self, live: Mapping[str, Any]) -> list[str]:
        """These hosts live, with their addresses, and no others; those that are back."""
        self._read()
        now, before = self._clock(), dict(self.known)
        back = [name for name in live if self.known.get(name, Member()).gone]
        for name, host in live.items():
            was = self.known.get(name, Member())
            leaving = was.leaving if was.leaving > now and was.node == host.node else 0.0
            self.known[name] = Member(host.address, was.drained, leaving=leaving, node=host.node)
        for name in self.known.keys() - live.keys():
            was = self.known[name]
            if was.leaving:
                del self.known[name]
            elif not was.gone:
                self.known[name] = msgspec.structs.replace(was, gone=now)
            elif now - was.gone > MISSED_FOR and not was.drained:
                del self.known[name]
        for name in sorted(self.known.keys() - live.keys(), key=lambda name: self.known[name].gone):
            if len(self.known) > MOST:
                del self.known[name]
        if self.known != before:
            self._write()
        return back

    def drain(self, name: str) -> None:
        """From now on this host is drained."""
        self._read()
        was = self.known.get(name, Member())
        self.known[name] = msgspec.structs.replace(was, drained=was.drained or self._clock())
        self._write()

    def undrain(self, name: str) -> bool:
        """It is no longer; whether it was."""
        self._read()
        if not self.is_drained(name):
            return False
        self.known[name] = msgspec.structs.replace(self.known[name], drained=0.0)
        self._write()
        return True

    def leaving(self, name: str, at: float = 0.0) -> None:
        """This host's node is about to end, on purpose.

        Args:
            name: of the host.
            at: when; 0 for now.
        """
        self._read()
        was = self.known.get(name, Member())
        self.known[name] = msgspec.structs.replace(was, leaving=max(at, self._clock()) + LEAVING)
        self._write()

    def is_drained(self, name: str) -> bool:
        """Whether it is drained."""
        return bool(self.known.get(name, Member()).drained)

    def is_away(self, name: str) -> bool:
        """Whether it is to have no actors."""
        return self.is_drained(name) or bool(self.known.get(name, Member()).leaving)

    def away(self, serving: Collection[str]) -> list[dict[str, Any]]:
        """All others, for a status."""
        return [
            {"host": name, "address": member.address, "serving": False}
            | ({"drained_since": member.drained} if member.drained else {})
            | ({"gone_since": member.gone} if member.gone else {})
            for name, member in sorted(self.known.items())
            if name not in serving and (member.drained or member.gone)
        ]

    def _read(self) -> None:
        """Once; where the ledger cannot be read, the caller fails and tries again."""
        if not self._was_read:
            page = self._ledger.read()
            self.known = msgspec.json.decode(page, type=dict[str, Member]) if page else {}
            self._was_read = True

    def _write(self) -> None:
        self._ledger.write(msgspec.json.encode(self.known))
