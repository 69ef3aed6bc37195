"""A client's lock file in the arena's folder."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from weakref import WeakSet

from kvtier.errors import SessionUnavailable, Unauthenticated
from kvtier.memory.lock import FileLock
from kvtier.rpc.protocol import SESSIONS, client_lock

_SHARED = 0o660


class Presence:
    """A session's number, and the proof that its process may still write into the arena.

    The host keeps the slots that a cut-off session was writing into until the lock of this file falls: when `close` is
    called or when the process dies. The file appears under its name only after it is locked, so that the host never
    takes a new one for a dead one.

    Attributes:
        session: the number, chosen by chance.

    Raises:
        SessionUnavailable: the arena's folder is gone.
        Unauthenticated: this user may not use the arena.
    """

    def __init__(self, folder: Path) -> None:
        self.session = SESSIONS.start + secrets.randbelow(len(SESSIONS))
        self._path = client_lock(folder, self.session)
        hidden = self._path.with_suffix(".new")
        try:
            mode = (folder / "arena").stat().st_mode & _SHARED
            self._lock = FileLock(hidden, mode=mode)
            self._lock.acquire()
            hidden.chmod(mode)
            hidden.rename(self._path)
        except PermissionError as exc:
            raise Unauthenticated(
                f"this user may not use the arena in {folder}: {exc}; run as the user that runs kvtier, or set access "
                'to "group" and join that group'
            ) from exc
        except OSError as exc:
            raise SessionUnavailable(f"there is no arena in {folder}: {exc}; is kvtier running?") from exc
        _held.add(self)

    def close(self) -> None:
        """This process writes nothing more under this number; idempotent."""
        self._path.unlink(missing_ok=True)
        self._lock.close()

    def forget(self) -> None:
        """Let go of a forked copy; the lock stays with the parent."""
        self._lock.close()


_held: WeakSet[Presence] = WeakSet()


def _in_child() -> None:
    """A forked child shares its parent's locks and would hold them after the parent's death."""
    for presence in list(_held):
        presence.forget()


os.register_at_fork(after_in_child=_in_child)
