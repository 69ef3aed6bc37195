"""How close is the NVMe tier to the bare device?

`nvme.write.*` and `nvme.read.*` are ratios to plain O_DIRECT pwrite and pread of the same bytes, sizes and number of
threads, on a preallocated file in the same folder, interleaved within the same second. The tier also verifies what it
reads. Those that end in `.lz4` and `.zstd` are of payloads of real KV that are packed on their way; the ratio is still
to as many bytes of payload.

The folder is KVTIER_BENCH_DIR, else the working directory's `.bench`; put it on the device that is in question.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import numpy as np

from benchmarks._harness import Figure, emit, options, paired
from benchmarks._host import folder_on_disk
from benchmarks._kv import body_of
from kvtier.block import slot_nbytes
from kvtier.lossless.method import Method
from kvtier.memory.arena import Arena
from kvtier.testing.payloads import LEAST_NBYTES, key_of, payload_with
from kvtier.tiers.base import Slots
from kvtier.tiers.nvme import NvmeTier

THREADS = 2
MIB = 1 << 20


def main() -> None:
    args = options(__doc__)
    with folder_on_disk() as folder:
        emit(figures(folder, smoke=args.smoke), as_json=args.json)


def figures(folder: Path, *, smoke: bool) -> Iterator[Figure]:
    for body in (MIB // 4,) if smoke else (2 * MIB, 8 * MIB, 32 * MIB):
        for method in Method if smoke or body == 8 * MIB else (Method.STORED,):
            batch, rounds = (4 * MIB, 2) if smoke else (256 * MIB, 9)
            yield from throughput(folder / f"{body}.{method.name}", body, method, batch=batch, rounds=rounds)


def throughput(folder: Path, body: int, method: Method, *, batch: int, rounds: int) -> Iterator[Figure]:
    """One batch of payloads, written to and read from the tier and the bare file, both filled before."""
    count = batch // body
    slot = slot_nbytes(body + LEAST_NBYTES)
    arena = Arena.private(count * slot)
    slots = Slots.of([place * slot for place in range(count)], [body + LEAST_NBYTES] * count)
    keys = [key_of(seed) for seed in range(count)]
    for seed, offset in enumerate(slots.offsets.tolist()):
        arena.memory[offset : offset + body + LEAST_NBYTES] = np.frombuffer(
            payload_with(seed, body_of(seed, body)), np.uint8
        )
    capacity = max(3 * batch, 10 * (slot + 4096))
    name = (f"{body // MIB}MiB" if body >= MIB else f"{body // 1024}KiB") + f".{method.name.lower()}" * bool(method)
    with (
        closing(NvmeTier(folder, capacity, arena, threads=THREADS, lossless=method)) as tier,
        Bare(folder / "bare", arena, slot) as bare,
    ):

        def write() -> None:
            tier.remove(keys)
            assert all(tier.write(keys, slots))

        def read() -> None:
            assert all(tier.read(keys, slots))

        for _ in range(-(-capacity // batch)):
            write()
        bare.write()
        for verb, plain, work in (("write", bare.write, write), ("read", bare.read, read)):
            one = paired(plain, {"tier": work}, rounds=rounds)["tier"]
            yield one.figure(
                f"nvme.{verb}.{name}",
                "x of bare direct I/O",
                gbps=round(batch / one.seconds / 1e9, 2),
                bare_gbps=round(batch / one.baseline_seconds / 1e9, 2),
                threads=THREADS,
                direct=tier.direct,
            )
        usage = tier.usage().counters
        assert not usage.keys() & {"corrupt", "read_error", "write_error"}, usage


class Bare:
    """Plain reads and writes of whole slots."""

    def __init__(self, path: Path, arena: Arena, slot: int) -> None:
        self.path = path
        self.fd = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_DIRECT", 0))
        self.parts = [arena.payload(at, slot) for at in range(0, arena.capacity, slot)]
        self.slot = slot
        self.pool = ThreadPoolExecutor(THREADS)
        os.posix_fallocate(self.fd, 0, arena.capacity)

    def __enter__(self) -> Bare:
        return self

    def __exit__(self, *_: object) -> None:
        self.pool.shutdown()
        os.close(self.fd)
        self.path.unlink()

    def write(self) -> None:
        self._all(lambda place: os.pwrite(self.fd, self.parts[place], place * self.slot))

    def read(self) -> None:
        self._all(lambda place: os.preadv(self.fd, [self.parts[place]], place * self.slot))

    def _all(self, move: Callable[[int], int]) -> None:
        assert all(moved == self.slot for moved in self.pool.map(move, range(len(self.parts))))


if __name__ == "__main__":
    main()
