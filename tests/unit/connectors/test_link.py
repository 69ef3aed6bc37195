"""An engine starts whether or not kvtier is there."""

from __future__ import annotations

import threading

import msgspec
import pytest

import kvtier
from kvtier.connectors import link as linking
from kvtier.connectors.link import Link
from kvtier.connectors.options import read
from kvtier.errors import ConfigError, SessionUnavailable


@pytest.fixture(autouse=True)
def hurry(monkeypatch):
    monkeypatch.setattr(linking, "FIRST", 0.001)


def host_that_comes(attempts: int):
    """A `connect` that fails so often, and what says that it succeeded."""
    tried, there = [], threading.Event()

    def connect():
        tried.append(None)
        if len(tried) <= attempts:
            raise SessionUnavailable("nobody answers")
        there.set()
        return kvtier.open({"cpu": {"capacity": "1MiB"}})

    return connect, there


def test_a_host_that_is_there_is_there_at_once():
    connect, _ = host_that_comes(0)
    link = Link(connect, pytest.fail)
    assert link.cache is not None
    link.close()
    assert link.cache is None
    link.close()


def test_a_host_that_comes_later_is_found_and_people_are_told_once():
    said = []
    connect, there = host_that_comes(3)
    link = Link(connect, said.append)
    assert there.wait(10.0)
    while link.cache is None:
        pass
    assert said == ["nobody answers; requests are computed meanwhile"]
    link.close()


def test_what_is_new_each_time_does_not_fill_the_log():
    connect, _ = host_that_comes(0)
    said = []
    link = Link(connect, said.append)
    for number in range(2 * linking.SAYINGS):
        link.say(f"{number} token slots for 3 pages")
    assert len(said) == linking.SAYINGS
    link.close()


def test_a_link_that_is_closed_opens_nothing_any_more():
    ready, go = threading.Event(), threading.Event()
    closed = []

    class Late:
        def close(self):
            closed.append(None)

    def connect():
        if not ready.is_set():
            ready.set()
            raise SessionUnavailable("nobody answers")
        go.wait(10.0)
        return Late()

    link = Link(connect, lambda _what: None)
    link.close()
    go.set()
    for thread in threading.enumerate():
        if thread.name == "kvtier-connect":
            thread.join(10.0)
    assert link.cache is None
    assert len(closed) <= 1, "what was opened meanwhile is closed again"


class Wanted(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    revision: str
    wait: float = 1.0


def test_options_are_read_and_what_is_wrong_is_said():
    assert read(Wanted, {"revision": "1"}, "here") == Wanted("1", 1.0)
    for given, message in (
        ({"revison": "1"}, "here has no 'revison'; did you mean 'revision'"),
        ({"zzz": 1}, "use one of revision, wait"),
        ({}, "here: .*revision"),
        ({"revision": "1", "wait": "long"}, "here: .*wait"),
    ):
        with pytest.raises(ConfigError, match=message):
            read(Wanted, given, "here")
