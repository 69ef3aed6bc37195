"""An arena that is used, left and taken over while it gets its memory."""

from __future__ import annotations

import subprocess
import sys
import threading

import numpy as np
import pytest

from kvtier.client.door import DoorSession
from kvtier.memory.arena import Arena
from kvtier.testing.session import CAPACITY, FULL, chain, eventually, found, holds, host_over, reserve, save
from tests.door_fixture import ROOT, door_in_thread, folders

STEP = CAPACITY // 4
OWNER = f"""
import pathlib, sys, time
from kvtier.memory import filling
from kvtier.memory.arena import Arena
filling.STEP = {STEP}
arena = Arena.own(pathlib.Path(sys.argv[1]), {8 * STEP}, pin=lambda part: time.sleep(float(sys.argv[2])))
arena.memory[:4] = 7
print("ready", flush=True)
time.sleep(60)
"""


@pytest.fixture
def place(monkeypatch):
    monkeypatch.setattr("kvtier.memory.filling.STEP", STEP)
    with folders() as place:
        yield place


@pytest.mark.parametrize("pace", [0.0, 0.02, 0.05])
def test_an_owner_that_is_killed_meanwhile_is_followed_by_one_that_ends_it(place, pace):
    folder = place[1]
    command = [sys.executable, "-c", OWNER, str(folder), str(pace)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT) as owner:
        assert owner.stdout.readline() == b"ready\n"
        assert eventually(lambda: Arena.attach(folder).ready > STEP)
        owner.kill()
    left = Arena.attach(folder)
    assert STEP < left.ready <= left.capacity
    arena = Arena.own(folder, 8 * STEP)
    assert arena.epoch == left.epoch + 1
    assert arena.ready >= left.ready
    assert eventually(lambda: arena.ready == arena.capacity)
    assert (folder / "arena").stat().st_blocks * 512 >= arena.capacity
    assert arena.memory[:4].tolist() == [7] * 4
    assert not np.any(arena.memory[4:])
    arena.close()


def test_sessions_save_and_load_while_it_grows(place):
    socket, folder = place
    gates = [threading.Event() for _ in range(4)]
    waiting = iter(gates)
    gates[0].set()

    def pin(_part: np.ndarray) -> None:
        assert next(waiting).wait(30.0)

    arena = Arena.own(folder, CAPACITY, pin=pin)
    with host_over(arena) as host, door_in_thread(host.hierarchy, socket):
        session = DoorSession(socket)
        try:
            first = FULL // 4 - 5
            assert save(session, 0, first) == first
            lease = session.match(chain(0, first), 0.0)
            assert reserve(session, 1000, FULL // 2 - 1).reason == "pressure", "leased blocks are all that there is"
            assert session.status()["tiers"][0]["capacity"] == arena.ready == STEP
            for gate in gates[1:]:
                gate.set()
            assert eventually(lambda: session.status()["tiers"][0]["capacity"] == CAPACITY)
            assert save(session, 2000, FULL // 4) == FULL // 4
            assert holds(session, lease, 0)
            assert found(session, 2000, FULL // 4) == FULL // 4
        finally:
            session.close()
    arena.close()
