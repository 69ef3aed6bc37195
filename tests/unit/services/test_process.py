"""A process is told from a later one with its pid, and the state file says who was started."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import psutil
import pytest

from kvtier.errors import ConfigError
from kvtier_services.cluster import process, state
from kvtier_services.cluster.process import Process
from kvtier_services.cluster.state import Running

ME = Process.of(os.getpid())


def test_this_process_lives_and_one_that_had_its_pid_does_not():
    assert ME.alive()
    assert not Process(os.getpid(), "another boot/1").alive()
    assert Process(os.getpid(), "another boot/1").tree() == []
    assert Process.of(2**22 + 1) is None


@pytest.fixture
def child():
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'print(1, flush=True); input()'])"
    made = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"KVTIER_TEST": "mine"},
    )
    made.stdout.readline()
    yield made
    made.kill()
    made.wait()
    made.stdin.close()
    made.stdout.close()


def test_a_tree_and_what_is_marked_are_the_same_processes(child):
    tree = {p.pid for p in Process.of(child.pid).tree()}
    assert child.pid in tree
    assert len(tree) == 2
    assert {p.pid for p in process.marked("KVTIER_TEST", "mine")} == tree
    assert process.marked("KVTIER_TEST", "another") == []


def test_all_of_it_is_ended(child, monkeypatch):
    monkeypatch.setattr(process, "POLL", 0)
    mark = Process.of(child.pid)
    assert process.end(lambda: process.marked("KVTIER_TEST", "mine"), 10.0) == []
    assert not mark.alive(), "a zombie, that nobody has waited for, has ended"
    assert process.marked("KVTIER_TEST", "mine") == []


def test_what_does_not_end_is_said(monkeypatch):
    monkeypatch.setattr(process, "POLL", 0)

    monkeypatch.setattr(process.os, "kill", lambda _pid, _signal: None)
    assert process.end(lambda: [psutil.Process()], 0.01) == [os.getpid()]


def running(**changes) -> Running:
    fields = {"version": 1, "run": "r", "started": time.time(), "starting": True, "up": ME, "config": ""}
    return Running(**fields | {"socket": "/s", "arena_dir": "/a"} | changes)


def test_the_state_file_reads_back_what_it_says(tmp_path):
    path = tmp_path / "state.json"
    assert state.read(path) is None
    written = state.write(path, running(head=ME, ray_token="/t", address="h:1"))
    assert state.read(path) == written
    assert written.own_ray
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("content", [b"", b"{", b"{}", b"[]"])
def test_a_state_file_that_cannot_be_read_says_what_to_do(tmp_path, content):
    path = tmp_path / "state.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"state\.json cannot be read .*: look for processes with KVTIER_RUN"):
        state.read(path)
