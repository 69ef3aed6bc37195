"""From a folder to a log: create the file, or set a foreign one aside, or read what is in it."""

from __future__ import annotations

import errno
import os
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from kvtier.block import PAGE
from kvtier.errors import ConfigError
from kvtier.memory.lock import FileLock, own
from kvtier.tiers.nvme.io import Disk, RegionFile, pages
from kvtier.tiers.nvme.log import RegionLog
from kvtier.tiers.nvme.regions import STORE_ID_NBYTES, Geometry, Superblock
from kvtier.tiers.nvme.scan import Scan

FILE = "regions"


@dataclass(frozen=True, slots=True)
class Opened:
    """A store that is ready for use.

    Attributes:
        file: the open file.
        store: its id.
        log: what is in it.
        notes: what a person should know about the opening.
        lock: keeps other processes out.
    """

    file: RegionFile
    store: bytes
    log: RegionLog
    notes: tuple[str, ...]
    lock: FileLock

    def close(self) -> None:
        """Let go of file and lock; idempotent."""
        self.file.close()
        self.lock.close()


def open_store(folder: Path, geometry: Geometry, disk: Disk, *, direct: bool, threads: int) -> Opened:
    """Open the store of a folder, or create it.

    Raises:
        ConfigError: another process has it, there is no room for it, or the folder cannot be used.
    """
    try:
        lock = _locked(folder)
    except OSError as exc:
        raise ConfigError(_unusable(folder, geometry, exc)) from exc
    path = folder / FILE
    notes: list[str] = []
    try:
        superblock, former = _existing(path, geometry, disk, notes), None
        if superblock is None:
            superblock = _create(path, geometry, disk)
        elif superblock.geometry.count > geometry.count:
            with closing(RegionFile(path, disk, direct=direct)) as file:
                former = _log(file, superblock, disk, [], threads).entries
        superblock = _fit(path, superblock, geometry, disk, notes)
        file = RegionFile(path, disk, direct=direct)
    except OSError as exc:
        lock.close()
        raise ConfigError(_unusable(folder, geometry, exc)) from exc
    if direct and not file.direct:
        notes.append(f"{folder} refuses direct I/O: buffered I/O is used, which costs speed and page cache")
    log = _log(file, superblock, disk, notes, threads)
    if former is not None:
        # What was cut off may have said that a key is removed, or where it lies since.
        log.forget([key for key, place in log.entries.items() if former.get(key) != place])
    return Opened(file, superblock.store, log, tuple(notes), lock)


def _locked(folder: Path) -> FileLock:
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return own(folder, "NVMe tier", "nvme.path")


def _log(file: RegionFile, superblock: Superblock, disk: Disk, notes: list[str], threads: int) -> RegionLog:
    log = RegionLog(superblock.geometry, int.from_bytes(disk.random(8), "little"))
    log.adopt(Scan(file, superblock.store, superblock.geometry, notes).lives(threads))
    return log


def _existing(path: Path, geometry: Geometry, disk: Disk, notes: list[str]) -> Superblock | None:
    """The superblock of the file that is there; None after a file of another kind was set aside."""
    try:
        fd = disk.open(path, os.O_RDWR)
    except FileNotFoundError:
        return None
    try:
        page = pages(1)
        found = Superblock.unpack(page[: disk.preadv(fd, [page], 0)])
        if isinstance(found, Superblock) and found.geometry.region_nbytes != geometry.region_nbytes:
            found = f"its regions have {found.geometry.region_nbytes} bytes, not {geometry.region_nbytes}"
    finally:
        os.close(fd)
    if isinstance(found, Superblock):
        return found
    aside = next(p for n in range(1, 1 << 20) if not (p := path.with_name(f"{FILE}.aside-{n}")).exists())
    path.rename(aside)
    notes.append(f"{path} was set aside as {aside.name}, because {found}; it is not counted, delete it for its space")
    return None


def _fit(path: Path, found: Superblock, geometry: Geometry, disk: Disk, notes: list[str]) -> Superblock:
    """Give the file its size."""
    fitting = Superblock(found.store, geometry)
    fd = disk.open(path, os.O_RDWR)
    try:
        disk.allocate(fd, geometry.file_nbytes)
        if found != fitting:
            notes.append(f"{path} was resized from {found.geometry.count} to {geometry.count} regions")
            _write(disk, fd, fitting)
    finally:
        os.close(fd)
    return fitting


def _create(path: Path, geometry: Geometry, disk: Disk) -> Superblock:
    """Make the file under another name first, so that a crash leaves no half one."""
    fresh = path.with_name(f"{FILE}.new")
    fresh.unlink(missing_ok=True)
    superblock = Superblock(disk.random(STORE_ID_NBYTES), geometry)
    fd = disk.open(fresh, os.O_RDWR | os.O_CREAT)
    try:
        disk.allocate(fd, geometry.file_nbytes)
        _write(disk, fd, superblock)
    except OSError:
        fresh.unlink(missing_ok=True)
        raise
    finally:
        os.close(fd)
    fresh.rename(path)
    return superblock


def _write(disk: Disk, fd: int, superblock: Superblock) -> None:
    if disk.pwritev(fd, [memoryview(superblock.pack())], 0) != PAGE:
        raise OSError(errno.EIO, "the superblock could not be written")
    os.fsync(fd)


def _unusable(folder: Path, geometry: Geometry, exc: OSError) -> str:
    if exc.errno == errno.ENOSPC:
        return (
            f"{folder} has no room for an NVMe tier of {geometry.file_nbytes / 2**20:,.0f} MiB: set nvme.capacity "
            "lower, free space, or set nvme.path to another disk"
        )
    return f"the NVMe tier cannot use {folder}: {exc}; set nvme.path to a folder that this user may write"
