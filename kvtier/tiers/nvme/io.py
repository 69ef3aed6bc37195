"""The operating system's calls, and whole reads and writes made of them."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from kvtier.block import PAGE

IOV_MAX = 1024
_O_DIRECT = getattr(os, "O_DIRECT", 0)
_Transfer = Callable[[int, Sequence[memoryview], int], int]


class Disk:
    """What the tier asks of the operating system; tests put faults here."""

    def open(self, path: Path, flags: int) -> int:
        """As `os.open`, mode 0600."""
        return os.open(path, flags | os.O_CLOEXEC, 0o600)

    def allocate(self, fd: int, nbytes: int) -> None:
        """Give the file exactly this size, with all its blocks."""
        if os.fstat(fd).st_size > nbytes:
            os.ftruncate(fd, nbytes)
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(fd, 0, nbytes)
        else:
            os.ftruncate(fd, nbytes)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """As `os.preadv`."""
        return os.preadv(fd, buffers, offset)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """As `os.pwritev`."""
        return os.pwritev(fd, buffers, offset)

    def is_deleted(self, fd: int) -> bool:
        """Whether no folder holds this file any more, so that its bytes are lost when it is closed."""
        return os.fstat(fd).st_nlink == 0

    def random(self, nbytes: int) -> bytes:
        """As `os.urandom`."""
        return os.urandom(nbytes)


class RegionFile:
    """An open file that is read and written in whole pages, past the page cache where that is possible.

    Attributes:
        direct: whether it bypasses the page cache.
    """

    def __init__(self, path: Path, disk: Disk, *, direct: bool) -> None:
        self.path = path
        self.direct = False
        self._disk = disk
        if direct and _O_DIRECT:
            self.direct = self._open_direct()
        if not self.direct:
            self._fd = disk.open(path, os.O_RDWR)

    def read(self, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fill all the buffers, or raise OSError."""
        nbytes = _whole(self._disk.preadv, self._fd, buffers, offset)
        self._drop_behind(offset, nbytes)

    def write(self, offset: int, buffers: Sequence[memoryview]) -> None:
        """Write all the buffers, or raise OSError; how much was written then is unknown."""
        nbytes = _whole(self._disk.pwritev, self._fd, buffers, offset)
        self._drop_behind(offset, nbytes)

    def is_deleted(self) -> bool:
        """Whether somebody deleted it; true once it is closed."""
        return self._fd < 0 or self._disk.is_deleted(self._fd)

    def close(self) -> None:
        """Close it; idempotent. Nobody may be using it: its number may soon be another file's."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _open_direct(self) -> bool:
        """Open past the page cache; False where the file system refuses that, at opening or at the first read."""
        try:
            self._fd = self._disk.open(self.path, os.O_RDWR | _O_DIRECT)
        except OSError as exc:
            if exc.errno != errno.EINVAL:
                raise
            return False
        try:
            self._disk.preadv(self._fd, [pages(1)], 0)
        except OSError as exc:
            os.close(self._fd)
            if exc.errno != errno.EINVAL:
                raise
            return False
        return True

    def _drop_behind(self, offset: int, nbytes: int) -> None:
        """Keep the page cache for others: what is read again soon is in the CPU tier."""
        if not self.direct and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._fd, offset, nbytes, os.POSIX_FADV_DONTNEED)


def pages(count: int) -> memoryview:
    """Fresh page-aligned memory."""
    return memoryview(mmap.mmap(-1, count * PAGE))


def _whole(call: _Transfer, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
    """Repeat a call until all the buffers are through; returns their bytes."""
    total = sum(map(len, buffers))
    done = 0
    while done < total:
        moved = call(fd, buffers[:IOV_MAX], offset + done) // PAGE * PAGE
        if moved <= 0:
            raise OSError(errno.EIO, f"the transfer of {total} bytes at {offset} stopped after {done}")
        done += moved
        if done < total:
            buffers = _after(buffers, moved)
    return total


def _after(buffers: Sequence[memoryview], nbytes: int) -> list[memoryview]:
    """What is left of the buffers behind their first `nbytes`."""
    rest = list(buffers)
    while nbytes >= len(rest[0]):
        nbytes -= len(rest.pop(0))
    rest[0] = rest[0][nbytes:]
    return rest
