"""What does it cost to load a prefix that lies on NVMe?

`promote.share.*` is the time of the slower of its two parts, each alone, over the time of the whole: a match that waits
and a load, from blocks that only NVMe has to decoded bf16 KV of 256 MiB, as 8 blocks of 32 MiB and as 1,024 of 256 KiB,
under the plan `int8`; the host is another process. 1 is perfect overlap of I/O and decoding. The parts, in the same
round:

* the disk alone: plain O_DIRECT reads of the same payloads, on as many threads as the tier has, from preallocated files
  in the same folder, a block a call, small ones 4 MiB a call. They go into the very slots that the blocks are in: how
  much of a slot lies in one piece in the machine's memory halves or doubles the speed of direct I/O;
* decoding alone: `Hit.load` of the same blocks when they are in the CPU tier.

`promote.share` is the lowest of them. Three sequences and files take turns, so that nothing comes out of a cache.
"""

from __future__ import annotations

import itertools
import os
import statistics
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path

import numpy as np
import torch

import kvtier
from benchmarks._blocks import SPECS, TOTAL, kv_tensor
from benchmarks._harness import Figure, emit, options, seconds
from benchmarks._host import Disk, folder_on_disk, host
from kvtier.block import slot_nbytes

PATIENCE = 60.0
PLAN = "int8"
SEQUENCES = 3
THREADS = 2
"""Of the NVMe tier, unless told otherwise."""
PIECE = 4 << 20
"""Bytes of small blocks in one plain call."""


def measure(folder: Path, total: int, rounds: int) -> Iterator[Figure]:
    """Both block sizes, each on a host of its own."""
    torch.set_num_threads(1)
    shares = []
    for size, spec in SPECS.items():
        disk = Disk(folder / size, 10 * total)
        with host(4 * total, disk) as socket, kvtier.connect(socket) as cache:
            space = cache.keyspace(spec, model="bench", revision="1", plan=PLAN)
            kv = kv_tensor(spec, total)
            with ExitStack() as files:
                sequences = [
                    files.enter_context(closing(Sequence(space, kv, number, folder / f"{size}-{number}")))
                    for number in range(SEQUENCES)
                ]
                turn = itertools.cycle(sequences)
                timed = [next(turn).promoted() for _ in range(rounds + 2)][2:]
        whole, reading, decoding = ([one[part] for one in timed] for part in range(3))
        ratios = sorted(max(parts) / all_ for all_, *parts in timed)
        shares.append(statistics.median(ratios))
        yield Figure(
            f"promote.share.{PLAN}.{size}",
            round(shares[-1], 3),
            "of the slower part alone",
            "higher",
            {
                "low": round(ratios[len(ratios) // 4], 3),
                "high": round(ratios[-1 - len(ratios) // 4], 3),
                "seconds": round(statistics.median(whole), 6),
                "disk_seconds": round(statistics.median(reading), 6),
                "decode_seconds": round(statistics.median(decoding), 6),
                "disk_gbps": round(sequences[0].nbytes / statistics.median(reading) / 1e9, 2),
                "stored_mib": round(sequences[0].nbytes / (1 << 20), 1),
                "blocks": kv.shape[2] // spec.block_tokens,
                "rounds": rounds,
            },
        )
    yield Figure("promote.share", round(min(shares), 3), "of the slower part alone, the worst", "higher")


class Sequence:
    """A sequence of which only NVMe has the KV, and a plain file of its payloads.

    Attributes:
        nbytes: of the payloads.
    """

    def __init__(self, space: kvtier.Space, kv: torch.Tensor, number: int, path: Path) -> None:
        self._space, self._kv = space, kv
        self._chain = space.chain(np.arange(kv.shape[2], dtype=np.uint32) + number * kv.shape[2])
        saved = space.save(self._chain, kv).result()
        if saved.refused:
            raise RuntimeError(f"a save was refused: {saved}")
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_DIRECT", 0))
        self._threads = ThreadPoolExecutor(THREADS)
        with space.match(self._chain) as hit:
            pieces = self._pieces(hit)
            self.nbytes = sum(len(slot) for piece in pieces for slot in piece)
            os.posix_fallocate(self._file, 0, self.nbytes)
            self._each(os.pwritev, pieces)
        self._move_out()

    def promoted(self) -> tuple[float, float, float]:
        """Seconds of a load from NVMe, of the disk alone and of decoding alone."""

        def promote() -> None:
            with self._space.match(self._chain, wait=PATIENCE) as hit:
                self._load(hit)

        whole = seconds(promote)
        with self._space.match(self._chain) as hit:
            decoding = seconds(lambda: self._load(hit))
            pieces = self._pieces(hit)
            reading = seconds(lambda: self._each(os.preadv, pieces))
            if hit.load(self._kv, verify=True) != self._kv.shape[2]:
                raise RuntimeError("the plain reads did not give the same bytes")
        self._move_out()
        return whole, reading, decoding

    def close(self) -> None:
        """Close the file."""
        self._threads.shutdown()
        os.close(self._file)

    def _load(self, hit: kvtier.Hit) -> None:
        if hit.load(self._kv) != self._kv.shape[2]:
            raise RuntimeError("a load was not whole")

    def _pieces(self, hit: kvtier.Hit) -> list[list[memoryview]]:
        """The slots of all blocks, in groups that one call reads or writes."""
        memory = self._space.session.writable()
        slots = [memory[at : at + slot_nbytes(n)].data for at, n in hit._slots[["offset", "nbytes"]].tolist()]
        group = max(1, PIECE // len(slots[-1]))
        return [slots[first : first + group] for first in range(0, len(slots), group)]

    def _each(self, call: Callable[[int, list[memoryview], int], int], pieces: list[list[memoryview]]) -> None:
        begins = itertools.accumulate((sum(map(len, piece)) for piece in pieces), initial=0)
        moved = self._threads.map(lambda piece, begin: call(self._file, piece, begin), pieces, begins)
        if sum(moved) != self.nbytes:
            raise RuntimeError("the disk moved less than it was told to")

    def _move_out(self) -> None:
        """Leave it on NVMe alone."""
        if self._space.move(self._chain, "nvme", wait=PATIENCE) != len(self._chain.addresses):
            raise RuntimeError("the NVMe tier did not take all of a sequence; it is too small or failing")


if __name__ == "__main__":
    args = options(__doc__)
    with folder_on_disk() as place:
        emit(measure(place, 64 << 20, 3) if args.smoke else measure(place, TOTAL, 15), as_json=args.json)
