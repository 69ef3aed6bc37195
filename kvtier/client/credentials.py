"""What proves to a remote host who calls, and to the caller that it is this host."""

from __future__ import annotations

import os
import ssl
from dataclasses import dataclass, field
from pathlib import Path

from kvtier.client.way import Metadata
from kvtier.errors import ConfigError

TOKEN_ENV = "KVTIER_TOKEN"  # noqa: S105 - the name of the variable


@dataclass(frozen=True, slots=True)
class Tls:
    """Certificates, as PEM.

    Attributes:
        roots: of the authorities that may vouch for the host.
        cert, key: of this client; empty for none.
    """

    roots: bytes = field(repr=False)
    cert: bytes = field(default=b"", repr=False)
    key: bytes = field(default=b"", repr=False)


@dataclass(frozen=True, slots=True)
class Credentials:
    """How a client proves who it is.

    Attributes:
        metadata: that every call carries.
        tls: None for plain text.
    """

    metadata: Metadata = field(repr=False)
    tls: Tls | None

    @classmethod
    def of(
        cls,
        token: str = "",
        *,
        tls: bool = True,
        ca: Path | str | None = None,
        cert: Path | str | None = None,
        key: Path | str | None = None,
    ) -> Credentials:
        """Read them from files.

        Args:
            token: the bearer token; $KVTIER_TOKEN when empty.
            tls: whether the channel is encrypted.
            ca: certificates of the authorities that may vouch for the host; the system's unless given.
            cert: this client's certificate, for hosts that ask for one.
            key: its private key.

        Raises:
            ConfigError: a file that cannot be read, or no token.
        """
        token = token or os.environ.get(TOKEN_ENV, "")
        if not token.isascii() or not token.isprintable() or not token or " " in token:
            raise ConfigError(
                f"a remote host asks for a token: pass token=, or set ${TOKEN_ENV} (`kvtier token add` on the host)"
            )
        if bool(cert) != bool(key):
            raise ConfigError("cert and key go together: pass both, or neither")
        metadata = (("authorization", f"Bearer {token}"),)
        if not tls:
            return cls(metadata, None)
        roots = _read(ca or ssl.get_default_verify_paths().cafile or "", "ca")
        return cls(metadata, Tls(roots, _read(cert, "cert") if cert else b"", _read(key, "key") if key else b""))


def _read(path: Path | str, name: str) -> bytes:
    try:
        return Path(path).expanduser().read_bytes()
    except OSError as exc:
        raise ConfigError(f"{name} {str(path)!r} cannot be read: {exc.strerror}; name a PEM file") from exc
