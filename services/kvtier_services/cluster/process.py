"""A process, told apart from a later one with the same pid."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

import msgspec
import psutil

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
POLL = 0.05


class Process(msgspec.Struct, frozen=True):
    """A process of this machine.

    Attributes:
        pid: its number.
        born: when it was started: which boot, and how long after it; nobody else ever has both.
    """

    pid: int
    born: str

    @classmethod
    def of(cls, pid: int) -> Process | None:
        """The process that has this pid now; None when there is none."""
        born = _born(pid)
        return cls(pid, born) if born else None

    def alive(self) -> bool:
        """Whether it still runs."""
        return _born(self.pid) == self.born

    def tree(self) -> list[psutil.Process]:
        """It and all that it started, as far as they live and were not adopted by another."""
        try:
            root = psutil.Process(self.pid)
            return [root, *root.children(recursive=True)] if self.alive() else []
        except psutil.Error:
            return []


def marked(name: str, value: str) -> list[psutil.Process]:
    """All processes of this user that have this environment variable, and what they started."""
    found: dict[int, psutil.Process] = {}
    for process in psutil.process_iter():
        try:
            if process.environ().get(name) == value:
                found |= {p.pid: p for p in (process, *process.children(recursive=True))}
        except psutil.Error:
            continue
    return list(found.values())


def end(find: Callable[[], Iterable[psutil.Process]], timeout: float) -> list[int]:
    """Kill what `find` finds until all that it ever found is gone; pids of those that are left after `timeout` seconds.

    What is dying is not found any more, and still holds its locks.
    """
    deadline = time.monotonic() + timeout
    found: set[Process] = set()
    while True:
        found |= {mark for process in find() if (mark := Process.of(process.pid))}
        found = {mark for mark in found if mark.alive()}
        if not found or time.monotonic() > deadline:
            return [mark.pid for mark in found]
        for mark in found:
            with suppress(OSError):
                os.kill(mark.pid, signal.SIGKILL)
        time.sleep(POLL)


def _born(pid: int) -> str:
    """Empty when there is no such process, or only what is left of one until its parent asks."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return "" if state in "ZX" else f"{BOOT_ID.read_text().strip()}/{fields[18]}"
    except OSError:
        if BOOT_ID.exists():
            return ""
    try:  # no Linux
        process = psutil.Process(pid)
        return "" if process.status() == psutil.STATUS_ZOMBIE else f"{process.create_time():.2f}"
    except psutil.Error:
        return ""
