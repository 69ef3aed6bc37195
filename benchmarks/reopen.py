"""How soon is the NVMe tier back after a restart?

`reopen.share` is the time to open a store of 100,000 blocks of 64 KiB, over the time that reading the whole of it
takes, at the bandwidth of direct reads in the same second with the tier's own number of threads. It was closed in good
order before. `reopen.killed.share` is the same as kill -9 leaves it: what follows the newest region's table is scanned.
`nvme.reopen.10000` is the time to open a store of 10,000 blocks of 16 KiB.

The folder is KVTIER_BENCH_DIR, else the working directory's `.bench`; put it on the device that is in question. It
needs 8 GB.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import numpy as np

from benchmarks._harness import Figure, emit, options, seconds
from benchmarks._host import folder_on_disk
from kvtier.block import PAGE, slot_nbytes
from kvtier.memory.arena import Arena
from kvtier.testing.payloads import LEAST_NBYTES, key_of, payload_with
from kvtier.tiers.base import Slots
from kvtier.tiers.nvme import NvmeTier
from kvtier.tiers.nvme.io import Disk, RegionFile, pages
from kvtier.tiers.nvme.recovery import FILE
from kvtier.tiers.nvme.table import table_nbytes

BATCH = 250
ROUNDS = 5
THREADS = 2
READ = 4 << 20


def main() -> None:
    args = options(__doc__)
    with folder_on_disk() as folder:
        emit(figures(folder, smoke=args.smoke), as_json=args.json)


def figures(folder: Path, *, smoke: bool) -> Iterator[Figure]:
    large = Store(folder / "large", 1_000 if smoke else 100_000, 64 << 10)
    yield from large.shares(32 << 20 if smoke else 512 << 20)
    large.delete()
    small = Store(folder / "small", 500 if smoke else 10_000, 16 << 10)
    took = statistics.median(small.reopen() for _ in range(ROUNDS))
    each = {"us_a_block": round(took / small.blocks * 1e6, 1)}
    yield Figure(f"nvme.reopen.{small.blocks}", round(took, 4), "s", "lower", each)


class Store:
    """A closed store of so many blocks."""

    def __init__(self, folder: Path, blocks: int, body: int) -> None:
        self.folder, self.blocks = folder, blocks
        nbytes = body + LEAST_NBYTES
        slot = slot_nbytes(nbytes)
        self.record = slot + PAGE
        self.capacity = max(64 << 20, int(1.3 * blocks * self.record))
        self.arena = Arena.private(BATCH * slot)
        slots = Slots.of([place * slot for place in range(BATCH)], [nbytes] * BATCH)
        content = np.random.default_rng(1).bytes(body)
        with closing(self.open()) as tier:
            for first in range(0, blocks, BATCH):
                seeds = range(first, first + BATCH)
                for seed, offset in zip(seeds, slots.offsets.tolist(), strict=True):
                    self.arena.memory[offset : offset + nbytes] = np.frombuffer(payload_with(seed, content), np.uint8)
                assert all(tier.write([key_of(seed) for seed in seeds], slots))
            log = tier._state.log
            self.used = log.used
            self.killed = pages(table_nbytes(log.newest.count) // PAGE)
            self.end = log.geometry.start(log.newest.index + 1) - len(self.killed)
            tier._state.opened.file.read(self.end, [self.killed])

    def open(self) -> NvmeTier:
        return NvmeTier(self.folder, self.capacity, self.arena, threads=THREADS)

    def reopen(self, *, killed: bool = False) -> float:
        """Seconds until its blocks are hits again."""
        if killed:
            with closing(self._file()) as file:
                file.write(self.end, [self.killed])
        opened: list[NvmeTier] = []
        took = seconds(lambda: opened.append(self.open()))
        with closing(opened[0]) as tier:
            assert tier.usage().blocks == self.blocks
        return took

    def shares(self, sample: int) -> Iterator[Figure]:
        """Both ways, against as many direct reads as `sample` says, spread over the store."""
        for name, killed in (("reopen.share", False), ("reopen.killed.share", True)):
            rounds = [(self.reopen(killed=killed), self._read(sample)) for _ in range(ROUNDS)]
            shares = [took / (self.used / (sample / read)) for took, read in rounds]
            low, middle, high = statistics.quantiles(shares, n=4)
            yield Figure(
                name,
                round(middle, 4),
                "of reading it all",
                "lower",
                {
                    "low": round(low, 4),
                    "high": round(high, 4),
                    "seconds": round(statistics.median(took for took, _ in rounds), 4),
                    "read_gbps": round(sample / statistics.median(read for _, read in rounds) / 1e9, 2),
                    "blocks": self.blocks,
                    "gb": round(self.used / 1e9, 2),
                },
            )

    def delete(self) -> None:
        (self.folder / FILE).unlink()

    def _file(self) -> RegionFile:
        return RegionFile(self.folder / FILE, Disk(), direct=True)

    def _read(self, nbytes: int) -> float:
        """Seconds that direct reads of so many bytes take."""
        step = max(READ, self.used // (nbytes // READ) // PAGE * PAGE)
        offsets = [PAGE + step * place for place in range(nbytes // READ)]
        buffers = [pages(READ // PAGE) for _ in range(THREADS)]

        def read(thread: int) -> None:
            for offset in offsets[thread::THREADS]:
                file.read(offset, [buffers[thread]])

        with closing(self._file()) as file, ThreadPoolExecutor(THREADS) as pool:
            return seconds(lambda: list(pool.map(read, range(THREADS))))


if __name__ == "__main__":
    main()
