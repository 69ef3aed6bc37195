"""One region of memory that every process of a host maps."""

from __future__ import annotations

import errno
import mmap
import os
import secrets
import shutil
import stat
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvtier.block import PAGE, slot_nbytes
from kvtier.errors import ConfigError, SessionUnavailable
from kvtier.memory.lock import FileLock, own

_HEAD = struct.Struct("<8sQQ")
_MAGIC = b"KVARENA1"
CLIENTS = "clients"


@dataclass(frozen=True, eq=False)
class Arena:
    """A mapped arena.

    Attributes:
        folder: where its files are; None for private memory.
        memory: the bytes.
        generations: u32 for each page; see the package's docstring.
        writers: u32 for each page; see the package's docstring.
        epoch: moves on with every new owner; a new file begins with a random one, so that no two arenas share it.
        lock: held for life by the owner; None in other processes.
    """

    folder: Path | None
    memory: NDArray[np.uint8]
    generations: NDArray[np.uint32]
    writers: NDArray[np.uint32]
    epoch: int
    lock: FileLock | None = None

    @property
    def capacity(self) -> int:
        """Bytes."""
        return self.memory.nbytes

    def renew(self, offset: int, nbytes: int) -> int:
        """Move the slot's generation on, before it is granted; returns the new one.

        All its pages move on, not only the first: there a slot of another size may have begun, of which somebody still
        copies who has lost his lease.
        """
        first = offset // PAGE
        pages = self.generations[first : first + slot_nbytes(nbytes) // PAGE]
        pages += np.uint32(1)
        return int(pages[0])

    def payload(self, offset: int, nbytes: int) -> memoryview:
        """The bytes of one slot."""
        return self.memory[offset : offset + nbytes].data

    def close(self) -> None:
        """Let go of the owner's lock; mappings live on, and the files stay for the next owner."""
        if self.lock is not None:
            self.lock.close()

    @classmethod
    def private(cls, capacity: int) -> Arena:
        """Memory of this process alone."""
        pages = _pages(capacity)
        tables = np.zeros(2 * pages, np.uint32)
        memory = np.frombuffer(mmap.mmap(-1, pages * PAGE), np.uint8)
        return cls(None, memory, tables[:pages], tables[pages:], 1)

    @classmethod
    def own(cls, folder: Path, capacity: int, *, mode: int = 0o600) -> Arena:
        """Create the arena in `folder`, or take over the one that a dead owner left there.

        Taking over moves all generations on, so that no reader of the old epoch accepts what it copies now.

        Raises:
            ConfigError: another process owns it, there is no room for it, or the folder cannot be used.
        """
        try:
            return cls._own(folder, capacity, mode)
        except OSError as exc:
            raise ConfigError(f"arena_dir {folder} cannot be used: {exc}; set it to a folder of yours") from exc

    @classmethod
    def _own(cls, folder: Path, capacity: int, mode: int) -> Arena:
        size = _pages(capacity) * PAGE
        for made in (folder, folder / CLIENTS):
            made.mkdir(parents=True, exist_ok=True, mode=0o700)
            # Who may read the files may enter, whatever the umask; that files belong to the folder's group stays so.
            inherits = made.stat().st_mode & stat.S_ISGID
            made.chmod(mode | (mode & 0o444) >> 2 | 0o700 | inherits)
        lock = own(folder, "arena", "arena_dir", mode=mode)
        try:
            known = _read_head(folder)
            fresh = known is None or known[0] != size
            if fresh:
                _create(folder, size, mode)
            memory = _map(folder / "arena", size, writable=True)
            tables = _map(folder / "tables", PAGE + 2 * _table_nbytes(size), writable=True)
        except BaseException:
            lock.close()
            raise
        _, _, epoch = _HEAD.unpack_from(tables.data)
        tables[: _HEAD.size] = np.frombuffer(_HEAD.pack(_MAGIC, size, epoch + 1), np.uint8)
        generations, writers = _tables(tables, size)
        # A fresh arena begins anywhere, so that a reader of the one before never sees a number that it knows.
        generations += np.uint32(secrets.randbits(32) if fresh else 1)
        return cls(folder, memory, generations, writers, epoch + 1, lock)

    @classmethod
    def attach(cls, folder: Path, *, writable: bool = False) -> Arena:
        """Map the arena that another process owns.

        Raises:
            SessionUnavailable: there is none.
        """
        head = _read_head(folder)
        if head is None:
            raise SessionUnavailable(f"there is no arena in {folder}; is kvtier running? (`kvtier status`)")
        size, epoch = head
        try:
            memory = _map(folder / "arena", size, writable=writable)
            tables = _map(folder / "tables", PAGE + 2 * _table_nbytes(size), writable=False)
        except (OSError, ValueError) as exc:
            raise SessionUnavailable(f"the arena in {folder} cannot be mapped: {exc}") from exc
        generations, writers = _tables(tables, size)
        return cls(folder, memory, generations, writers, epoch)


def _pages(capacity: int) -> int:
    if capacity < PAGE:
        raise ConfigError(f"an arena of {capacity} bytes is too small; set at least {PAGE}")
    return capacity // PAGE


def _table_nbytes(size: int) -> int:
    return -(-(size // PAGE * 4) // PAGE) * PAGE


def _tables(mapped: NDArray[np.uint8], size: int) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
    words = mapped[PAGE:].view(np.uint32)
    step, pages = _table_nbytes(size) // 4, size // PAGE
    return words[:pages], words[step : step + pages]


def _read_head(folder: Path) -> tuple[int, int] | None:
    """Size and epoch of the arena in a folder; None when there is no whole one."""
    try:
        with (folder / "tables").open("rb") as file:
            magic, size, epoch = _HEAD.unpack(file.read(_HEAD.size))
        whole = (folder / "arena").stat().st_size == size
    except (OSError, struct.error):
        return None
    return (size, epoch) if magic == _MAGIC and whole else None


def _create(folder: Path, size: int, mode: int) -> None:
    """Make the files, with all their memory: a page that is missing later would be a SIGBUS in an engine."""
    for name in ("tables", "arena"):
        (folder / name).unlink(missing_ok=True)
    free = shutil.disk_usage(folder).free
    need = size + PAGE + 2 * _table_nbytes(size)
    if need > free:
        raise ConfigError(_too_small(folder, size, free))
    try:
        _allocate(folder / "arena", size, mode)
        _allocate(
            folder / "tables", need - size, mode, _HEAD.pack(_MAGIC, size, int.from_bytes(os.urandom(6), "little"))
        )
    except OSError as exc:
        for name in ("tables", "arena"):
            (folder / name).unlink(missing_ok=True)
        if exc.errno == errno.ENOSPC:
            raise ConfigError(_too_small(folder, size, free)) from exc
        raise


def _allocate(path: Path, nbytes: int, mode: int, head: bytes = b"") -> None:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, mode)
    try:
        os.fchmod(fd, mode)
        os.posix_fallocate(fd, 0, nbytes)
        os.pwrite(fd, head, 0)
    finally:
        os.close(fd)


def _too_small(folder: Path, size: int, free: int) -> str:
    return (
        f"{folder} has {free >> 20:,} MiB free, the arena needs {size >> 20:,} MiB: set cpu.capacity to at most "
        f"{free // 10 * 9 >> 20}MiB, enlarge the file system (in a container: the size of /dev/shm), or set arena_dir "
        "to a folder with more room"
    )


def _map(path: Path, size: int, *, writable: bool) -> NDArray[np.uint8]:
    fd = os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC)
    try:
        access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
        return np.frombuffer(mmap.mmap(fd, size, access=access), np.uint8)
    finally:
        os.close(fd)
