"""Which device has which block."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from hashlib import blake2b


class Homes:
    """The device of each block, oldest block first, and what devices that were away are still to forget. Thread-safe.

    Args:
        devices: their names, which decide where new blocks go.
    """

    def __init__(self, devices: Iterable[str]) -> None:
        self._seeds = {device: blake2b(device.encode()).digest() for device in devices}
        self._owed: dict[str, set[bytes]] = {device: set() for device in self._seeds}
        self._of: dict[bytes, str] = {}
        self._lock = threading.Lock()

    def of(self, keys: Iterable[bytes]) -> list[str | None]:
        """The device of each block; None when no device is known to have it."""
        with self._lock:
            return [self._of.get(key) for key in keys]

    def pick(self, key: bytes, devices: Iterable[str]) -> str:
        """Where to write a block: of these devices the one with the highest hash of both.

        This is rendezvous hashing: when a device is added or taken away, no block moves between the others.
        """
        return max(devices, key=lambda device: blake2b(key, digest_size=8, key=self._seeds[device]).digest())

    def wrote(self, stored: Iterable[tuple[str, bytes]]) -> None:
        """Devices have stored these; one that had them before owes it to forget its copies."""
        with self._lock:
            for device, key in stored:
                before = self._of.get(key, device)
                if before != device:
                    self._owed[before].add(key)
                self._of[key] = device
                self._owed[device].discard(key)

    def learn(self, found: Iterable[tuple[str, bytes]]) -> list[bool]:
        """Devices say that they have blocks, the oldest first; for each, whether that device is the one that has it.

        What another has too, or it was to forget, it should forget.
        """
        with self._lock:
            return [
                key not in self._owed[device] and self._of.setdefault(key, device) == device for device, key in found
            ]

    def left(self, device: str, keys: Iterable[bytes]) -> list[bytes]:
        """A device has these no more; those of them that no other has."""
        with self._lock:
            keys = list(keys)
            self._owed[device].difference_update(keys)
            gone = [key for key in keys if self._of.get(key) == device]
            for key in gone:
                del self._of[key]
        return gone

    def forget(self, keys: Iterable[bytes]) -> None:
        """Nobody shall have these; the device that has one owes it to forget it."""
        with self._lock:
            for key in keys:
                if (device := self._of.pop(key, None)) is not None:
                    self._owed[device].add(key)

    def owed(self, device: str) -> list[bytes]:
        """What a device is still to forget."""
        with self._lock:
            return list(self._owed[device])

    def forgot(self, device: str, keys: Iterable[bytes]) -> None:
        """A device owes no more to forget these."""
        with self._lock:
            self._owed[device].difference_update(keys)

    def at(self, device: str) -> list[bytes]:
        """All that a device is known to have."""
        with self._lock:
            return [key for key, home in self._of.items() if home == device]

    def by_age(self, keys: Iterable[bytes]) -> list[bytes]:
        """Those of the blocks that are known, oldest first."""
        wanted = frozenset(keys)
        with self._lock:
            return [key for key in self._of if key in wanted]
