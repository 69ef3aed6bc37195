"""Who stays: what it refuses, that it starts its child again, and how both end."""

from __future__ import annotations

import os
import signal
import subprocess

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
    """Ends at once, or lives until it is told to end, or does not listen to that either."""

    def __init__(self, *, lives: bool = False, deaf: bool = False) -> None:
        self.told: list[str] = []
        self._lives, self._deaf = lives, deaf

    def poll(self) -> int | None:
        return None if self._lives else 1

    def terminate(self) -> None:
        self.told.append("terminate")
        self._lives = self._deaf

    def kill(self) -> None:
        self.told.append("kill")
        self._lives = False

    def wait(self, timeout: float | None = None) -> int:
        if self._lives:
            raise subprocess.TimeoutExpired("child", timeout or 0.0)
        return 0


@pytest.mark.parametrize(("deaf", "told"), [(False, ["terminate"]), (True, ["terminate", "kill"])])
def test_it_starts_its_child_again_and_ends_with_it_at_sigterm(monkeypatch, deaf, told):
    children = [Child(), Child(), Child(lives=True, deaf=deaf)]
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
    assert [child.told for child in children] == [[], [], told]
    assert signal.getsignal(signal.SIGTERM) is before
