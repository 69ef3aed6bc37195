"""A disk that fails on demand, and a desk over a tier on it."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from kvtier.memory.arena import Arena
from kvtier.testing.tier import Desk
from kvtier.tiers.nvme import NvmeTier
from kvtier.tiers.nvme.io import Disk


class FaultyDisk(Disk):
    """Raises the errno that a call is set to; `before` hooks run first and may block or raise themselves."""

    def __init__(self) -> None:
        self.errors: dict[str, int] = {}
        self.before: dict[str, Callable[[int], None]] = {}
        self.calls: dict[str, int] = {}
        self.at_most: int | None = None
        self.written = 0

    def open(self, path, flags):
        self._enter("open", flags)
        return super().open(path, flags)

    def allocate(self, fd, nbytes):
        self._enter("allocate", nbytes)
        super().allocate(fd, nbytes)

    def preadv(self, fd, buffers, offset):
        self._enter("preadv", offset)
        return super().preadv(fd, self._some(buffers), offset)

    def pwritev(self, fd, buffers, offset):
        self._enter("pwritev", offset)
        moved = super().pwritev(fd, self._some(buffers), offset)
        self.written += moved
        return moved

    def _some(self, buffers):
        """The kernel may move less than it was asked to."""
        return buffers if self.at_most is None else [buffers[0][: self.at_most]]

    def _enter(self, call: str, argument: int) -> None:
        self.calls[call] = self.calls.get(call, 0) + 1
        if call in self.before:
            self.before[call](argument)
        if call in self.errors:
            raise OSError(self.errors[call], os.strerror(self.errors[call]))


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def disk() -> FaultyDisk:
    return FaultyDisk()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def open_nvme(tmp_path: Path, disk: FaultyDisk, clock: Clock):
    """Open the one store of a test; the tier opened before is closed first, or with `crashed` ends as by kill -9."""
    desks: list[Desk] = []

    def open_it(capacity: int = 1 << 20, *, crashed: bool = False, **options) -> Desk:
        if crashed:
            errors, disk.errors = disk.errors, {"pwritev": errno.EIO}
            close()
            disk.errors = errors
        close()
        arena = Arena.private(4 << 20)
        tier = NvmeTier(tmp_path / "store", capacity, arena, disk=disk, clock=clock, **options)
        desks.append(Desk(tier, arena))
        return desks[-1]

    def close() -> None:
        for desk in desks:
            desk.tier.close()

    yield open_it
    close()
