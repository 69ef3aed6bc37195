"""How fast the GPU tier copies each way, loads out of its memory, and saves, on a device.

One JSON line a figure. `gpu.h2d` and `gpu.d2h` are the speed of the tier's write and read over that of one copy of as
much pinned memory in the same run; `gpu.both` is the time of a write and a read one after the other over that of both
at once. `gpu.load.PLAN` is the time of a copy of the loaded KV on the device over that of `Hit.load` out of the tier's
memory, match and release included. `gpu.save.PLAN` is the time of one copy of the encoded bytes into pinned memory over
that of `Space.save`, hashing and the copy into slots included; `call_ms` is what the engine's thread waits for.
"""

from __future__ import annotations

import json
import statistics
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import kvtier
from kvtier.block import PAGE
from kvtier.codecs.gpu import DeviceView
from kvtier.codecs.registry import codec_for
from kvtier.memory.arena import Arena
from kvtier.memory.filling import STEP
from kvtier.memory.pinning import Pinner
from kvtier.testing.payloads import key_of
from kvtier.tiers.base import Slots
from kvtier.tiers.gpu import GpuTier
from tests.gpu.speed import BLOCKS, SPEC

DEVICE = "cuda:0"
SIZES = {"8MiB": (8 << 20, 48), "256KiB": (256 << 10, 1024)}
"""Payloads, and how many of them a batch has."""
ROUNDS = 9


def seconds(work: Callable[[], object]) -> float:
    """The median of some runs."""
    spent = []
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        began = time.perf_counter()
        work()
        torch.cuda.synchronize()
        spent.append(time.perf_counter() - began)
    return statistics.median(spent)


def say(figure: str, value: float, unit: str, **more: Any) -> None:
    line = {"figure": figure, "value": round(value, 3), "unit": unit, "better": "higher", **more}
    sys.stdout.write(json.dumps(line | {"device": torch.cuda.get_device_name()}) + "\n")


def at_once(*work: Callable[[], object]) -> None:
    threads = [threading.Thread(target=each) for each in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def copies(arena: Arena, name: str, nbytes: int, count: int) -> None:
    total = nbytes * count
    tier = GpuTier(2 * total + (64 << 20), arena, DEVICE)
    there = torch.empty(total, dtype=torch.uint8, device=DEVICE)
    here = torch.empty(total, dtype=torch.uint8, pin_memory=True)
    bare = {"h2d": lambda: there.copy_(here, non_blocking=True), "d2h": lambda: here.copy_(there, non_blocking=True)}
    slots = Slots(np.arange(count, dtype=np.int64) * nbytes, np.full(count, nbytes, np.int64))
    keys, others = [key_of(i) for i in range(count)], [key_of(count + i) for i in range(count)]
    landing = Slots(slots.offsets + total, slots.nbytes)

    def write(these: list[bytes]) -> None:
        tier.remove(these)
        if not all(tier.write(these, slots)):
            raise RuntimeError("the tier refused a write")

    def read() -> None:
        if not all(tier.read(keys, landing)):
            raise RuntimeError("the tier refused a read")

    write(keys)
    spent = {"h2d": seconds(lambda: write(keys)), "d2h": seconds(read)}
    for way, took in spent.items():
        copied = seconds(bare[way])
        unit = "of the speed of one copy of pinned memory"
        say(
            f"gpu.{way}.{name}",
            copied / took,
            unit,
            gb_per_s=round(total / took / 1e9, 1),
            copy_gb_per_s=round(total / copied / 1e9, 1),
        )
    both = seconds(lambda: at_once(lambda: write(others), read))
    say(f"gpu.both.{name}", (spent["h2d"] + spent["d2h"]) / both, "of one after the other")
    tier.close()


def loads(plan: str) -> None:
    nbytes = SPEC.block_nbytes * BLOCKS
    tokens = BLOCKS * SPEC.block_tokens
    config = {"cpu": {"capacity": "1GiB"}, "gpu": {"capacity": "1GiB", "device": DEVICE}}
    source = torch.randn(SPEC.layers, 2, tokens, SPEC.kv_heads, SPEC.head_dim, dtype=torch.bfloat16)
    target = source.to(DEVICE)
    copy = torch.empty_like(target)
    view = DeviceView.of(target, SPEC)
    with kvtier.open(config) as cache:
        space = cache.keyspace(SPEC, model="m", revision="1", plan=plan)
        if space.save(range(tokens), source).result(60.0).blocks != BLOCKS:
            raise RuntimeError("the save was refused")
        space.prefetch(range(tokens), tier="gpu").result(60.0)
        chain = space.chain(range(tokens))
        served: dict[str, int] = {}

        def load() -> None:
            nonlocal served
            with space.match(chain) as hit:
                if hit.load(view) != tokens:
                    raise RuntimeError("not all was loaded")
                served = hit.tiers

        load()
        took = seconds(load)
        if served != {"gpu": tokens}:
            raise RuntimeError(f"served by {served}")
        copied = seconds(lambda: copy.copy_(target))
        unit = "of the speed of a device copy of the KV"
        say(f"gpu.load.{plan}", copied / took, unit, ms=round(took * 1e3, 3), kv_gb_per_s=round(nbytes / took / 1e9, 1))


def saves(plan: str) -> None:
    tokens = BLOCKS * SPEC.block_tokens
    source = torch.randn(SPEC.layers, 2, tokens, SPEC.kv_heads, SPEC.head_dim, dtype=torch.bfloat16, device=DEVICE)
    view = DeviceView.of(source, SPEC)
    with kvtier.open({"cpu": {"capacity": "1GiB"}}) as cache:
        space = cache.keyspace(SPEC, model="m", revision="1", plan=plan)
        chain = space.chain(range(tokens))
        nbytes = len(chain.addresses) * codec_for(plan, SPEC).nbytes(1)
        calls = []

        def save() -> None:
            space.evict(chain)
            began = time.perf_counter()
            done = space.save(chain, view)
            calls.append(time.perf_counter() - began)
            if done.result(60.0).blocks != BLOCKS:
                raise RuntimeError("the save was refused")

        save()
        took = seconds(save)
        there = torch.empty(nbytes, dtype=torch.uint8, device=DEVICE)
        here = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        copied = seconds(lambda: here.copy_(there, non_blocking=True))
        more = {"ms": round(took * 1e3, 3), "call_ms": round(statistics.median(calls) * 1e3, 3)}
        unit = "of the speed of one copy into pinned memory"
        say(f"gpu.save.{plan}", copied / took, unit, gb_per_s=round(nbytes / took / 1e9, 1), **more)


def main() -> None:
    torch.manual_seed(0)
    arena = Arena.private(1 << 30)
    pin = Pinner(lambda fault: sys.stderr.write(fault + "\n"))
    for start in range(0, arena.capacity, STEP):
        pin(arena.memory[start : start + STEP])
    arena.memory[::PAGE] = 1
    for name, (nbytes, count) in SIZES.items():
        copies(arena, name, nbytes, count)
    for plan in ("raw", "int8", "int4"):
        loads(plan)
        saves(plan)


if __name__ == "__main__":
    main()
