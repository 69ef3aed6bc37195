"""The exporter on a socket: nobody who asks, however slowly, keeps the host's threads."""

from __future__ import annotations

import socket
import time
from contextlib import ExitStack, suppress
from urllib.parse import urlsplit
from urllib.request import urlopen

import pytest

from kvtier.config import Config, MetricsConfig, StatusConfig
from kvtier_services.doctor import checks
from kvtier_services.monitor.metrics import Exporter, exporter


def test_slow_clients_are_cut_off_and_so_are_too_many(monkeypatch):
    monkeypatch.setattr(exporter, "LONGEST", 0.5)
    monkeypatch.setattr(exporter, "MOST", 2)
    made = Exporter(dict, name="here", host="127.0.0.1", port=0)
    address = urlsplit(made.url)
    with ExitStack() as stack:
        silent = [
            stack.enter_context(socket.create_connection((address.hostname, address.port), timeout=20))
            for _ in range(4)
        ]
        silent[0].sendall(b"GET /ready HTTP/1.1\r\nHost: a")
        assert [one.recv(100) for one in silent] == [b""] * 4
    deadline = time.monotonic() + 20
    while True:
        with suppress(OSError), urlopen(made.url.replace("metrics", "ready"), timeout=20) as answer:
            assert answer.read() == b"ok\n"
            break
        assert time.monotonic() < deadline
    made.close()


@pytest.mark.parametrize(("host", "family"), [("127.0.0.1", socket.AF_INET), ("::1", socket.AF_INET6)])
def test_a_port_that_is_taken_is_said_by_the_doctor(tmp_path, host, family):
    with socket.create_server((host, 0), family=family) as taken:
        port = taken.getsockname()[1]
        config = Config(run_dir=str(tmp_path), metrics=MetricsConfig(host, port), status=StatusConfig(host, port))
        found = {check.name: check for check in checks(config)}
    for name in ("metrics.port", "status.port"):
        assert (found[name].level, found[name].found) == ("warn", f"{port}: Address already in use")
