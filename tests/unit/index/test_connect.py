"""Where Redis is, and that its password is never shown."""

import os

import pytest
from redis import AuthenticationError

from kvtier.errors import ConfigError
from kvtier.index.address import RedisAddress, masked

SECRET = "s3cr:et@"


@pytest.fixture
def password_file(tmp_path):
    path = tmp_path / "password"
    path.write_text(SECRET + "\n")
    return str(path)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://host:6379/0", "redis://host:6379/0"),
        ("redis://user:pw@host:6379/0", "redis://user:***@host:6379/0"),
        ("rediss://:pw@host/0?ssl_password=pw", "rediss://:***@host/0?ssl_password=***"),
        ("unix://user:pw@/run/redis.sock?db=1", "unix://user:***@/run/redis.sock?db=1"),
        ("redis://user:p@ss/word@host", "redis://user:***@host"),
        ("unix:///run/a:b@c.sock", "unix:///run/a:b@c.sock"),
    ],
)
def test_a_url_is_shown_without_secrets(url, shown):
    assert masked(url) == shown
    assert repr(RedisAddress(url)) == f"RedisAddress({shown!r}, password_file='')"


@pytest.mark.parametrize(
    "url", ["http://user:pw@host", "host:6379", "user:pw@host", "unix:///x?password=pw", "redis://h/?db=1&password=pw"]
)
def test_other_urls_are_refused_without_showing_secrets(url):
    with pytest.raises(ConfigError) as caught:
        RedisAddress(url)
    assert "pw" not in str(caught.value)


def test_the_password_comes_from_the_file_then_the_environment_then_the_url(password_file, monkeypatch):
    url = "redis://bob:in%20url@host"
    monkeypatch.delenv("KVTIER_REDIS_PASSWORD", raising=False)
    assert RedisAddress("redis://host").credentials() == ("",)
    assert RedisAddress(url).credentials() == ("bob", "in url")
    monkeypatch.setenv("KVTIER_REDIS_PASSWORD", "in env")
    assert RedisAddress(url).credentials() == ("bob", "in env")
    assert RedisAddress(url, password_file).credentials() == ("bob", SECRET)


def test_a_rotated_password_is_read_again(password_file):
    client = RedisAddress("redis://host", password_file).client(timeout=1)
    provider = client.connection_pool.connection_kwargs["credential_provider"]
    assert provider.get_credentials() == (SECRET,)
    with open(password_file, "w") as file:
        file.write("new")
    assert provider.get_credentials() == ("new",)


def test_a_password_file_that_vanishes_is_an_error_of_redis_for_lookups(password_file):
    client = RedisAddress("redis://host", password_file).client(timeout=1)
    provider = client.connection_pool.connection_kwargs["credential_provider"]
    os.unlink(password_file)
    with pytest.raises(AuthenticationError, match=password_file):
        provider.get_credentials()


@pytest.mark.parametrize("content", [None, "", "\n"])
def test_a_password_file_without_password_is_an_error_that_names_it(tmp_path, content):
    path = tmp_path / "nothing"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=str(path)):
        RedisAddress("redis://host", str(path)).client(timeout=1)


@pytest.mark.parametrize(
    "url", ["redis://bob:pa55@host:1/2", "rediss://bob:pa55@host:1", "unix://bob:pa55@/run/x.sock"]
)
def test_no_repr_has_the_password(url):
    address = RedisAddress(url)
    client = address.client(timeout=0.02)
    assert "pa55" not in f"{address!r} {address} {client!r} {client.connection_pool.make_connection()!r}"


def test_sockets_time_out_and_nothing_is_tried_twice():
    connection = RedisAddress("redis://host").client(timeout=0.02).connection_pool.make_connection()
    assert connection.socket_timeout == connection.socket_connect_timeout == 0.02
    assert connection.retry.get_retries() == 0


@pytest.mark.parametrize(
    ("url", "kind", "seeds", "service"),
    [
        ("redis://h", "", [("h", 6379)], ""),
        ("redis+sentinel://h1,bob@h2", "sentinel", None, ""),
        ("redis+sentinel://bob@h1:1,h2/my%20master", "sentinel", [("h1", 1), ("h2", 26379)], "my master"),
        ("rediss+sentinel://h1/m/3?ssl_ca_certs=/ca", "sentinel", [("h1", 26379)], "m"),
        ("redis+cluster://h1,[::1]:7000", "cluster", [("h1", 6379), ("::1", 7000)], ""),
        ("rediss+cluster://bob@h1/0?ssl_ca_certs=/ca", "cluster", [("h1", 6379)], ""),
        ("redis+cluster://h1/1", "cluster", None, ""),
        ("redis+cluster://", "cluster", None, ""),
        ("redis+cluster://h:x", "cluster", None, ""),
        ("redis+sentinel://h1/m/x", "sentinel", None, ""),
        ("redis://h?ssl_ca_certs=/ca", "", None, ""),
        ("rediss://h?ssl_no_such=1", "", None, ""),
    ],
)
def test_a_url_says_which_servers_and_which_master(url, kind, seeds, service):
    if seeds is None:
        with pytest.raises(ConfigError):
            RedisAddress(url)
        return
    address = RedisAddress(url)
    assert (address.kind, address.seeds, address.service) == (kind, seeds, service)


def test_clients_of_a_masters_servers_have_its_database_tls_and_credentials(password_file):
    address = RedisAddress("rediss+sentinel://bob@h1/main/3?ssl_ca_certs=/c%20a.pem", password_file)
    connection = address.client(0.5, ("::1", 7)).connection_pool.make_connection()
    assert (connection.host, connection.port, connection.db) == ("::1", 7, 3)
    assert type(connection).__name__ == "SSLConnection"
    assert connection.ca_certs == "/c a.pem"
    assert connection.credential_provider.get_credentials() == ("bob", SECRET)


@pytest.mark.parametrize(("query", "proves"), [("", False), ("?sentinel_auth=yes", True)])
def test_sentinels_get_the_password_only_when_the_url_says_so(password_file, query, proves):
    address = RedisAddress(f"redis+sentinel://h1/main{query}", password_file)
    connection = address.sentinel(0.5, ("h1", 26379)).connection_pool.make_connection()
    assert (connection.credential_provider is not None) == proves
