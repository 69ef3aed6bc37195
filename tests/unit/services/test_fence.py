"""A fence returns when nobody holds the lock, and only the holder was killed."""

from __future__ import annotations

import os
import signal

from kvtier.memory.lock import FileLock
from kvtier_services.actors.fence import arena_mark, fence, lock_path


def test_nobody_holds_it(tmp_path):
    assert not fence(lock_path(tmp_path, "nvme"))


def test_the_holder_is_killed_and_waited_for(tmp_path):
    path = lock_path(tmp_path, "nvme")
    lock = FileLock(path)
    assert lock.acquire()
    lock.note(str(os.getpid()))
    killed, slept = [], []

    def sleep(seconds):
        slept.append(seconds)
        if len(slept) == 3:  # as long as the kernel takes
            lock.close()

    assert fence(path, kill=lambda pid, number: killed.append((pid, number)), sleep=sleep)
    assert killed == [(os.getpid(), signal.SIGKILL)] * 3
    assert len(slept) == 3


def test_a_holder_that_has_not_said_its_pid_yet_is_waited_for(tmp_path):
    path = lock_path(tmp_path, "nvme")
    lock = FileLock(path)
    assert lock.acquire()
    killed = []
    assert fence(path, kill=lambda pid, number: killed.append(pid), sleep=lambda _: lock.close())
    assert killed == []


def test_an_arena_is_told_from_the_one_before(tmp_path):
    assert arena_mark(tmp_path) == ""
    (tmp_path / "arena").write_bytes(b"one")
    first = arena_mark(tmp_path)
    (tmp_path / "other").write_bytes(b"two")
    (tmp_path / "other").rename(tmp_path / "arena")
    assert first != arena_mark(tmp_path)
