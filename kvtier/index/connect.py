"""From a Redis URL and a secret to an index."""

from __future__ import annotations

import os
import re
import time
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

from redis import AuthenticationError, CredentialProvider, Redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from kvtier.errors import ConfigError
from kvtier.index.base import Life
from kvtier.index.nodes import preferred_number, register
from kvtier.index.options import RedisIndexOptions
from kvtier.index.reader import FAULTS
from kvtier.index.redis import RedisIndex

SCHEMES = ("redis", "rediss", "unix")
PASSWORD_ENV = "KVTIER_REDIS_PASSWORD"  # noqa: S105


@dataclass(frozen=True, slots=True, repr=False)
class RedisAddress:
    """Where Redis is and how to prove oneself to it; masked in its repr.

    Attributes:
        url: `redis://[user@]host:port/db`, `rediss://...` (TLS; `?ssl_ca_certs=FILE`) or `unix:///path?db=0`.
        password_file: file that holds the password; read again at each new connection, so that it can be rotated.
        password_env: environment variable that holds it, when there is no file.
    """

    url: str
    password_file: str = ""
    password_env: str = PASSWORD_ENV

    def __post_init__(self) -> None:
        if self.url.partition("://")[0] not in SCHEMES:
            raise ConfigError(f"Redis URL {masked(self.url)!r} must begin with redis://, rediss:// or unix://")
        if re.search(r"[?&]password=", self.url):
            raise ConfigError(f"Redis URL {masked(self.url)!r}: put the password in password_file, not in the query")

    def __repr__(self) -> str:
        return f"RedisAddress({masked(self.url)!r}, password_file={self.password_file!r})"

    def credentials(self) -> tuple[str] | tuple[str, str]:
        """Password, or user and password; from the file, else the environment, else the URL; ("",) for neither.

        Raises:
            ConfigError: the file cannot be read or is empty.
        """
        user, _, password = _split(self.url)[1].partition(":")
        password = os.environ.get(self.password_env, "") or unquote(password)
        if self.password_file:
            try:
                password = Path(self.password_file).read_text(encoding="utf-8").strip()
            except OSError as exc:
                raise ConfigError(f"cannot read the Redis password from {self.password_file}: {exc.strerror}") from exc
            if not password:
                raise ConfigError(f"the Redis password file {self.password_file} is empty")
        return (unquote(user), password) if user else (password,)

    def client(self, timeout: float) -> Redis:
        """Make a client whose connects, sends and reads each fail after `timeout` seconds, without retries."""
        scheme, _, where = _split(self.url)
        return Redis.from_url(
            f"{scheme}://{where}",
            credential_provider=_Credentials(self) if self.credentials()[-1] else None,
            socket_timeout=timeout,
            socket_connect_timeout=timeout,
            retry=Retry(NoBackoff(), 0),
            protocol=2,  # one round trip less when connecting, and no notifications to parse
        )


class _Credentials(CredentialProvider):
    def __init__(self, address: RedisAddress) -> None:
        self._address = address

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        try:
            return self._address.credentials()
        except ConfigError as exc:  # lookups and the background thread handle what redis-py raises, and only that
            raise AuthenticationError(str(exc)) from exc


def masked(url: str) -> str:
    """The URL without its secrets, fit to be shown."""
    scheme, who, where = _split(url)
    if who:
        where = f"{who.partition(':')[0]}:***@{where}"
    return f"{scheme}://" + re.sub(r"([?&][^=&]*password=)[^&]*", r"\1***", where)


def _split(url: str) -> tuple[str, str, str]:
    """Scheme, user and password, and the rest; a password with characters that it should not have is still one."""
    scheme, rest = url.split("://", 1) if "://" in url else ("", url)
    end = rest.find("/") if scheme == "unix" else len(rest)
    who, _, where = rest[:end].rpartition("@")
    return scheme, who, where + rest[end:]


def connect(
    address: RedisAddress, *, host: str, door: str = "", options: RedisIndexOptions | None = None
) -> RedisIndex:
    """Register `host` and start its index.

    When Redis is away it starts all the same: with the number that the host's name prefers and an incarnation from
    this host's clock, and works when Redis is back.

    Raises:
        ConfigError: the password cannot be read.
    """
    options = options or RedisIndexOptions()
    lookups, updates = address.client(options.lookup_timeout), address.client(options.update_timeout)
    try:
        life = register(updates, host, door)
    except FAULTS:
        life = Life(preferred_number(host), int(time.time()), host, door, provisional=True)
    return RedisIndex(lookups, updates, life, options=options)
