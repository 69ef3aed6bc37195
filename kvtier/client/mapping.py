"""The way to the host of this process, and the arena as one client maps it."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from numpy.typing import NDArray

from kvtier.client.presence import Presence
from kvtier.client.way import Metadata
from kvtier.errors import SessionUnavailable
from kvtier.memory.arena import Arena
from kvtier.rpc.channel import open_channel
from kvtier.rpc.kvtier_pb2 import Welcome

Identity = tuple[tuple[int, int, int], ...]


class ArenaMapping:
    """One arena: read-only from the start, writable when the client first saves.

    Attributes:
        readable: its bytes, read-only.
        generations: u32 for each page, read-only, live.

    Raises:
        SessionUnavailable: there is no arena, or it was replaced meanwhile.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._identity = _identity(folder)
        arena = Arena.attach(folder)
        self._check()
        self.readable, self.generations = arena.memory, arena.generations
        self._writable: NDArray[np.uint8] | None = None
        self._lock = threading.Lock()

    @property
    def current(self) -> bool:
        """Whether the folder still has this arena, not another one."""
        return _identity(self._folder) == self._identity

    def is_of(self, welcome: Welcome) -> bool:
        return Path(welcome.arena) == self._folder and self.current

    def begin(self, session: int) -> None:
        pass

    def leased(self, lease: int, keys: Sequence[bytes], slots: NDArray[Any]) -> None:
        pass

    def fetch(self, lease: int, first: int, end: int) -> int:
        return end - first

    def released(self, lease: int) -> None:
        pass

    def reserved(self, ticket: int, nbytes: Sequence[int], grants: NDArray[Any]) -> None:
        pass

    def send(self, ticket: int, written: Sequence[int]) -> Sequence[int]:
        return written

    def ended(self, ticket: int) -> None:
        pass

    def close(self) -> None:
        pass

    def writable(self) -> NDArray[np.uint8]:
        with self._lock:
            if self._writable is None:
                memory = Arena.attach(self._folder, writable=True).memory
                self._check()
                self._writable = memory
            return self._writable

    def _check(self) -> None:
        if not self.current:
            raise SessionUnavailable(f"the arena in {self._folder} was replaced; the session attaches again")


class SocketWay:
    """To the host that this process runs on: its Unix socket, and the arena, which is mapped."""

    metadata: Metadata = ()

    def __init__(self, socket: Path) -> None:
        self._socket = socket
        self.where = str(socket)

    def open(self) -> grpc.Channel:
        return open_channel(self._socket)

    def memory(self, welcome: Welcome) -> ArenaMapping:
        return ArenaMapping(Path(welcome.arena))

    def presence(self, welcome: Welcome) -> Presence:
        return Presence(Path(welcome.arena))


def _identity(folder: Path) -> Identity:
    """What tells these files from others of the same names."""
    try:
        known = [(folder / name).stat() for name in ("arena", "tables")]
    except OSError as exc:
        raise SessionUnavailable(f"there is no arena in {folder}: {exc}; is kvtier running?") from exc
    return tuple((one.st_dev, one.st_ino, one.st_size) for one in known)
