"""What a save costs, against memcpy of the same KV.

From `space.save` to the done future: reserve, encode into reserved slots of the shared arena, checksum, commit; 256 MiB
of bf16 KV that was not stored before, as 8 blocks of 32 MiB and as 1,024 of 256 KiB. The engine's thread only queues
it. The arena has been written through once, so its pages are there; old blocks are evicted. Baseline as in
`benchmarks.load`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import torch

import kvtier
from benchmarks._blocks import SPECS, TOTAL, kv_tensor
from benchmarks._harness import Figure, emit, options, paired
from benchmarks._host import host


def measure(total: int, rounds: int) -> Iterator[Figure]:
    """Both plans at both block sizes, each on a host of its own."""
    torch.set_num_threads(1)
    from_, to = np.ones(total, np.uint8), np.zeros(total, np.uint8)
    for size, spec in SPECS.items():
        for plan in ("raw", "int8", "int4"):
            capacity = 4 * total
            with host(capacity) as socket, kvtier.connect(socket) as cache:
                space = cache.keyspace(spec, model="bench", revision="1", plan=plan)
                kv = kv_tensor(spec, total)
                numbers = itertools.count()

                def chain(
                    space: kvtier.Space = space, kv: torch.Tensor = kv, numbers: Iterator[int] = numbers
                ) -> object:
                    tokens = kv.shape[2]
                    return space.chain(np.arange(tokens, dtype=np.uint32) + next(numbers) * tokens)

                for _ in range(8 if plan == "raw" else 16):
                    space.save(chain(), kv).result()
                chains = iter([chain() for _ in range(rounds + 1)])

                def save(space: kvtier.Space = space, kv: torch.Tensor = kv, chains: Iterator = chains) -> None:
                    saved = space.save(next(chains), kv).result()
                    if saved.refused:
                        raise RuntimeError(f"a save was refused: {saved}")

                ratio = paired(lambda: np.copyto(to, from_), {"save": save}, rounds=rounds, warmups=1)["save"]
                yield ratio.figure(
                    f"save.{plan}.{size}",
                    "ratio to memcpy",
                    logical_gbps=round(total / ratio.seconds / 1e9, 2),
                    memcpy_gbps=round(total / ratio.baseline_seconds / 1e9, 2),
                )


if __name__ == "__main__":
    args = options(__doc__)
    emit(measure(64 << 20, 2) if args.smoke else measure(TOTAL, 9), as_json=args.json)
