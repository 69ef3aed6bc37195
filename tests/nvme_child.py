"""A process that loads an NVMe tier until it is killed, on a device that may fail; see `test_nvme_kill`.

It says what it does, a line each, before the device can know of it: what it is about to write, to remove, or to evict.
"""

from __future__ import annotations

import errno
import os
import random
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import xxhash

from kvtier.block import PAGE, BlockHeader, header_nbytes, slot_nbytes
from kvtier.lossless.method import Method
from kvtier.memory.arena import Arena
from kvtier.testing.payloads import key_of
from kvtier.tiers.base import Slots
from kvtier.tiers.nvme import NvmeTier, transfer
from kvtier.tiers.nvme.frames import Begin, Frame
from kvtier.tiers.nvme.io import Disk

CAPACITY = 24 << 20
REGION = 3 << 20
SIZES = (192, 20_000, 65_600, 262_272)
BATCH = 8
_NORMAL = (np.random.default_rng(0).standard_normal(1 << 18, np.float32).view(np.uint32) >> 16).astype("<u2").tobytes()
"""Bytes that can be packed; a payload is a part of them."""


def payload_of(seed: int, nbytes: int) -> bytes:
    """The payload of a seed; its header says the seed wherever a tier remembers what headers say."""
    body_nbytes = nbytes - header_nbytes("raw")
    at = 2 * (seed * 7919 % ((len(_NORMAL) - body_nbytes) // 2))
    body = _NORMAL[at : at + body_nbytes]
    key = key_of(seed)
    spec, checksum = xxhash.xxh3_128_digest(b"spec") * 2, xxhash.xxh3_64_intdigest(body)
    header = BlockHeader(key[:32], seed % 4, seed, seed, 1, "raw", spec, body_nbytes, checksum, key[:16], seed)
    return header.pack() + body


def slots_of(sizes: Sequence[int], begin: int = 0) -> Slots:
    """Slots side by side."""
    ends = begin + np.cumsum([slot_nbytes(size) for size in sizes])
    return Slots((ends - [slot_nbytes(size) for size in sizes]).astype(np.int64), np.array(sizes, np.int64))


class Says:
    """Lines of the process, whole and in order."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.seeds: dict[bytes, int] = {}

    def __call__(self, mark: str, seeds: Iterable[int], tier: NvmeTier | None = None) -> None:
        with self.lock:
            dropped = [f"- {self.seeds[key]}\n" for key in (tier.dropped() if tier else ())]
            sys.stdout.write("".join(dropped + [f"{mark} {seed}\n" for seed in seeds]))
            sys.stdout.flush()


class Device(Disk):
    """Says what is evicted before it is, and fails in the ways that it is told: short, flip, error."""

    def __init__(self, says: Says, faults: str, turn: int) -> None:
        self.says, self.faults = says, faults.split()
        self.chance = random.Random(turn)
        self.tier: NvmeTier | None = None

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if self.tier is None:
            return super().preadv(fd, buffers, offset)
        self._fail(0.01)
        return super().preadv(fd, self._some(buffers), offset)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if self.tier is None:
            return super().pwritev(fd, buffers, offset)
        store, log = self.tier._state.opened.store, self.tier._state.log
        if Begin.unpack(store, buffers[0]):
            oldest = log.oldest
            first = oldest.sequence << 32
            going = [key for place, key in enumerate(oldest.keys(), first) if log.entries.get(key) == place]
            self.says("!", [self.says.seeds[key] for key in going])
        self._fail(0.02)
        buffers = self._some(buffers)
        frame = Frame.unpack(store, buffers[0])
        if "flip" in self.faults and frame and len(buffers) > 1 and self.chance.random() < 0.05:
            self.says("~", [self.says.seeds[frame[0].row.key]])
            altered = Arena.private(len(buffers[1])).payload(0, len(buffers[1]))
            altered[:] = buffers[1]
            altered[self.chance.randrange(192)] ^= 1 << self.chance.randrange(8)
            buffers = [buffers[0], altered, *buffers[2:]]
        return super().pwritev(fd, buffers, offset)

    def _fail(self, often: float) -> None:
        if "error" in self.faults and self.chance.random() < often:
            code = self.chance.choice([errno.EIO, errno.ENOSPC, errno.EROFS])
            raise OSError(code, os.strerror(code))

    def _some(self, buffers: Sequence[memoryview]) -> Sequence[memoryview]:
        """The kernel may move less than it was asked to."""
        if "short" not in self.faults or self.chance.random() < 0.5:
            return buffers
        some = list(buffers[: self.chance.randint(1, len(buffers))])
        some[-1] = some[-1][: self.chance.randint(1, len(some[-1]) // PAGE) * PAGE]
        return some


def work(tier: NvmeTier, arena: Arena, says: Says, number: int, turn: int) -> None:
    """Write, read back, read what is older so that it is carried over, remove, write again. Seeds are this thread's."""
    chance, begin = random.Random(2 * turn + number), number * arena.capacity // 2
    inventory = tier.inventory()
    sizes = dict(zip(inventory.records["tokens"].tolist(), inventory.records["nbytes"].tolist(), strict=True))
    sizes = {seed: size for seed, size in sizes.items() if seed // BATCH % 2 == number}

    def write(seeds: list[int]) -> None:
        slots = slots_of([sizes[seed] for seed in seeds], begin)
        for seed, offset in zip(seeds, slots.offsets.tolist(), strict=True):
            arena.payload(offset, sizes[seed])[:] = payload_of(seed, sizes[seed])
        says("?", seeds)
        said = tier.write([key_of(seed) for seed in seeds], slots)
        says("+", [seed for seed, one in zip(seeds, said, strict=True) if one], tier)

    def read(seeds: list[int]) -> None:
        slots = slots_of([sizes[seed] for seed in seeds], begin)
        found = tier.read([key_of(seed) for seed in seeds], slots)
        for seed, offset, one in zip(seeds, slots.offsets.tolist(), found, strict=True):
            if one and arena.payload(offset, sizes[seed]) != payload_of(seed, sizes[seed]):
                os._exit(3)

    def remove(seeds: list[int]) -> None:
        says("x", seeds)
        tier.remove([key_of(seed) for seed in seeds])
        waiting = tier._state.log.removed
        says("X", [seed for seed in seeds if key_of(seed) not in waiting], tier)

    for at in range(turn * 10**6 + number * BATCH, (turn + 1) * 10**6, 2 * BATCH):
        seeds = list(range(at, at + BATCH))
        says.seeds.update((key_of(seed), seed) for seed in seeds)
        sizes.update(dict.fromkeys(seeds, SIZES[at // BATCH % len(SIZES)]))
        write(seeds)
        read(seeds[:2])
        read(chance.sample(sorted(sizes), 4))
        if chance.random() < 0.3:
            some = chance.sample(sorted(sizes), 3)
            remove(some)
            write(some[:1])


def main() -> None:
    folder, turn, method, faults = Path(sys.argv[1]), int(sys.argv[2]), Method(int(sys.argv[3])), sys.argv[4]
    transfer.TRANSFER = 1 << 19
    says = Says()
    device = Device(says, faults, turn)
    arena = Arena.private(2 * BATCH * (SIZES[-1] + PAGE))
    tier = NvmeTier(
        folder,
        CAPACITY,
        arena,
        region_nbytes=REGION,
        lossless=method,
        disk=device,
        clock=lambda: 100 * time.monotonic(),
    )
    inventory = tier.inventory()
    says.seeds.update(zip(inventory.keys, inventory.records["tokens"].tolist(), strict=True))
    device.tier = tier
    for number in (0, 1):
        threading.Thread(target=work, args=(tier, arena, says, number, turn)).start()


if __name__ == "__main__":
    main()
