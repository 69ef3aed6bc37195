"""Where Redis is, and how to prove oneself to it.

    redis://[user@]host:6379/0            one server; rediss:// with TLS
    unix://[user@]/path?db=0              one server on a socket
    redis+sentinel://[user@]host:26379,host:26379/name/0     the master that the Sentinels name; rediss+sentinel://
    redis+cluster://[user@]host:6379,host:6379               all masters of a Cluster; rediss+cluster://

With TLS the query may hold `ssl_ca_certs`, `ssl_certfile`, `ssl_keyfile` and `ssl_check_hostname`, as redis-py has
them. Sentinels are asked without a password unless the query says `sentinel_auth=yes`: then with the masters' own.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit

from redis import AuthenticationError, Connection, CredentialProvider, Redis, RedisError
from redis.backoff import NoBackoff
from redis.connection import parse_url
from redis.retry import Retry

from kvtier.errors import ConfigError

SCHEMES = ("redis", "rediss", "unix", "redis+sentinel", "rediss+sentinel", "redis+cluster", "rediss+cluster")
PASSWORD_ENV = "KVTIER_REDIS_PASSWORD"  # noqa: S105
PORTS = {"": 6379, "sentinel": 26379, "cluster": 6379}
OPTIONS = ("ssl_", "socket_keepalive", "client_name", "db")

Where = tuple[str, int]
"""Host and port of one server."""


@dataclass(frozen=True, slots=True, repr=False)
class RedisAddress:
    """Where Redis is and how to prove oneself to it; masked in its repr.

    Attributes:
        url: as the module's docstring has it.
        password_file: file that holds the password; read again at each new connection, so that it can be rotated.
        password_env: environment variable that holds it, when there is no file.
    """

    url: str
    password_file: str = ""
    password_env: str = PASSWORD_ENV

    def __post_init__(self) -> None:
        if self.url.partition("://")[0] not in SCHEMES:
            raise ConfigError(
                f"Redis URL {masked(self.url)!r} must begin with redis://, rediss:// or unix://, or with "
                "redis+sentinel://, redis+cluster:// (rediss+... for TLS)"
            )
        if re.search(r"[?&]password=", self.url):
            raise ConfigError(f"Redis URL {masked(self.url)!r}: put the password in password_file, not in the query")
        if self.kind:
            self._check_seeds()
        try:
            settings = parse_url(self._url_of(None))  # type: ignore[no-untyped-call]
            settings.pop("connection_class", Connection)(**settings)
        except (TypeError, ValueError, RedisError) as exc:  # redis-py would say so at each connection
            raise ConfigError(f"Redis URL {masked(self.url)!r}: {str(exc).rpartition('() ')[2]}") from exc

    def __repr__(self) -> str:
        return f"RedisAddress({masked(self.url)!r}, password_file={self.password_file!r})"

    @property
    def kind(self) -> str:
        """How many servers: "" for one, "sentinel", or "cluster"."""
        return self.url.partition("://")[0].partition("+")[2]

    @property
    def seeds(self) -> list[Where]:
        """The servers in the URL: Sentinels, or some of a Cluster; of a single server its host."""
        hosts = _split(self.url)[2].partition("?")[0].partition("/")[0]
        return [_where(host, PORTS[self.kind]) for host in hosts.split(",") if host]

    @property
    def service(self) -> str:
        """The master's name among Sentinels."""
        return unquote((*self._path, "")[0]) if self.kind == "sentinel" else ""

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

    def client(self, timeout: float, where: Where | None = None) -> Redis:
        """Make a client of a server, else of the first in the URL.

        Connects, sends and reads each fail after `timeout` seconds, without retries.
        """
        return self._client(where, timeout, authenticate=True)

    def sentinel(self, timeout: float, where: Where) -> Redis:
        """Make a client of one Sentinel."""
        return self._client(where, timeout, authenticate=self._query.get("sentinel_auth") == "yes")

    def _client(self, where: Where | None, timeout: float, *, authenticate: bool) -> Redis:
        return Redis.from_url(
            self._url_of(where),
            credential_provider=_Credentials(self) if authenticate and self.credentials()[-1] else None,
            socket_timeout=timeout,
            socket_connect_timeout=timeout,
            retry=Retry(NoBackoff(), 0),
            protocol=2,  # one round trip less when connecting, and no notifications to parse
        )

    def _url_of(self, where: Where | None) -> str:
        scheme, _, rest = _split(self.url)
        if not self.kind and where is None:
            return f"{scheme}://{rest}"
        host, port = where or self.seeds[0]
        database = unquote(self._path[1]) if self.kind == "sentinel" and len(self._path) > 1 else "0"
        query = urlencode({name: value for name, value in self._query.items() if name.startswith(OPTIONS)})
        shown = f"[{host}]" if ":" in host else quote(host)
        return f"{scheme.partition('+')[0]}://{shown}:{port}/{database}?{query}"

    @property
    def _path(self) -> list[str]:
        return [part for part in _split(self.url)[2].partition("?")[0].split("/")[1:] if part]

    @property
    def _query(self) -> dict[str, str]:
        return dict(parse_qsl(_split(self.url)[2].partition("?")[2]))

    def _check_seeds(self) -> None:
        shown = masked(self.url)
        try:
            seeds = self.seeds
        except ValueError as exc:
            raise ConfigError(f"Redis URL {shown!r}: {exc}; write host:port,host:port") from exc
        if not seeds:
            raise ConfigError(f"Redis URL {shown!r} names no host; write host:port,host:port")
        path = self._path
        if self.kind == "sentinel" and not (1 <= len(path) <= 2 and (path[1:] or ["0"])[0].isdigit()):
            raise ConfigError(f"Redis URL {shown!r}: after the Sentinels comes /NAME of the master, or /NAME/DATABASE")
        if self.kind == "cluster" and path not in ([], ["0"]):
            raise ConfigError(f"Redis URL {shown!r}: a Cluster has only database 0; leave out /{'/'.join(path)}")


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


def _where(host: str, port: int) -> Where:
    parts = urlsplit(f"//{host}")
    return unquote(parts.hostname or "localhost"), parts.port or port
