"""Who stays: what it refuses, that it starts its child again, and how both end."""

from __future__ import annotations

import os
import signal
import sys
import threading

import pytest

from kvtier.config.load import parse
from kvtier.errors import ConfigError
from kvtier_services.cluster import stay as module
from kvtier_services.cluster.stay import stay


@pytest.mark.parametrize(
    ("raw", "words"),
    [({"index": {"url": "local"}}, "--address"), ({"ray": {"address": "a:1"}}, "index.url is embedded")],
)
def test_it_says_what_it_cannot_stay_with(raw, words):
    with pytest.raises(ConfigError, match=words):
        stay(parse(raw), "")


class Child:
    """Ends at once, or lives until it is killed."""

    def __init__(self, *, lives: bool = False) -> None:
        self.lives = lives
        self.waited_for = False

    def poll(self) -> int | None:
        return None if self.lives else 1

    def kill(self) -> None:
        self.lives = False

    def wait(self) -> int:
        assert not self.lives
        self.waited_for = True
        return -9


def test_it_starts_its_child_again_and_ends_with_it_at_sigterm(monkeypatch):
    children = [Child(), Child(), Child(lives=True)]
    commands = []

    def popen(command: list[str]) -> Child:
        commands.append(command[1:])
        if len(commands) == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return children[len(commands) - 1]

    monkeypatch.setattr(module.subprocess, "Popen", popen)
    monkeypatch.setattr(module, "PAUSE", 0.001)
    monkeypatch.setattr(module, "POLL", 0.001)
    before = signal.getsignal(signal.SIGTERM)
    stay(parse({"ray": {"address": "ray:6379"}, "index": {"url": "local"}}), "k.toml")
    assert commands == 3 * [["-m", "kvtier_services.cluster.stay", str(os.getpid()), "ray:6379", "k.toml"]]
    assert [child.waited_for for child in children] == [False, False, True]
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_sigterm_that_comes_while_it_waits_ends_it_wherever_that_is(monkeypatch):
    """At each line that a wait has, its own and the standard library's, as locks are held at some of them."""
    monkeypatch.setattr(module.subprocess, "Popen", lambda _command: Child(lives=True))
    monkeypatch.setattr(module, "POLL", 0.001)
    config, at = parse({"ray": {"address": "ray:6379"}, "index": {"url": "local"}}), 0

    def tracer(after: int):
        left = [after]

        def trace(frame, event, _arg):
            if frame.f_code.co_filename not in (module.__file__, threading.__file__):
                return None
            if event == "line" and signal.getsignal(signal.SIGTERM) not in (signal.SIG_DFL, before):
                left[0] -= 1
                if left[0] == 0:
                    signal.raise_signal(signal.SIGTERM)
            return trace

        return trace

    def hangs(_number, _frame):
        pytest.fail(f"it hangs after a SIGTERM at line {at}")

    before, alarmed = signal.getsignal(signal.SIGTERM), signal.signal(signal.SIGALRM, hangs)
    try:
        for at in range(1, 60):
            signal.alarm(20)
            sys.settrace(tracer(at))
            try:
                stay(config, "")
            finally:
                sys.settrace(None)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, alarmed)
