"""One region of memory that every process of a host maps."""

from __future__ import annotations

import mmap
import os
import secrets
import stat
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvtier.block import PAGE, slot_nbytes
from kvtier.config.machine import mib
from kvtier.errors import ConfigError, SessionUnavailable
from kvtier.memory import limits
from kvtier.memory.filling import Filling
from kvtier.memory.lock import FileLock, own

_HEAD = struct.Struct("<8sQQQ")
"""Magic, size, epoch, and how many bytes of the file have memory."""
_MAGIC = b"KVARENA2"
CLIENTS = "clients"

Pin = Callable[[NDArray[np.uint8]], None]
"""Page-locks a part of the arena's memory in this process, if it can."""


@dataclass(frozen=True, eq=False)
class Arena:
    """A mapped arena.

    Attributes:
        folder: where its files are; None for private memory.
        memory: the bytes; those beyond `ready` must not be touched.
        generations: u32 for each page; see the package's docstring.
        writers: u32 for each page; see the package's docstring.
        epoch: moves on with every new owner; a new file begins with a random one, so that no two arenas share it.
        allocated: one word, how many bytes from the beginning have memory; only grows.
        filling: gives memory to the rest; None in other processes than the owner's.
        lock: held for life by the owner; None in other processes.
    """

    folder: Path | None
    memory: NDArray[np.uint8]
    generations: NDArray[np.uint32]
    writers: NDArray[np.uint32]
    epoch: int
    allocated: NDArray[np.uint64]
    filling: Filling | None = None
    lock: FileLock | None = None

    @property
    def capacity(self) -> int:
        """Bytes, when all of it is ready."""
        return self.memory.nbytes

    @property
    def ready(self) -> int:
        """Bytes from the beginning that slots may be granted from: the owner's are also pinned, where that is asked."""
        return int(self.allocated[0]) if self.filling is None else self.filling.ready

    @property
    def fault(self) -> str:
        """Why the rest does not become ready at present; empty when it does, or is."""
        return "" if self.filling is None else self.filling.fault

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
        if self.filling is not None:
            self.filling.close()
        if self.lock is not None:
            self.lock.close()

    @classmethod
    def private(cls, capacity: int) -> Arena:
        """Memory of this process alone; all of it is ready: the kernel gives a page when it is touched.

        Raises:
            ConfigError: there is no room for it.
        """
        pages = _pages(capacity)
        if why := limits.fits(None, pages * PAGE):
            raise ConfigError(why)
        tables = np.zeros(2 * pages, np.uint32)
        memory = np.frombuffer(mmap.mmap(-1, pages * PAGE), np.uint8)
        return cls(None, memory, tables[:pages], tables[pages:], 1, np.array([pages * PAGE], np.uint64))

    @classmethod
    def own(cls, folder: Path, capacity: int, *, mode: int = 0o600, pin: Pin | None = None) -> Arena:
        """Create the arena in `folder`, or take over the one that a dead owner left there.

        The first step of its memory is ready then, and the rest becomes so in the background. Taking over moves all
        generations on, so that no reader of the old epoch accepts what it copies now.

        Args:
            folder: of its files.
            capacity: bytes.
            mode: of its files.
            pin: is called with each part before it is ready.

        Raises:
            ConfigError: another process owns it, there is no room for it, or the folder cannot be used.
        """
        try:
            return cls._own(folder, capacity, mode, pin)
        except OSError as exc:
            raise ConfigError(f"arena_dir {folder} cannot be used: {exc}; set it to a folder of yours") from exc

    @classmethod
    def _own(cls, folder: Path, capacity: int, mode: int, pin: Pin | None) -> Arena:
        size = _pages(capacity) * PAGE
        for made in (folder, folder / CLIENTS):
            made.mkdir(parents=True, exist_ok=True, mode=0o700)
            # Who may read the files may enter, whatever the umask; that files belong to the folder's group stays so.
            inherits = made.stat().st_mode & stat.S_ISGID
            made.chmod(mode | (mode & 0o444) >> 2 | 0o700 | inherits)
        lock = own(folder, "arena", "arena_dir", mode=mode)
        known = _read_head(folder)
        fresh = known is None or known[0] != size
        try:
            if fresh:
                _create(folder, size, mode)
            memory = _map(folder / "arena", size, writable=True)
            tables = _map(folder / "tables", PAGE + 2 * _table_nbytes(size), writable=True)
            head, generations, writers = _tables(tables, size)
            filling = _filling(folder, memory, head[3:], pin)
        except BaseException:
            if fresh:
                _remove(folder)
            lock.close()
            raise
        head[2] += np.uint64(1)
        # A fresh arena begins anywhere, so that a reader of the one before never sees a number that it knows.
        generations += np.uint32(secrets.randbits(32) if fresh else 1)
        filling.start()
        return cls(folder, memory, generations, writers, int(head[2]), head[3:], filling, lock)

    @classmethod
    def attach(cls, folder: Path, *, writable: bool = False) -> Arena:
        """Map the arena that another process owns.

        Raises:
            SessionUnavailable: there is none.
        """
        known = _read_head(folder)
        if known is None:
            raise SessionUnavailable(f"there is no arena in {folder}; is kvtier running? (`kvtier status`)")
        size, epoch = known
        try:
            memory = _map(folder / "arena", size, writable=writable)
            tables = _map(folder / "tables", PAGE + 2 * _table_nbytes(size), writable=False)
        except (OSError, ValueError) as exc:
            raise SessionUnavailable(f"the arena in {folder} cannot be mapped: {exc}") from exc
        head, generations, writers = _tables(tables, size)
        return cls(folder, memory, generations, writers, epoch, head[3:])


def _pages(capacity: int) -> int:
    if capacity < PAGE:
        raise ConfigError(f"an arena of {capacity} bytes is too small; set at least {PAGE}")
    return capacity // PAGE


def _table_nbytes(size: int) -> int:
    return -(-(size // PAGE * 4) // PAGE) * PAGE


def _tables(mapped: NDArray[np.uint8], size: int) -> tuple[NDArray[np.uint64], NDArray[np.uint32], NDArray[np.uint32]]:
    """Head, generations and writers."""
    words = mapped[PAGE:].view(np.uint32)
    step, pages = _table_nbytes(size) // 4, size // PAGE
    return mapped[: _HEAD.size].view(np.uint64), words[:pages], words[step : step + pages]


def _read_head(folder: Path) -> tuple[int, int] | None:
    """Size and epoch of the arena in a folder; None when there is no whole one."""
    try:
        with (folder / "tables").open("rb") as file:
            magic, size, epoch, _ = _HEAD.unpack(file.read(_HEAD.size))
        whole = (folder / "arena").stat().st_size == size
    except (OSError, struct.error):
        return None
    return (size, epoch) if magic == _MAGIC and whole else None


def _create(folder: Path, size: int, mode: int) -> None:
    """Make the files; the arena's own has no memory yet."""
    _remove(folder)
    tables = PAGE + 2 * _table_nbytes(size)
    if why := limits.fits(folder, size):
        raise ConfigError(why)
    for name, nbytes in (("arena", size), ("tables", tables)):
        fd = os.open(folder / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, mode)
        try:
            os.fchmod(fd, mode)
            os.ftruncate(fd, nbytes)
            if name == "tables":
                os.posix_fallocate(fd, 0, nbytes)
                os.pwrite(fd, _HEAD.pack(_MAGIC, size, int.from_bytes(os.urandom(6), "little"), 0), 0)
        finally:
            os.close(fd)


def _remove(folder: Path) -> None:
    for name in ("tables", "arena"):
        (folder / name).unlink(missing_ok=True)


def _filling(folder: Path, memory: NDArray[np.uint8], allocated: NDArray[np.uint64], pin: Pin | None) -> Filling:
    """Gives the arena's file its memory, the first step at once: a missing page would be a SIGBUS in an engine.

    Raises:
        ConfigError: there is no memory for the first step.
    """
    file = (folder / "arena").stat()

    def prepare(start: int, end: int) -> str:
        if end > allocated[0]:
            if why := _allocate(folder, file, start, end - start):
                return f"{mib(start)} of {mib(memory.nbytes)} are allocated, and {why}"
            allocated[0] = end
        if pin is not None:
            pin(memory[start:end])
        return ""

    filling = Filling(memory.nbytes, prepare, ready=0 if pin else int(allocated[0]))
    if not filling.ready and not filling.step():
        raise ConfigError(filling.fault)
    return filling


def _allocate(folder: Path, file: os.stat_result, offset: int, nbytes: int) -> str:
    """Give a part of the file its memory; why there is none, or empty."""
    try:
        room = limits.room(folder)
        if room.nbytes < nbytes:
            return f"{room.found}: {room.fix}, or set cpu.capacity lower"
        fd = os.open(folder / "arena", os.O_RDWR | os.O_CLOEXEC)
        try:
            if not os.path.samestat(os.fstat(fd), file):
                return f"{folder / 'arena'} was replaced"
            # The first sets pages of a tmpfs aside, the second clears them, so that no save has to.
            for _ in range(2):
                os.posix_fallocate(fd, offset, nbytes)
        finally:
            os.close(fd)
    except OSError as exc:
        return f"{folder} gives no more memory: {exc.strerror}"
    return ""


def _map(path: Path, size: int, *, writable: bool) -> NDArray[np.uint8]:
    fd = os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC)
    try:
        access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
        return np.frombuffer(mmap.mmap(fd, size, access=access), np.uint8)
    finally:
        os.close(fd)
