"""The file that says who may come in from other hosts."""

from __future__ import annotations

import hashlib
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from kvtier.config import Size
from kvtier.errors import ConfigError
from kvtier.memory.lock import PATIENCE, FileLock
from kvtier_services.actors.folders import write_secret

SALT_NBYTES = 32
LOCAL = ""
"""Tenant of the engines of this host, where they are salted too."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.@-]{0,63}")
Count = Annotated[int, Meta(ge=0)]


class Quota(Struct, frozen=True, forbid_unknown_fields=True):
    """What one tenant may have on one host; 0 for no limit.

    Attributes:
        cpu: bytes of the CPU tier.
        pinned: bytes of it that pins may keep.
        nvme: bytes of the NVMe tier.
        requests: calls a second.
    """

    cpu: Count = 0
    pinned: Count = 0
    requests: Annotated[float, Meta(ge=0.0)] = 0.0
    nvme: Count = 0


class TenantEntry(Struct, frozen=True, forbid_unknown_fields=True):
    """One tenant: the salt of its keys, as hexadecimal digits, and its quota."""

    salt: Annotated[str, Meta(pattern=f"^[0-9a-f]{{{2 * SALT_NBYTES}}}$")]
    quota: Quota = Quota()

    def __repr__(self) -> str:
        return f"TenantEntry(salt=***, quota={self.quota})"


class TokenEntry(Struct, frozen=True, forbid_unknown_fields=True):
    """One token, as its SHA-256."""

    name: str
    tenant: str
    sha256: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
    admin: bool = False


class Tokens(Struct, frozen=True, forbid_unknown_fields=True):
    """All of the file."""

    tenants: dict[str, TenantEntry] = {}
    tokens: tuple[TokenEntry, ...] = ()

    def __post_init__(self) -> None:
        for entry in self.tokens:
            if entry.tenant not in self.tenants or entry.tenant == LOCAL:
                raise ConfigError(f"token {entry.name!r} belongs to tenant {entry.tenant!r}, which the file lacks")
        if len({entry.name for entry in self.tokens}) < len(self.tokens):
            raise ConfigError("two tokens have the same name")
        if len({entry.salt for entry in self.tenants.values()}) < len(self.tenants):
            raise ConfigError("two tenants have the same salt, and so the same blocks; give each one of its own")

    def with_tenant(self, name: str, quota: Quota | None = None) -> Tokens:
        """The same with this tenant in it; a quota that is given replaces its quota."""
        known = self.tenants.get(name) or TenantEntry(secrets.token_hex(SALT_NBYTES))
        entry = known if quota is None else TenantEntry(known.salt, quota)
        return Tokens({**self.tenants, name: entry}, self.tokens)


def fingerprint(token: str) -> str:
    """What the file has of a token."""
    return hashlib.sha256(token.encode()).hexdigest()


def read(path: Path) -> Tokens:
    """Read the file; no tokens when there is none.

    Raises:
        ConfigError: it cannot be read, is not what it should be, or others may read it.
    """
    try:
        with path.open("rb") as file:
            about, raw = os.fstat(file.fileno()), file.read()
    except FileNotFoundError:
        return Tokens()
    except OSError as exc:
        raise ConfigError(f"remote.tokens_file {path} cannot be read: {exc.strerror}") from exc
    # Secrets that Kubernetes mounts are root's, and read by the group that the pod is in.
    if about.st_mode & (0o037 if about.st_uid == 0 != os.getuid() else 0o077):
        raise ConfigError(f"remote.tokens_file {path} has the salts of all tenants, and others may read it: chmod 600")
    try:
        return msgspec.json.decode(raw, type=Tokens)
    except (msgspec.MsgspecError, ConfigError) as exc:
        raise ConfigError(f"remote.tokens_file {path}: {exc}; `kvtier token` writes such files") from exc


def write(path: Path, tokens: Tokens) -> None:
    """Write the file, readable by this user only.

    Raises:
        ConfigError: nobody could read it again.
    """
    raw = msgspec.json.encode(tokens)
    try:
        msgspec.json.decode(raw, type=Tokens)
    except msgspec.MsgspecError as exc:
        raise ConfigError(f"{exc}: give sizes and numbers that are finite") from exc
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_secret(path, msgspec.json.format(raw).decode() + "\n")


def prepare(path: Path) -> None:
    """See that the file has a salt for the engines of this host.

    Raises:
        ConfigError: it has none, and cannot be written.
    """
    if LOCAL not in read(path).tenants:
        try:
            with _changing(path):
                write(path, read(path).with_tenant(LOCAL))
        except OSError as exc:
            raise ConfigError(
                f"remote.tokens_file {path} cannot be written: {exc.strerror}; `kvtier token add`"
            ) from exc


def add(path: Path, name: str, *, tenant: str = "", admin: bool = False, quota: Quota | None = None) -> str:
    """Make a token and enter it; the token, which is nowhere else.

    Args:
        path: of the file.
        name: of the token, for people.
        tenant: that it belongs to; of the same name unless given.
        admin: whether it may evict, move and look at what others have.
        quota: of the tenant; as it was unless given.

    Raises:
        ConfigError: that name cannot be, or is taken.
    """
    tenant = tenant or name
    for one in (name, tenant):
        if not _NAME.fullmatch(one):
            raise ConfigError(f"{one!r} is no name: use up to 64 letters, digits and the signs _ . @ -")
    with _changing(path):
        known = read(path).with_tenant(LOCAL)
        if any(entry.name == name for entry in known.tokens):
            raise ConfigError(f"there is a token {name!r} already; revoke it first, or choose another name")
        token = f"kvt_{secrets.token_urlsafe(32)}"
        entry = TokenEntry(name, tenant, fingerprint(token), admin)
        write(path, Tokens(known.with_tenant(tenant, quota).tenants, (*known.tokens, entry)))
    return token


def quota_of(
    path: Path, tenant: str, *, cpu: str = "", pinned: str = "", nvme: str = "", requests: float | None = None
) -> Quota | None:
    """The quota of a tenant with these things changed; None when nothing is to be.

    Raises:
        ConfigError: a size that is none.
    """
    if not cpu and not pinned and not nvme and requests is None:
        return None
    known = read(path).tenants.get(tenant)
    quota = known.quota if known is not None else Quota()
    try:
        return Quota(
            int(Size.parse(cpu)) if cpu else quota.cpu,
            int(Size.parse(pinned)) if pinned else quota.pinned,
            quota.requests if requests is None else requests,
            int(Size.parse(nvme)) if nvme else quota.nvme,
        )
    except ValueError as exc:
        raise ConfigError(str(exc)) from exc


def revoke(path: Path, name: str) -> None:
    """Strike a token out; its tenant, and what that has stored, stay.

    Raises:
        ConfigError: there is none of that name.
    """
    with _changing(path):
        known = read(path)
        left = tuple(entry for entry in known.tokens if entry.name != name)
        if len(left) == len(known.tokens):
            there = ", ".join(entry.name for entry in known.tokens) or "none"
            raise ConfigError(f"there is no token {name!r}; there are {there}")
        write(path, Tokens(known.tenants, left))


@contextmanager
def _changing(path: Path) -> Iterator[None]:
    """Nobody else changes the file: a token that is being revoked must not come back by way of one that is added."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    lock = FileLock(path.with_name(f"{path.name}.lock"))
    try:
        if not lock.acquire(PATIENCE):
            raise ConfigError(f"somebody else is changing {path}; try again")
        yield
    finally:
        lock.close()
