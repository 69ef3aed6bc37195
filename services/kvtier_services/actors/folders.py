"""Folders of kvtier's own: who may enter them, and what is removed of them."""

from __future__ import annotations

import grp
import os
import shutil
from contextlib import suppress
from pathlib import Path

from kvtier.errors import ConfigError
from kvtier.memory.device import MEMORY, TABLE

ARENA_FILES = ("arena", "tables", "lock")
ARENA_FOLDERS = ("clients", "hands")


def make_folder(folder: Path, what: str, group: str = "") -> None:
    """Make a folder that only this user, and a group if one is named, may enter.

    Args:
        folder: made with its parents.
        what: name of its field, for messages.
        group: name of the group.

    Raises:
        ConfigError: it is somebody else's, or cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        stat = folder.stat()
        if stat.st_uid != os.getuid():
            raise ConfigError(
                f"{what} {folder} belongs to another user (uid {stat.st_uid}); set it to a folder of yours"
            )
        if group:
            os.chown(folder, -1, grp.getgrnam(group).gr_gid)
            folder.chmod(0o750)
    except KeyError as exc:
        raise ConfigError(f"there is no group {group!r} on this machine; set group to one of `getent group`") from exc
    except OSError as exc:
        raise ConfigError(f"{what} {folder} cannot be made: {exc.strerror}; set it to a folder of yours") from exc


def write_secret(file: Path, text: str) -> None:
    """Write a file that only this user reads, whole or not at all; one that says this already is left as it is."""
    with suppress(OSError):
        if file.read_text() == text:
            return
    part = file.with_name(f"{file.name}.{os.getpid()}")
    part.unlink(missing_ok=True)
    with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "w") as out:
        out.write(text)
    part.replace(file)


def share_arena(folder: Path, group: str) -> None:
    """Give the files of an arena that was just taken over to a group; nothing to do without one."""
    if not group:
        return
    number = grp.getgrnam(group).gr_gid
    for name in ("", *ARENA_FILES, "clients"):
        os.chown(folder / name, -1, number)
    (folder / "clients").chmod(0o2770)  # engines of other users make their locks there


def sweep_arena(folder: Path) -> None:
    """Remove the arena's files, and the folder if nothing else is in it."""
    for name in (*ARENA_FILES, MEMORY, TABLE):
        (folder / name).unlink(missing_ok=True)
    for name in ARENA_FOLDERS:
        shutil.rmtree(folder / name, ignore_errors=True)
    with suppress(OSError):
        folder.rmdir()
