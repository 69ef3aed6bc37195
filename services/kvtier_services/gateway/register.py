"""Who is known, as the tokens file says now."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path

from kvtier.errors import ConfigError, Unauthenticated
from kvtier_services.gateway.callers import Caller, Tenant
from kvtier_services.gateway.tokens import LOCAL, fingerprint, read

_log = logging.getLogger(__name__)

_PREFIX = "Bearer "


class Register:
    """Callers by token. Reading the file again keeps tenants that are still there, with what they have.

    Args:
        path: of the tokens file.

    Attributes:
        fault: why the file, as it is now, was not taken; what it said before holds then.
        tenants: by name.
        local_salt: of the engines of this host; none while the file has none.

    Raises:
        ConfigError: the file cannot be used.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._mark = self._look()
        self._callers: dict[str, Caller] = {}
        self.fault = ""
        self.tenants: dict[str, Tenant] = {}
        self.local_salt = b""
        self._take()

    def caller(self, token: str) -> Caller:
        """Who has this token. Thread-safe.

        Raises:
            Unauthenticated: nobody (any more).
        """
        found = self._callers.get(fingerprint(token)) if token else None
        if found is None:
            raise Unauthenticated("this token is not known here, or was revoked: `kvtier token add` on the host")
        return found

    def knows(self, caller: Caller) -> bool:
        """Whether a caller's token still holds, with the same rights."""
        return self._callers.get(caller.fingerprint) is caller

    def refresh(self) -> bool:
        """Read the file if it has changed; whether it was taken."""
        mark = self._look()
        if mark == self._mark:
            return False
        try:
            self._take()
        except ConfigError as exc:
            self._mark, self.fault = mark, str(exc)
            _log.error("tokens not reloaded: %s", exc)
            return False
        self._mark, self.fault = mark, ""
        _log.info("tokens reloaded tokens=%d tenants=%d", len(self._callers), len(self.tenants))
        return True

    def _look(self) -> tuple[int, ...]:
        try:
            found = self._path.stat()
        except OSError:
            return ()
        return found.st_ino, found.st_size, found.st_mtime_ns, found.st_mode

    def _take(self) -> None:
        told = read(self._path)
        tenants: dict[str, Tenant] = {}
        for name, entry in told.tenants.items():
            salt, known = bytes.fromhex(entry.salt), self.tenants.get(name)
            same = known is not None and known.salt == salt
            tenants[name] = known if known is not None and same else Tenant(name, salt, entry.quota)
            tenants[name].quota = entry.quota
        callers = {}
        for token in told.tokens:
            new = Caller(token.name, tenants[token.tenant], token.admin, token.sha256)
            old = self._callers.get(token.sha256)
            callers[token.sha256] = old if old == new else new
        local = tenants.pop(LOCAL, None)
        # The salt of this host's engines is in keys that they have made already: it holds until a restart.
        self.local_salt = self.local_salt or (local.salt if local else b"")
        self._callers, self.tenants = callers, tenants


def bearer(metadata: Iterable[tuple[str, str | bytes]]) -> str:
    """The token that a call carries; empty for none."""
    value = next((value for name, value in metadata if name == "authorization"), "")
    text = value.decode("ascii", "replace") if isinstance(value, bytes) else value
    return text.removeprefix(_PREFIX) if text.startswith(_PREFIX) else ""
