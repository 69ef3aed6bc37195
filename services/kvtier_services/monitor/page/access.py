"""Who may look at the status page."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from kvtier.config.machine import is_loopback
from kvtier.errors import ConfigError

COOKIE = "kvtier-status"
LEAST = 16
"""Characters of a token."""
Verdict = Literal["yes", "no", "elsewhere"]


def read_token(file: Path) -> bytes:
    """The token that a file has.

    Raises:
        ConfigError: it cannot be used; the message says what to change.
    """
    try:
        mode, text = file.stat().st_mode, file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"status.token_file {file} cannot be read: {exc}; write a token there") from exc
    if mode & 0o007:
        raise ConfigError(f"status.token_file {file} is open to everybody on this machine: chmod o-rwx {file}")
    if len(text) < LEAST or not text.isascii() or any(sign.isspace() for sign in text):
        raise ConfigError(
            f"status.token_file {file} has no token of {LEAST} letters and digits or more; write one there, as by "
            f"`openssl rand -hex 24 > {file}`"
        )
    return text.encode()


@dataclass(frozen=True, slots=True)
class Access:
    """What a request must show.

    Without a token only browsers that mean this machine are let in: a page from elsewhere may have its own name
    resolved to a loopback address, but cannot change the Host header that its requests carry.

    Attributes:
        token: empty for none.
    """

    token: bytes = b""

    @property
    def cookie(self) -> str:
        """What a browser that has shown the token is given: not the token itself, and the same after a restart."""
        return hmac.new(self.token, b"kvtier status page", hashlib.sha256).hexdigest()

    def of_request(self, headers: Mapping[str, str], cookies: Mapping[str, str]) -> Verdict:
        """Whether a request may be answered; "elsewhere" when it means another machine."""
        if not self.token:
            return "yes" if _means_loopback(headers.get("host", "")) else "elsewhere"
        scheme, _, shown = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and self.is_token(shown.strip()):
            return "yes"
        known = hmac.compare_digest(cookies.get(COOKIE, "").encode(), self.cookie.encode())
        return "yes" if known else "no"

    def is_token(self, shown: str) -> bool:
        """Whether this is the token; takes as long for any other."""
        return bool(self.token) and hmac.compare_digest(shown.encode(), self.token)


def _means_loopback(host: str) -> bool:
    try:
        return is_loopback(urlsplit(f"//{host}").hostname or "")
    except ValueError:  # brackets without an address
        return False
