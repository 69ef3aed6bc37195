"""What a client pays to load a prefix out of the shared arena, against memcpy of the same KV.

One timer over match, load and release of 256 MiB of bf16 KV, hashed before, as 8 blocks of 32 MiB and as 1,024 of 256
KiB, one control call each; the host is another process. At least 512 MiB of stored blocks are read in turn, so that
nothing comes out of the processor's cache. The baseline copies 256 MiB between two warm private buffers with numpy,
on one thread, between any two loads. Destination and mapping are warm.
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

SOURCE = 512 << 20


def measure(total: int, source: int, rounds: int) -> Iterator[Figure]:
    """Both plans at both block sizes."""
    torch.set_num_threads(1)
    from_, to = np.ones(total, np.uint8), np.zeros(total, np.uint8)
    with host(source * 4) as socket, kvtier.connect(socket) as cache:
        for size, spec in SPECS.items():
            for plan in ("raw", "int8", "int4"):
                space = cache.keyspace(spec, model="bench", revision="1", plan=plan)
                kv = kv_tensor(spec, total)
                tokens = kv.shape[2]
                stored, chains = 0, []
                while stored < source:
                    chain = space.chain(np.arange(tokens, dtype=np.uint32) + len(chains) * tokens)
                    saved = space.save(chain, kv).result()
                    if saved.refused:
                        raise RuntimeError(f"a save was refused: {saved}")
                    stored += sum(block["nbytes"] for block in space.inspect(chain) if block)
                    chains.append(chain)
                turn = itertools.cycle(chains)

                def load(space: kvtier.Space = space, turn: Iterator = turn, kv: torch.Tensor = kv) -> None:
                    with space.match(next(turn)) as hit:
                        if hit.load(kv) != kv.shape[2]:
                            raise RuntimeError("a load was not whole")

                ratio = paired(lambda: np.copyto(to, from_), {"load": load}, rounds=rounds, warmups=len(chains))["load"]
                yield ratio.figure(
                    f"load.{plan}.{size}",
                    "ratio to memcpy",
                    logical_gbps=round(total / ratio.seconds / 1e9, 2),
                    memcpy_gbps=round(total / ratio.baseline_seconds / 1e9, 2),
                    blocks=len(chains[0].addresses),
                    source_mib=stored >> 20,
                )


if __name__ == "__main__":
    args = options(__doc__)
    emit(measure(64 << 20, 64 << 20, 3) if args.smoke else measure(TOTAL, SOURCE, 15), as_json=args.json)
