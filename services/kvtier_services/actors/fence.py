"""Cutting a tier's process off from the arena, for certain."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from kvtier.memory.lock import is_free

HANDS = "hands"
"""Folder, in the arena's, of the locks that tiers' processes hold."""
POLL = 0.01


def lock_path(arena_dir: Path, name: str) -> Path:
    """The lock that a tier's process holds while it may touch the arena; its folder is made."""
    (arena_dir / HANDS).mkdir(exist_ok=True, mode=0o700)
    return arena_dir / HANDS / f"{name}.lock"


def arena_mark(arena_dir: Path) -> str:
    """What tells this arena file from one that was there before; empty when there is none."""
    try:
        stat = (arena_dir / "arena").stat()
    except OSError:
        return ""
    return f"{stat.st_dev}:{stat.st_ino}:{stat.st_size}"


def fence(
    path: Path, *, kill: Callable[[int, int], None] = os.kill, sleep: Callable[[float], None] = time.sleep
) -> bool:
    """End the process that holds this lock, and wait until the kernel has let go of it; True if there was one.

    Waits as long as it takes: until then that process may be writing. The holder wrote its pid after it had the lock,
    so while the lock is held the pid is its own.
    """
    was_held = False
    while not is_free(path):
        was_held = True
        with suppress(OSError, ValueError):
            kill(int(path.read_text()), signal.SIGKILL)
        sleep(POLL)
    return was_held
