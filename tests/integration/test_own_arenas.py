"""Engines that do not trust each other have kvtiers of their own; another user's process gets into none of it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from kvtier.client.door import DoorSession
from kvtier.memory.arena import CLIENTS, Arena
from kvtier.testing.session import CAPACITY, host_over, save
from tests.door_fixture import door_in_thread, folders

OTHER = 65_534
"""The user "nobody"."""

TRY = """
import os, socket, sys
user, door, arena, lock = sys.argv[1:5]
if int(user):
    os.setgroups([])
    os.setgid(int(user))
    os.setuid(int(user))
def outcome(do):
    try:
        do()
    except OSError as exc:
        return type(exc).__name__
    return "got in"
def reach():
    with socket.socket(socket.AF_UNIX) as one:
        one.connect(door)
files = [lock, *(os.path.join(arena, name) for name in ("arena", "tables", "lock"))]
tries = [reach, lambda: os.listdir(arena)]
tries += [lambda file=file, mode=mode: open(file, mode) for file in files for mode in ("rb", "r+b")]
print(",".join(outcome(each) for each in tries))
"""


def tries(user, *places):
    command = [sys.executable, "-c", TRY, str(user), *map(str, places)]
    done = subprocess.run(command, check=True, cwd="/", stdout=subprocess.PIPE, text=True, timeout=30.0)
    return done.stdout.strip().split(",")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_process_of_another_user_opens_neither_arena_nor_socket_nor_lock():
    with folders() as (door, arena):
        # Other users may look into the folders around: what keeps them out is kvtier's own.
        for above in (door.parent, arena):
            above.chmod(0o755)
        owned = Arena.own(arena, CAPACITY)
        with host_over(owned) as host, door_in_thread(host.hierarchy, door):
            session = DoorSession(door)
            save(session, 0, 2)
            (lock,) = (arena / CLIENTS).iterdir()
            assert tries(OTHER, door, arena, lock) == ["PermissionError"] * 10
            assert tries(0, door, arena, lock) == ["got in"] * 10, "what is tried works for the owner"
            session.close()
        owned.close()
