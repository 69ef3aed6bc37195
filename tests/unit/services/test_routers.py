"""Token ids as people write them, and where a host publishes."""

from __future__ import annotations

import io

import pytest

from kvtier.config import Config, EventsConfig
from kvtier.errors import ConfigError, SessionUnavailable
from kvtier_services import routers
from kvtier_services.routers import endpoints, tokens_of

FIXED = Config(run_dir="/run/kv", events=EventsConfig(endpoint="tcp://*:5557"))


@pytest.mark.parametrize("text", ["1,2,3", "1 2 3", "[1, 2, 3]", "1\n2\n3\n", " 1,\t2 ,3 "])
def test_token_ids_as_people_write_them(text, tmp_path, monkeypatch):
    assert tokens_of(text, None) == [1, 2, 3]
    (tmp_path / "tokens").write_text(text)
    assert tokens_of("", tmp_path / "tokens") == [1, 2, 3]
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    assert tokens_of("", "-") == [1, 2, 3]


@pytest.mark.parametrize(
    ("text", "file", "what"),
    [("", None, "name the token ids"), ("1", "f", "name the token ids"), ("1,x", None, "'x' is no token id"),
     ("-3", None, "no token id"), ("1.5", None, "no token id"), ("", "gone", "cannot be read")],
)  # fmt: skip
def test_what_is_no_token_id(text, file, what, tmp_path):
    with pytest.raises(ConfigError, match=what):
        tokens_of(text, None if file is None else tmp_path / file)


@pytest.fixture
def status(monkeypatch):
    """What the door says of this host's events; None while it does not answer."""
    said: dict = {}

    def ask(_socket):
        if not said:
            raise SessionUnavailable("nobody")
        return {"events": said.get("events")}

    monkeypatch.setattr(routers, "ask_status", ask)
    return said


def test_this_host_is_where_it_says_it_is(status):
    status["events"] = {"endpoint": "tcp://0.0.0.0:40001", "replay_endpoint": "tcp://0.0.0.0:40009", "fault": ""}
    assert endpoints(FIXED, "") == ("tcp://127.0.0.1:40001", "tcp://127.0.0.1:40009")
    status["events"]["fault"] = "no events: the port is taken"
    with pytest.raises(ConfigError, match="the port is taken"):
        endpoints(FIXED, "")


def test_a_host_that_does_not_answer_is_where_the_configuration_says(status):
    assert endpoints(FIXED, "") == ("tcp://127.0.0.1:5557", "tcp://127.0.0.1:5558")


def test_other_hosts_have_the_same_ports(status):
    assert endpoints(FIXED, "box") == ("tcp://box:5557", "tcp://box:5558")
    assert endpoints(FIXED, "fe80::1") == ("tcp://[fe80::1]:5557", "tcp://[fe80::1]:5558")


@pytest.mark.parametrize("endpoint", ["tcp://127.0.0.1:0", "tcp://127.0.0.1:*", "ipc:///run/events"])
def test_other_hosts_need_a_fixed_port(status, endpoint):
    with pytest.raises(ConfigError, match="fixed port"):
        endpoints(Config(run_dir="/run/kv", events=EventsConfig(endpoint=endpoint)), "box")


def test_no_events_says_what_to_set(status):
    for host in ("", "box"):
        with pytest.raises(ConfigError, match=r"set events\.endpoint"):
            endpoints(Config(run_dir="/run/kv"), host)
