"""The arena as one client maps it."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvtier.errors import SessionUnavailable
from kvtier.memory.arena import Arena

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

    def is_of(self, folder: Path) -> bool:
        """Whether this is the arena in `folder`."""
        return folder == self._folder and self.current

    def writable(self) -> NDArray[np.uint8]:
        """Its bytes, for writing into reserved slots only."""
        with self._lock:
            if self._writable is None:
                memory = Arena.attach(self._folder, writable=True).memory
                self._check()
                self._writable = memory
            return self._writable

    def _check(self) -> None:
        if not self.current:
            raise SessionUnavailable(f"the arena in {self._folder} was replaced; the session attaches again")


def _identity(folder: Path) -> Identity:
    """What tells these files from others of the same names."""
    try:
        known = [(folder / name).stat() for name in ("arena", "tables")]
    except OSError as exc:
        raise SessionUnavailable(f"there is no arena in {folder}: {exc}; is kvtier running?") from exc
    return tuple((one.st_dev, one.st_ino, one.st_size) for one in known)
