"""The host's certificate, which may be renewed while it is used."""

from __future__ import annotations

import ssl
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from kvtier.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Pem:
    """A certificate with its key, and whose certificates clients must have; all as PEM, `client_ca` empty for any."""

    cert: bytes
    key: bytes = field(repr=False)
    client_ca: bytes = b""


@dataclass(frozen=True, slots=True)
class Certificate:
    """The files of a certificate.

    Attributes:
        cert: chain of the host.
        key: its private key.
        client_ca: of the authorities that vouch for clients; None asks clients for no certificate.
    """

    cert: Path
    key: Path
    client_ca: Path | None = None

    def read(self) -> Pem:
        """What is in the files now.

        Raises:
            ConfigError: they cannot be read, or do not go together (as while they are being replaced).
        """
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(self.cert, self.key)
            client_ca = self.client_ca.read_bytes() if self.client_ca is not None else b""
            return Pem(self.cert.read_bytes(), self.key.read_bytes(), client_ca)
        except (OSError, ssl.SSLError) as exc:
            raise ConfigError(
                f"remote.cert {self.cert}, remote.key {self.key} and remote.client_ca cannot be used: {exc}; name PEM "
                "files that go together"
            ) from exc

    def expires(self) -> float:
        """Seconds since the epoch after which nobody takes the certificate.

        Raises:
            ConfigError: as `read`, or nobody takes it now.
        """
        self.read()
        server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        server.load_cert_chain(self.cert, self.key)
        client.load_verify_locations(self.cert)
        client.check_hostname = False
        client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        try:
            return float(ssl.cert_time_to_seconds(_shown(server, client)["notAfter"]))
        except ssl.SSLError as exc:
            raise ConfigError(f"remote.cert {self.cert} is good for nothing: {exc}; renew it") from exc


class Renewed:
    """What gRPC is to show at each handshake: the files' content, or the last that was whole.

    Attributes:
        pem: what holds now.
        fault: why the files, as they are now, were not taken; empty when they were.

    Raises:
        ConfigError: they cannot be used to begin with.
    """

    def __init__(self, certificate: Certificate) -> None:
        self._certificate = certificate
        self.pem = certificate.read()
        self.fault = ""

    def refresh(self) -> bool:
        """Read the files again; whether they have changed."""
        try:
            pem = self._certificate.read()
        except ConfigError as exc:
            self.fault = str(exc)
            return False
        self.fault = ""
        changed, self.pem = pem != self.pem, pem
        return changed

    def credentials(self) -> grpc.ServerCredentials:
        """For a gRPC server; new handshakes show what holds then."""
        asks = bool(self.pem.client_ca)

        def show() -> grpc.ServerCertificateConfiguration:
            pem = self.pem
            return grpc.ssl_server_certificate_configuration([(pem.key, pem.cert)], pem.client_ca or None)

        return grpc.dynamic_ssl_server_credentials(show(), show, require_client_authentication=asks)


def _shown(server: ssl.SSLContext, client: ssl.SSLContext) -> dict[str, Any]:
    """What a client is shown of a server's certificate, in a handshake with itself."""
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = (client.wrap_bio(back, there), server.wrap_bio(there, back, server_side=True))
    for _ in range(8):
        for end in ends:
            with suppress(ssl.SSLWantReadError):
                end.do_handshake()
    return dict(ends[0].getpeercert() or {})
