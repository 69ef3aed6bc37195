"""What [remote] may say, and which targets a client takes."""

from __future__ import annotations

import tomllib

import pytest

from kvtier.client.connect import connect
from kvtier.client.credentials import Credentials
from kvtier.client.remote import RemoteWay, split_url
from kvtier.config import Config, RemoteConfig, explain
from kvtier.config.load import parse
from kvtier.errors import ConfigError


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"listen": "7070"}, "address:port"),
        ({"listen": "0.0.0.0:70700"}, "address:port"),
        ({"listen": "0.0.0.0:7070"}, "insecure = true"),
        ({"listen": "[::]:7070"}, "insecure = true"),
        ({"listen": "10.0.0.1:7070", "cert": "c.pem"}, "go together"),
        ({"listen": "127.0.0.1:7070", "client_ca": "c.pem"}, "needs both"),
    ],
)
def test_what_cannot_work_or_would_be_plain_text_is_refused(fields, why):
    with pytest.raises(ConfigError, match=why):
        parse({"remote": fields})


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"listen": "127.0.0.1:7070"},
        {"listen": "localhost:0"},
        {"listen": "[::1]:7070"},
        {"listen": "0.0.0.0:7070", "insecure": True},
        {"listen": "0.0.0.0:7070", "cert": "c.pem", "key": "k.pem", "client_ca": "ca.pem"},
    ],
)
def test_what_works(fields):
    parse({"remote": fields})


def test_bulk_has_the_port_after_unless_one_is_named(monkeypatch):
    monkeypatch.setenv("KVTIER_HOST", "box")
    assert RemoteConfig(listen="127.0.0.1:7070").bulk == 7071
    assert RemoteConfig(listen="127.0.0.1:0").bulk == 0
    assert RemoteConfig(listen="127.0.0.1:7070", bulk_port=9).bulk == 9
    assert RemoteConfig(listen="{host}:7070", insecure=True).address == ("box", 7070)


def test_what_explain_prints_is_a_file_that_says_the_same():
    config = Config(remote=RemoteConfig(listen="0.0.0.0:7070", insecure=True))
    assert parse(tomllib.loads(explain(config))).remote == config.remote


def test_urls():
    assert split_url("grpcs://cache-1:7070") == ("cache-1", 7070, True)
    assert split_url("grpc://[::1]:7070/") == ("[::1]", 7070, False)
    for wrong in ("grpcs://cache-1", "http://cache-1:7070", "grpcs://user:secret@cache-1:7070", "grpcs://:7070"):
        with pytest.raises(ConfigError, match="names no host"):
            split_url(wrong)


def test_a_token_is_never_shown_nor_sent_as_plain_text_over_a_network(monkeypatch, tmp_path):
    monkeypatch.delenv("KVTIER_TOKEN", raising=False)
    with pytest.raises(ConfigError, match="KVTIER_TOKEN"):
        connect("grpc://127.0.0.1:7070")
    monkeypatch.setenv("KVTIER_TOKEN", "kvt_secret")
    with pytest.raises(ConfigError, match="insecure=True") as caught:
        connect("grpc://10.0.0.1:7070")
    assert "secret" not in str(caught.value)
    (tmp_path / "ca.pem").write_text("x")
    proof = Credentials.of("", ca=tmp_path / "ca.pem")
    assert "secret" not in repr(proof) + repr(RemoteWay("grpcs://10.0.0.1:7070", proof))
    with pytest.raises(ConfigError, match="go together"):
        Credentials.of("", ca=tmp_path / "ca.pem", cert=tmp_path / "ca.pem")
    with pytest.raises(ConfigError, match="cannot be read"):
        connect("grpcs://127.0.0.1:7070", ca=tmp_path / "none.pem")
