"""TLS between hosts, with certificates that are read again when they change."""

from __future__ import annotations

import ssl
import threading
from dataclasses import dataclass
from pathlib import Path

from kvtier.errors import ConfigError


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files; every host of the fleet has a certificate of the same authority, and shows it to whom it calls.

    Attributes:
        cert: this host's certificate, with what links it to the authority.
        key: its key.
        ca: the authority's certificate.
    """

    cert: Path
    key: Path
    ca: Path


class Tls:
    """What connections are wrapped in. Thread-safe.

    A host is known by its certificate's authority and not by its address: a fleet's hosts are all alike. Files that
    changed are read again for the next connection; while they do not belong together yet, the last ones that did serve.

    Raises:
        ConfigError: the files cannot be used.
    """

    def __init__(self, files: TlsFiles) -> None:
        self._files = files
        self._lock = threading.Lock()
        try:
            self._seen = self._look()
            self._contexts = self._read()
        except OSError as exc:
            raise ConfigError(
                f"TLS between hosts cannot use {files.cert}, {files.key} and {files.ca}: {exc}; give PEM files of one "
                "certificate, its key and the authority that signed it"
            ) from exc

    def server(self) -> ssl.SSLContext:
        """For a connection that came in."""
        return self._fresh()[0]

    def client(self) -> ssl.SSLContext:
        """For a connection that this host opens."""
        return self._fresh()[1]

    def _fresh(self) -> tuple[ssl.SSLContext, ssl.SSLContext]:
        with self._lock:
            try:
                seen = self._look()
                if seen != self._seen:
                    self._contexts = self._read()
                    self._seen = seen
            except OSError:
                pass
            return self._contexts

    def _look(self) -> list[tuple[int, int, int]]:
        files = self._files
        stats = [path.stat() for path in (files.cert, files.key, files.ca)]
        return [(each.st_ino, each.st_size, each.st_mtime_ns) for each in stats]

    def _read(self) -> tuple[ssl.SSLContext, ssl.SSLContext]:
        """Server's and client's context. `ssl.SSLError` is an OSError."""
        files = self._files
        made = []
        for protocol in (ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT):
            context = ssl.SSLContext(protocol)
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            context.check_hostname = False
            context.verify_mode = ssl.CERT_REQUIRED
            context.load_cert_chain(files.cert, files.key)
            context.load_verify_locations(files.ca)
            made.append(context)
        return made[0], made[1]
