"""A GPU tier in a process of its own behind a door in this one, engines in others; see `tests.device_child`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from kvtier.hierarchy.cache import Hierarchy
from kvtier.index.local import LocalIndex, LocalStore
from kvtier.memory.arena import Arena
from kvtier.tiers.base import TierNumber
from kvtier_services.actors.fence import arena_mark, fence, lock_path
from kvtier_services.actors.reconcile import reconcile
from kvtier_services.actors.remote import RemoteTier
from kvtier_services.gateway.control import writer_gone
from tests.device_child import SPEC, Worker, connected, kv_of, tokens_of
from tests.door_fixture import ROOT, door_in_thread, folders

GPU = TierNumber.GPU
PATIENCE = 60.0


def eventually(check: Callable[[], bool]) -> bool:
    """Poll until `check` holds; False when it does not in time."""
    deadline = time.monotonic() + PATIENCE
    while not check():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


class Child:
    """A process that runs `tests.device_child`."""

    def __init__(self, *args: object) -> None:
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "services")])}
        command = [sys.executable, "-m", "tests.device_child", *map(str, args)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.process = subprocess.Popen(command, env=environ, cwd=ROOT, text=True, **pipes)

    def says(self) -> dict:
        line = self.process.stdout.readline()
        assert line, f"the child ended with {self.process.wait(5.0)}"
        return json.loads(line)

    def ends(self) -> dict:
        """Stop an engine; what it says at its end."""
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self.says()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(10.0)
        for pipe in (self.process.stdin, self.process.stdout):
            pipe.close()


class Host:
    """A door in this process over a GPU tier in another.

    Attributes:
        device: of the GPU tier, and of the engines' KV.
    """

    def __init__(self, place: tuple[Path, Path], device: str) -> None:
        self.device = device
        self.socket, folder = place
        self.arena = Arena.own(folder, 8 << 20)
        self._worker_socket = self.socket.with_name("worker.sock")
        self.worker = self._start()
        cut_off = partial(fence, lock_path(folder, "gpu"))
        self.gpu = RemoteTier(
            "gpu", Worker(self._worker_socket), label="gpu(host)", arena=arena_mark(folder), fence=cut_off
        )
        assert self.gpu.connect(), self.gpu.fault
        store = LocalStore()
        index = LocalIndex(store, store.register("unit"))
        self.hierarchy = Hierarchy(self.arena, {GPU: self.gpu}, index, writer_gone=writer_gone(folder))

    def _start(self) -> Child:
        child = Child("worker", self._worker_socket, self.device, self.arena.folder)
        child.says()
        return child

    def restart_worker(self) -> None:
        """Kill it, and take the next one up, as the CPU tier's process does."""
        self.worker.kill()
        with pytest.raises(Exception, match="gpu"):
            self.gpu.contains([bytes(34)])
        self.worker = self._start()
        assert self.gpu.connect(), self.gpu.fault
        reconcile(self.hierarchy.state, GPU)

    def close(self) -> None:
        self.hierarchy.close()
        self.worker.kill()
        self.arena.close()


@contextmanager
def host_with(device: str) -> Iterator[Host]:
    with folders() as place:
        host = Host(place, device)
        with door_in_thread(host.hierarchy, host.socket) as door:
            host.door = door
            yield host
        host.close()


@contextmanager
def engine(host: Host, *args: object) -> Iterator[Child]:
    child = Child("engine", host.socket, host.device, *args)
    try:
        child.says()
        yield child
    finally:
        child.kill()


@contextmanager
def opened(host: Host):
    with connected(host.socket) as cache:
        yield cache.keyspace(SPEC, model="m", revision="1")


def promoted(space, chain: int) -> np.ndarray:
    kv = kv_of(chain)
    assert space.save(tokens_of(chain), kv).result(PATIENCE).refused == ""
    assert space.prefetch(tokens_of(chain), tier="gpu").result(PATIENCE) == 4
    return kv


def empty(host: Host) -> torch.Tensor:
    """Where an engine loads to."""
    return torch.zeros(kv_of(0).shape, device=host.device)


def load(host: Host, space, chain: int) -> tuple[int, dict[str, int], np.ndarray]:
    out = empty(host)
    with space.match(tokens_of(chain)) as hit:
        count, tiers = hit.load(out), hit.tiers
    return count, tiers, out.cpu().numpy()
