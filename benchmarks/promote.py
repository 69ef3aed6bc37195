"""What does it cost to load a prefix that lies on NVMe?

`promote.share.*` is the time of the slower of its two parts, each alone, over the time of the whole: a match that waits
and a load, from blocks that only NVMe has to decoded bf16 KV of 256 MiB, as 8 blocks of 32 MiB and as 1,024 of 256 KiB,
under the plan `int8`; the host is another process. 1 is perfect overlap of I/O and decoding. The parts, in the same
round:

* the disk alone: plain O_DIRECT reads of as many bytes, on as many threads as the tier has, from a preallocated file in
  the same folder, a block a call, small ones 4 MiB a call;
* decoding alone: `Hit.load` of the same blocks when they are in the CPU tier.

`promote.share` is the lowest of them. Three sequences take turns, so that nothing comes out of the processor's cache.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

import kvtier
from benchmarks._blocks import SPECS, TOTAL, kv_tensor
from benchmarks._harness import Figure, emit, options, seconds
from benchmarks._host import Disk, folder_on_disk, host
from benchmarks.nvme import Bare
from kvtier.block import PAGE, slot_nbytes
from kvtier.client.scope import Chain
from kvtier.memory.arena import Arena

PATIENCE = 60.0
PLAN = "int8"
SEQUENCES = 3
LEAST_READ = 4 << 20


def measure(folder: Path, total: int, rounds: int) -> Iterator[Figure]:
    """Both block sizes, each on a host of its own."""
    torch.set_num_threads(1)
    shares = []
    for size, spec in SPECS.items():
        disk = Disk(folder / size, 10 * total)
        with host(4 * total, disk) as socket, kvtier.connect(socket) as cache:
            space = cache.keyspace(spec, model="bench", revision="1", plan=PLAN)
            kv = kv_tensor(spec, total)
            chains = [stored(space, kv, number) for number in range(SEQUENCES)]
            slots = [slot_nbytes(block["nbytes"]) for block in space.inspect(chains[0]) if block]
            read = max(*slots, LEAST_READ) // PAGE * PAGE
            arena = Arena.private(-(-sum(slots) // read) * read)
            with Bare(folder / "bare", arena, read) as bare:
                bare.write()
                turn = itertools.cycle(chains)
                timed = [one_round(space, kv, next(turn), bare) for _ in range(rounds + 2)][2:]
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
                "disk_gbps": round(arena.capacity / statistics.median(reading) / 1e9, 2),
                "stored_mib": round(sum(slots) / (1 << 20), 1),
                "blocks": len(slots),
                "rounds": rounds,
            },
        )
    yield Figure("promote.share", round(min(shares), 3), "of the slower part alone, the worst", "higher")


def stored(space: kvtier.Space, kv: torch.Tensor, number: int) -> Chain:
    """A sequence of which only NVMe has the KV."""
    tokens = kv.shape[2]
    chain = space.chain(np.arange(tokens, dtype=np.uint32) + number * tokens)
    saved = space.save(chain, kv).result()
    if saved.refused:
        raise RuntimeError(f"a save was refused: {saved}")
    move_out(space, chain)
    return chain


def move_out(space: kvtier.Space, chain: Chain) -> None:
    """Leave a sequence on NVMe alone."""
    if space.move(chain, "nvme", wait=PATIENCE) != len(chain.addresses):
        raise RuntimeError("the NVMe tier did not take all of a sequence; it is too small or failing")


def one_round(space: kvtier.Space, kv: torch.Tensor, chain: Chain, bare: Bare) -> tuple[float, float, float]:
    """Seconds of the whole, of the disk alone and of decoding alone."""

    def load(hit: kvtier.Hit) -> None:
        if hit.load(kv) != kv.shape[2]:
            raise RuntimeError("a load was not whole")

    def promote() -> None:
        with space.match(chain, wait=PATIENCE) as hit:
            load(hit)

    whole, reading = seconds(promote), seconds(bare.read)
    with space.match(chain) as hit:
        decoding = seconds(lambda: load(hit))
    move_out(space, chain)
    return whole, reading, decoding


if __name__ == "__main__":
    args = options(__doc__)
    with folder_on_disk() as place:
        emit(measure(place, 64 << 20, 3) if args.smoke else measure(place, TOTAL, 15), as_json=args.json)
