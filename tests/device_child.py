"""What runs in the other processes of `tests/integration/test_device_memory.py`; in JSON lines they say how it goes.

worker SOCKET DEVICE ARENA             a GPU tier, which a hierarchy asks through a socket: `Worker`
engine SOCKET DEVICE SEED [no-memory]  loads chains through the door into tensors on the device and compares every
                                       element, until a line comes; with "no-memory" it finds no file of the GPU tier
"""

from __future__ import annotations

import json
import sys
import threading
from collections import Counter
from contextlib import suppress
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

import numpy as np
import torch

import kvtier
from kvtier import KVSpec
from kvtier.client.cache import Cache
from kvtier.errors import KVTierError, SessionError
from kvtier.memory import device
from kvtier.tiers.gpu import GpuTier
from kvtier_services.actors.service import TierService

SPEC = KVSpec(2, 2, 64, "float32", block_tokens=8)
CHAINS, BLOCKS = 12, 4
TOKENS = BLOCKS * SPEC.block_tokens
CAPACITY = 3 << 19
"""Of the GPU tier: 9 chains of 4 blocks of 16 KiB and a header."""


def tokens_of(chain: int) -> range:
    return range(1000 * chain, 1000 * chain + TOKENS)


def kv_of(chain: int) -> np.ndarray:
    return np.random.default_rng(chain).standard_normal((2, 2, TOKENS, 2, 64), np.float32)


def say(**what: Any) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


class Worker:
    """Calls a worker, a connection a call; what `ActorCall` is with Ray."""

    def __init__(self, socket: Path) -> None:
        self._socket = str(socket)

    def __call__(self, method: str, *args: object, timeout: float) -> Any:
        with Client(self._socket) as connection:
            connection.send((method, args))
            if not connection.poll(timeout):
                raise TimeoutError(method)
            answer = connection.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer


def serve(connection: Connection, service: TierService) -> None:
    with connection:
        method, args = connection.recv()
        try:
            answer = getattr(service, method)(*args)
        except KVTierError as exc:
            answer = exc
        connection.send(answer)


def worker(socket: Path, where: str, arena: Path) -> None:
    service = TierService("gpu", arena, lambda mapped: GpuTier(CAPACITY, mapped, where))
    socket.unlink(missing_ok=True)
    with Listener(str(socket)) as listener:
        say(ready=True)
        while True:
            threading.Thread(target=serve, args=(listener.accept(), service), daemon=True).start()


def connected(socket: Path) -> Cache:
    """On a machine that has other work, a connection may take its time."""
    for _ in range(10):
        with suppress(SessionError):
            return kvtier.connect(socket)
    return kvtier.connect(socket)


def engine(socket: Path, where: str, seed: int) -> None:
    random, served, rounds, wrong = np.random.default_rng(seed), Counter(), 0, 0
    over = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.readline(), over.set()), daemon=True).start()
    with connected(socket) as cache:
        space = cache.keyspace(SPEC, model="m", revision="1")
        while not over.is_set():
            chain = int(random.integers(CHAINS))
            kv = kv_of(chain)
            out = torch.zeros(kv.shape, device=where)
            with space.match(tokens_of(chain)) as hit:
                count = hit.load(out)
                served.update(hit.tiers)
            wrong += not np.array_equal(out.cpu().numpy()[:, :, :count], kv[:, :, :count])
            space.save(tokens_of(chain), kv).result(10.0)
            rounds += 1
            if rounds == 20:
                say(ready=True)
        say(rounds=rounds, wrong=wrong, served=served, counters=cache.counters, device=cache.status()["device"])


if __name__ == "__main__":
    kind, where, on, what, *rest = sys.argv[1:]
    if rest:
        device.TABLE = "elsewhere"
    if kind == "worker":
        worker(Path(where), on, Path(what))
    else:
        engine(Path(where), on, int(what))
