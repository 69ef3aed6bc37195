"""Whether an arena fits, before it is made."""

from __future__ import annotations

import shutil
from pathlib import Path

from kvtier.block import PAGE
from kvtier.config.machine import PROC, Room, memory, mib


def room(folder: Path | None, *, proc: Path = PROC) -> Room:
    """What the tightest limit leaves to an arena: its file system, the machine's memory, or a control group.

    Args:
        folder: of the arena; exists. None for private memory.
        proc: where the process file system is.
    """
    found = memory(proc)
    if folder is None:
        return found
    free = shutil.disk_usage(folder).free
    if free > found.nbytes:
        return found
    fix = "enlarge the file system (in a container: the size of /dev/shm), or set arena_dir to a folder with more room"
    return Room(free, f"{folder} has {mib(free)} free", fix)


def fits(folder: Path | None, capacity: int, *, proc: Path = PROC) -> str:
    """Why an arena of this capacity, with its tables, does not fit, and what would; empty when it fits.

    Args:
        folder: of the arena; exists. None for private memory.
        capacity: bytes.
        proc: where the process file system is.
    """
    limit = room(folder, proc=proc)
    if capacity + capacity // PAGE * 8 + 3 * PAGE <= limit.nbytes:
        return ""
    return f"{limit.found}, the arena needs {mib(capacity)}: {advice(limit)}"


def advice(limit: Room) -> str:
    """What to do about an arena that does not fit: the size that does, with a tenth to spare."""
    return f"set cpu.capacity to at most {limit.nbytes // 10 * 9 >> 20}MiB, or {limit.fix}"
