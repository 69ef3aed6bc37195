"""File locks that fall when their process dies."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

from kvtier.errors import ConfigError

PATIENCE = 5.0
"""Seconds that a new owner of a folder waits for a dying one."""


class FileLock:
    """An exclusive `flock` on a file; the kernel drops it when the process ends, however it ends.

    A dying owner may hold it until its mappings are gone (20 to 50 ms a mapped GiB), so taking it is retried. An owner
    that ends in good order deletes the file: a lock on a deleted file protects nothing, so the new file is locked.
    """

    def __init__(self, path: Path, *, mode: int = 0o600) -> None:
        self.path = path
        self._mode = mode
        self._fd: int | None = self._open()

    def acquire(self, timeout: float = 0.0) -> bool:
        """Try for `timeout` seconds; False when another holds it."""
        if self._fd is None:
            return False
        deadline = time.monotonic() + timeout
        while True:
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    return False
                time.sleep(0.02)
            else:
                if self._is_current(self._fd):
                    return True
                self.close()
                self._fd = self._open()

    def note(self, text: str) -> None:
        """Write who holds it into the file."""
        if self._fd is not None:
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, text.encode(), 0)

    def read(self) -> str:
        """What the holder wrote; empty when it has deleted the file."""
        try:
            return self.path.read_text(errors="replace").strip()
        except FileNotFoundError:
            return ""

    def close(self) -> None:
        """Let go of it; idempotent."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _open(self) -> int:
        return os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, self._mode)

    def _is_current(self, fd: int) -> bool:
        """Whether the path still names the file that was locked."""
        try:
            return os.path.samestat(os.fstat(fd), os.stat(self.path))
        except FileNotFoundError:
            return False


def own(folder: Path, what: str, field: str, *, mode: int = 0o600) -> FileLock:
    """Lock a folder for life, and say in the lock's file who has it.

    Args:
        folder: has the lock's file.
        what: is in it, for the message.
        field: of the configuration that names the folder.
        mode: of the lock's file.

    Raises:
        ConfigError: another process has it.
    """
    lock = FileLock(folder / "lock", mode=mode)
    if not lock.acquire(PATIENCE):
        holder = lock.read()
        lock.close()
        raise ConfigError(
            f"the {what} in {folder} belongs to a running process ({holder or 'pid unknown'}); stop it with "
            f"`kvtier down`, or set {field} to another folder"
        )
    lock.note(f"pid {os.getpid()}")
    return lock


def is_free(path: Path) -> bool:
    """Whether nobody holds this lock: it can be taken now, or its file is gone."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return True
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(fd)
    return True
