"""Do several engines of one host get in each other's way?

1 to 8 client processes load the same prefix of a host (its door is another process), each again and again.

* `scale.load.N`: what N of them load together in a second, over what N processes copy together out of one shared file
  of as many bytes, one thread each. Above 1 is faster (streaming stores); it should not fall as processes come. Windows
  of both take turns; the median ratio.
* `scale.match.N.p50`, `.p99`: time of a `match` of the whole prefix meanwhile, lease and all, over all processes.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from pathlib import Path

import numpy as np
import torch

import kvtier
from benchmarks._harness import Figure, emit, options
from benchmarks._host import host

SPEC = kvtier.KVSpec(layers=8, kv_heads=4, head_dim=64, dtype="bfloat16", block_tokens=32)
"""Blocks of 256 KiB."""
SHARED = "/dev/shm" if Path("/dev/shm").is_dir() else None


def space_of(cache: kvtier.Cache) -> kvtier.Space:
    return cache.keyspace(SPEC, model="bench", revision="1", plan="raw")


def tokens_of(blocks: int) -> np.ndarray:
    return np.arange(blocks * SPEC.block_tokens, dtype=np.uint32)


def empty(blocks: int) -> torch.Tensor:
    return torch.zeros(SPEC.layers, 2, blocks * SPEC.block_tokens, SPEC.kv_heads, SPEC.head_dim, dtype=torch.bfloat16)


def client(socket: str, file: str, blocks: int, start: Barrier, orders: Connection) -> None:
    """Do what is ordered, for as long as it is ordered: how often, and how long each match took."""
    torch.set_num_threads(1)
    kv = empty(blocks)
    into = kv.view(torch.uint8).reshape(-1)
    whole = np.memmap(file, np.uint8, mode="r")
    with kvtier.connect(socket) as cache:
        target = into.numpy()
        space = space_of(cache)
        chain = space.chain(tokens_of(blocks))

        def copy(_: list[float]) -> None:
            np.copyto(target, whole)

        def load(times: list[float]) -> None:
            began = time.perf_counter()
            hit = space.match(chain)
            times.append(time.perf_counter() - began)
            with hit:
                if hit.load(kv) != chain.tokens:
                    raise RuntimeError("the host lost a block")

        acts = {"copy": copy, "load": load}
        while (order := orders.recv()) is not None:
            act, seconds = acts[order[0]], order[1]
            times: list[float] = []
            start.wait()
            began = time.perf_counter()
            done = 0
            while time.perf_counter() < began + seconds:
                act(times)
                done += 1
            orders.send((done / (time.perf_counter() - began), times))


class Clients:
    """So many processes that do the same at the same time."""

    def __init__(self, number: int, socket: Path, file: str, blocks: int) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._start = start = spawn.Barrier(number)  # kept: the children open it by name
        self._orders = []
        self._processes = []
        for _ in range(number):
            mine, theirs = spawn.Pipe()
            process = spawn.Process(target=client, args=(str(socket), file, blocks, start, theirs), daemon=True)
            process.start()
            theirs.close()
            self._orders.append(mine)
            self._processes.append(process)

    def window(self, act: str, seconds: float) -> tuple[float, list[float]]:
        """How often a second all of them did it, and how long each match took."""
        for orders in self._orders:
            orders.send((act, seconds))
        said = [orders.recv() for orders in self._orders]
        return sum(rate for rate, _ in said), [took for _, times in said for took in times]

    def end(self) -> None:
        for orders in self._orders:
            orders.send(None)
        for process in self._processes:
            process.join(30.0)


def measure(numbers: Sequence[int], blocks: int, seconds: float, rounds: int) -> Iterator[Figure]:
    nbytes = empty(blocks).nbytes
    with tempfile.NamedTemporaryFile(dir=SHARED) as file, host(max(64 << 20, 3 * nbytes)) as socket:
        file.write(os.urandom(nbytes))
        file.flush()
        with kvtier.connect(socket) as cache:
            space = space_of(cache)
            chain = space.chain(tokens_of(blocks))
            saved = space.save(chain, torch.randn_like(empty(blocks))).result()
            if saved.blocks != blocks:
                raise RuntimeError(f"the host took {saved.blocks} of {blocks} blocks")
        for number in numbers:
            clients = Clients(number, socket, file.name, blocks)
            try:
                yield from figures(clients, number, nbytes, seconds, rounds)
            finally:
                clients.end()


def figures(clients: Clients, number: int, nbytes: int, seconds: float, rounds: int) -> Iterator[Figure]:
    for act in ("copy", "load"):
        clients.window(act, seconds / 2)  # warm
    ratios, rates, copies = [], [], []
    times: list[float] = []
    before, _ = clients.window("copy", seconds)
    for _ in range(rounds):
        rate, some = clients.window("load", seconds)
        after, _ = clients.window("copy", seconds)
        ratios.append(rate / ((before + after) / 2))
        rates.append(rate)
        copies.append(after)
        times += some
        before = after
    low, middle, high = statistics.quantiles(ratios, n=4) if rounds > 1 else ratios * 3
    spread = {"low": round(low, 3), "high": round(high, 3), "rounds": rounds, "processes": number}
    gbps = {"gb_s": round(statistics.median(rates) * nbytes / 1e9, 2)}
    gbps["copy_gb_s"] = round(statistics.median(copies) * nbytes / 1e9, 2)
    yield Figure(f"scale.load.{number}", round(middle, 3), "ratio to memcpy", "higher", {**spread, **gbps})
    percentiles = statistics.quantiles(times, n=100)
    about = {"matches": len(times), "processes": number}
    for name, at in (("p50", 49), ("p99", 98)):
        yield Figure(f"scale.match.{number}.{name}", round(1e3 * percentiles[at], 3), "ms", "lower", about)


if __name__ == "__main__":
    args = options(__doc__)
    run = measure((1, 2), 8, 0.1, 2) if args.smoke else measure((1, 2, 4, 8), 128, 0.7, 9)
    emit(run, as_json=args.json)
