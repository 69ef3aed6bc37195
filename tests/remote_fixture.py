"""Remote doors for tests, with certificates of their own."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kvtier.client.credentials import Credentials
from kvtier.client.door import DoorSession
from kvtier.client.remote import RemoteWay
from kvtier.hierarchy.cache import Hierarchy
from kvtier_services.gateway import tokens
from kvtier_services.gateway.register import Register
from kvtier_services.gateway.remote import Listen, RemoteDoor
from tests.door_fixture import Loop


def openssl(*args: object) -> None:
    subprocess.run(["openssl", *map(str, args)], check=True, capture_output=True)


class Authority:
    """Vouches for certificates, in a folder."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        folder.mkdir(exist_ok=True)
        self._folder, self.cert, self._key = folder, folder / f"{name}.pem", folder / f"{name}.key"
        new = ["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
        openssl(*new, "-subj", f"/CN={name}", "-keyout", self._key, "-out", self.cert)

    def issue(self, name: str) -> tuple[Path, Path]:
        """A certificate for 127.0.0.1 and localhost; issued again, it replaces the one before."""
        cert, key, asked = (self._folder / f"{name}.{kind}" for kind in ("pem", "key", "csr"))
        extra = self._folder / f"{name}.ext"
        extra.write_text("subjectAltName=IP:127.0.0.1,DNS:localhost\n")
        new = ["req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-subj", f"/CN={name}"]
        openssl(*new, "-keyout", f"{key}.new", "-out", asked)
        sign = ["x509", "-req", "-in", asked, "-CA", self.cert, "-CAkey", self._key, "-days", "2", "-extfile", extra]
        openssl(*sign, "-out", f"{cert}.new")
        Path(f"{key}.new").replace(key)
        Path(f"{cert}.new").replace(cert)
        return cert, key


@dataclass(frozen=True)
class Remote:
    """A remote door that runs, and how to come in."""

    door: RemoteDoor
    tokens: Path
    audit: Path
    ca: Path | None
    loop: Loop

    @property
    def url(self) -> str:
        return f"grpc{'s' if self.ca else ''}://127.0.0.1:{self.door.port}"

    def way(self, token: str, **files: Path) -> RemoteWay:
        return RemoteWay(self.url, Credentials.of(token, tls=self.ca is not None, ca=self.ca, **files))

    def session(self, token: str, **options) -> DoorSession:
        return DoorSession(self.way(token), **options)

    def add(self, name: str, **options) -> str:
        """A token that is known to the door at once."""
        token = tokens.add(self.tokens, name, **options)
        self.door.register.refresh()
        return token


@contextmanager
def remote_door(hierarchy: Hierarchy, folder: Path, listen: Listen | None = None) -> Iterator[Remote]:
    """A remote door in a thread of this process; plain text on loopback unless said otherwise."""
    listen = listen or Listen("127.0.0.1", 0)
    loop = Loop()
    door = RemoteDoor(hierarchy, listen, Register(folder / "tokens.json"), folder / "audit.log", node="kit")
    loop.run(door.start())
    ca = folder / "ca.pem" if listen.certificate is not None else None
    try:
        yield Remote(door, folder / "tokens.json", folder / "audit.log", ca, loop)
    finally:
        loop.run(door.stop(0.2))
        loop.close()
