"""From a folder to a log: create the file, or set a foreign one aside, or scan it."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from kvtier.block import PAGE, slot_nbytes
from kvtier.errors import ConfigError
from kvtier.memory.lock import FileLock, own
from kvtier.tiers.nvme.io import Disk, RegionFile, pages
from kvtier.tiers.nvme.log import Life, RegionLog
from kvtier.tiers.nvme.record import Record, wrong
from kvtier.tiers.nvme.regions import STORE_ID_NBYTES, Frame, Geometry, Superblock, checksum

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
        superblock = _existing(path, geometry, disk, notes) or _create(path, geometry, disk)
        file = RegionFile(path, disk, direct=direct)
    except OSError as exc:
        lock.close()
        raise ConfigError(_unusable(folder, geometry, exc)) from exc
    if direct and not file.direct:
        notes.append(f"{folder} refuses direct I/O: buffered I/O is used, which costs speed and page cache")
    log = RegionLog(geometry)
    log.adopt(_Scan(file, superblock.store, geometry, notes).lives(threads))
    return Opened(file, superblock.store, log, tuple(notes), lock)


def _locked(folder: Path) -> FileLock:
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return own(folder, "NVMe tier", "nvme.path")


def _existing(path: Path, geometry: Geometry, disk: Disk, notes: list[str]) -> Superblock | None:
    """The superblock of the file that is there, made to fit; None after a file of another kind was set aside."""
    try:
        fd = disk.open(path, os.O_RDWR)
    except FileNotFoundError:
        return None
    try:
        page = pages(1)
        found = Superblock.unpack(page[: disk.preadv(fd, [page], 0)])
        if isinstance(found, Superblock) and found.geometry.region_nbytes != geometry.region_nbytes:
            found = f"its regions have {found.geometry.region_nbytes} bytes, not {geometry.region_nbytes}"
        if isinstance(found, Superblock):
            disk.allocate(fd, geometry.file_nbytes)
            if found.geometry != geometry:
                notes.append(f"{path} was resized from {found.geometry.count} to {geometry.count} regions")
                found = Superblock(found.store, geometry)
                _write(disk, fd, found)
            return found
    finally:
        os.close(fd)
    aside = next(p for n in range(1, 1 << 20) if not (p := path.with_name(f"{FILE}.aside-{n}")).exists())
    path.rename(aside)
    notes.append(f"{path} was set aside as {aside.name}, because {found}; it is not counted, delete it for its space")
    return None


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


class _Scan:
    """One pass over the frames of all regions."""

    def __init__(self, file: RegionFile, store: bytes, geometry: Geometry, notes: list[str]) -> None:
        self._file = file
        self._store = store
        self._geometry = geometry
        self._notes = notes

    def lives(self, threads: int) -> list[Life | None]:
        """What can be trusted of each region."""
        with ThreadPoolExecutor(threads, "nvme-scan") as pool:
            lives = list(pool.map(self._life, range(self._geometry.count)))
        known = [life for life in lives if life is not None]
        ends = {life.sequence - 1: life.former_tail for life in known}
        for region, life in enumerate(lives):
            if life is not None and (end := ends.get(life.sequence)) is not None:
                _cut(life, self._geometry.start(region) + end)
        if known:
            self._cut_torn(max(known, key=lambda life: life.sequence))
        return lives

    def _life(self, region: int) -> Life | None:
        """Follow the frames of a region to the first that does not continue them."""
        start = self._geometry.start(region)
        at, end = start, start + self._geometry.region_nbytes
        page = pages(1)
        links: list[tuple[Frame, bytes]] = []
        while at < end:
            try:
                self._file.read(at, [page])
            except OSError as exc:
                self._notes.append(f"region {region} could not be read at {at}: {exc}")
                break
            found = Frame.unpack(self._store, page)
            if found is None or not _continues(links, found[0], at, end):
                break
            links.append(found)
            at += found[0].span
        if not links:
            return None
        first, _ = links[0]
        return Life(first.sequence, first.settled, first.previous, links)

    def _cut_torn(self, newest: Life) -> None:
        """Cut the newest life at the first payload that was being written when the last process ended."""
        start = newest.links[0][0].offset
        settled = start + max((frame.settled for frame, _ in newest.links[1:]), default=0)
        for frame, _ in newest.links:
            if frame.offset >= settled and not self._is_whole(frame):
                _cut(newest, frame.offset)
                return

    def _is_whole(self, frame: Frame) -> bool:
        slot = pages(slot_nbytes(frame.nbytes) // PAGE)
        record = Record(frame.offset, frame.key, frame.nbytes, slot, frame.packed)
        content = pages(record.length // PAGE) if record.packed else slot
        try:
            self._file.read(frame.offset + PAGE, [content])
        except OSError:
            return False
        return wrong(record, content) is None


def _continues(links: Sequence[tuple[Frame, bytes]], frame: Frame, at: int, end: int) -> bool:
    """Whether a whole frame found at `at` is the next one of this life."""
    if frame.offset != at or not 0 < (frame.packed or frame.nbytes) <= frame.span <= end - at or not frame.sequence:
        return False
    if not links:
        return True
    last, sealed = links[-1]
    return frame.sequence == last.sequence and frame.previous == checksum(sealed)


def _cut(life: Life, end: int) -> None:
    """Forget what lies at `end` and behind: it was never acknowledged."""
    life.links[:] = [link for link in life.links if link[0].offset < end]
