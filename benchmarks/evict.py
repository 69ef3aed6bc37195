"""What does it cost a save that old blocks must leave the CPU tier for it?

`evict.cost.*` is the median time of a save for which clean victims (blocks that NVMe has too) must be evicted, over the
median time of one that finds free room; both of 256 MiB of bf16 KV, as 8 blocks of 32 MiB and as 1,024 of 256 KiB, from
`space.save` to the done future, alternating on one host in another process. Every save must be accepted. The watermarks
are at 1, so that no mover has made room before: each slot is freed by the save that needs it. `evict.cost` is the
highest of them.

Between the saves, untimed: what was saved is written to NVMe and brought up again, so that all of the CPU tier is
clean; before a save with free room the oldest sequences are moved out; before a save that evicts, a shorter one takes
what is free.
"""

from __future__ import annotations

import itertools
import statistics
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

import kvtier
from benchmarks._blocks import SPECS, TOTAL, kv_tensor
from benchmarks._harness import Figure, emit, options, seconds
from benchmarks._host import Disk, folder_on_disk, host
from kvtier.block import slot_nbytes
from kvtier.client.scope import Chain
from kvtier.hierarchy.limits import Limits

PATIENCE = 60.0


class Bench:
    """One host whose CPU tier is full of clean blocks, and what is saved there."""

    def __init__(self, cache: kvtier.Cache, space: kvtier.Space, total: int) -> None:
        self._cache, self._space = cache, space
        self._kv = kv_tensor(space.keyspace.spec, total)
        self._slot = slot_nbytes(space._scope.headers.payload_nbytes(1))
        self._numbers = itertools.count()
        self._chains: deque[Chain] = deque()
        self.blocks = self._kv.shape[2] // space.block_tokens

    def fill(self) -> None:
        """Save until old blocks have left."""
        while self.timed_save(self.blocks)[1] == 0:
            pass

    def evicting(self) -> tuple[float, int]:
        """Time of a save that finds no room, and how many blocks left for it."""
        while (free := self._room() // self._slot) > 0:
            self.timed_save(min(free, self.blocks))
        return self.timed_save(self.blocks)

    def into_room(self) -> tuple[float, int]:
        """Time of a save that finds room, and how many blocks left nevertheless."""
        while self._room() < (self.blocks + 1) * self._slot:
            self._space.move(self._chains.popleft(), "nvme", wait=PATIENCE)
        return self.timed_save(self.blocks)

    def timed_save(self, blocks: int) -> tuple[float, int]:
        """Save a sequence of so many blocks; its time, and how many blocks left the CPU tier."""
        tokens, before = blocks * self._space.block_tokens, self._stored()
        kv = self._kv[:, :, :tokens]
        chain = self._space.chain(np.arange(tokens, dtype=np.uint32) + next(self._numbers) * self._kv.shape[2])
        saved: list[kvtier.Saved] = []
        took = seconds(lambda: saved.append(self._space.save(chain, kv).result()))
        if saved[0].refused or saved[0].blocks != blocks:
            raise RuntimeError(f"a save was not accepted: {saved[0]}")
        left = before + blocks - self._stored()
        self._clean(chain)
        return took, left

    def _clean(self, chain: Chain) -> None:
        """Have NVMe and the CPU tier both hold a sequence."""
        blocks = len(chain.addresses)
        if self._space.move(chain, "nvme", wait=PATIENCE) != blocks or self._space.prefetch(chain).result() != blocks:
            raise RuntimeError("the NVMe tier did not take all of a sequence; it is too small or failing")
        self._chains.append(chain)

    def _stored(self) -> int:
        return int(self._cpu()["blocks"])

    def _room(self) -> int:
        """Bytes that a save may take without evicting."""
        cpu = self._cpu()
        return int(cpu["capacity"] * (1 - Limits.of(cpu["capacity"]).staging_reserve) - cpu["used"])

    def _cpu(self) -> dict:
        return next(tier for tier in self._cache.status()["tiers"] if tier["tier"] == "cpu")


def measure(folder: Path, total: int, rounds: int) -> Iterator[Figure]:
    """Both block sizes, each on a host of its own."""
    torch.set_num_threads(1)
    costs = []
    for size, spec in SPECS.items():
        for plan in ("raw", "int8"):
            disk = Disk(folder / f"{plan}-{size}", 10 * total)
            with host(4 * total, disk, high=1.0, low=1.0) as socket, kvtier.connect(socket) as cache:
                bench = Bench(cache, cache.keyspace(spec, model="bench", revision="1", plan=plan), total)
                bench.fill()
                pairs = [(bench.evicting(), bench.into_room()) for _ in range(rounds + 1)][1:]
            evicting, into_room = ([one[which] for one in pairs] for which in (0, 1))
            medians = [statistics.median(took for took, _ in each) for each in (evicting, into_room)]
            ratios = sorted(a / b for (a, _), (b, _) in pairs)
            costs.append(medians[0] / medians[1])
            yield Figure(
                f"evict.cost.{plan}.{size}",
                round(costs[-1], 3),
                "of a save into free room",
                "lower",
                {
                    "low": round(ratios[len(ratios) // 4], 3),
                    "high": round(ratios[-1 - len(ratios) // 4], 3),
                    "seconds": round(medians[0], 6),
                    "baseline_seconds": round(medians[1], 6),
                    "blocks": bench.blocks,
                    "evicted": statistics.median(left for _, left in evicting),
                    "evicted_baseline": max(left for _, left in into_room),
                    "rounds": rounds,
                },
            )
    yield Figure("evict.cost", round(max(costs), 3), "of a save into free room, the worst", "lower")


if __name__ == "__main__":
    args = options(__doc__)
    with folder_on_disk() as place:
        emit(measure(place, 64 << 20, 2) if args.smoke else measure(place, TOTAL, 15), as_json=args.json)
