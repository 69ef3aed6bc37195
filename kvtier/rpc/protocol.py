"""What both sides of a door know of each other."""

from __future__ import annotations

from pathlib import Path

from kvtier.memory.arena import CLIENTS

PROTOCOL = 3
"""Version of `kvtier.proto` and of what its packed fields mean; client and host must have the same."""

MAX_MESSAGE = 16 << 20
"""Bytes of one message: a match of 400,000 keys."""

LONGEST_WAIT = 600.0
"""Seconds that a call may be told to wait."""

SESSIONS = range(1, 1 << 32)
"""Numbers that a client may choose for a session; the arena's `writers` table has a u32 for each page, 0 for none."""


def client_lock(folder: Path, session: int) -> Path:
    """The file that a session's process holds a lock on while it may write into the arena in `folder`."""
    return folder / CLIENTS / f"{session}.lock"
