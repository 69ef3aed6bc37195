"""Unit tests touch no Ray, no network and no clock: what they need of these comes in through a constructor."""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest


@pytest.fixture(autouse=True)
def forbidden_calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What the test called and must not; remembered, because the code under test may swallow what is raised."""
    calls: list[str] = []

    def refuse(what: str) -> Callable[..., Any]:
        def refused(*_args: Any, **_kwargs: Any) -> Any:
            calls.append(what)
            pytest.fail(f"a unit test called {what}: hand in a fake, or move the test to tests/integration")

        return refused

    for method in ("bind", "connect", "connect_ex"):
        monkeypatch.setattr(socket.socket, method, refuse(f"socket.{method}"))
    sleep, refuse_sleep = time.sleep, refuse("time.sleep with more than 0 seconds")
    monkeypatch.setattr(time, "sleep", lambda seconds: refuse_sleep() if seconds > 0 else sleep(0))
    if "ray" in sys.modules:
        monkeypatch.setattr(sys.modules["ray"], "init", refuse("ray.init"))
    yield calls
    assert not calls, f"a unit test called {', '.join(sorted(set(calls)))}"
