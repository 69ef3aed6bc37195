"""How fast is each plan against copying the bytes, and how far is that from what the memory could do?

Blocks move between private buffers (bfloat16 KV) and a shared mapping, out of cache: 256 MiB a call, every second call
another half of the mapping. The baseline is a one-thread numpy copy of the same 256 MiB between warm private buffers.

A plan's limit is the time in which the memory moves what it must, the KV once and the bodies once, as fast as it moves
them for `raw`, which does nothing else: `of_limit` is the share of it that is reached.
"""

from __future__ import annotations

import mmap
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks._harness import Figure, emit, options, paired
from kvtier.block import slot_nbytes
from kvtier.codecs.base import Codec
from kvtier.codecs.registry import codec_for
from kvtier.codecs.view import KVView
from kvtier.spec import KVSpec

UNIT = "ratio to memcpy"
SHAPES = {
    "32MiB": KVSpec(32, 8, 128, "bfloat16", block_tokens=256),
    "256KiB": KVSpec(8, 2, 64, "bfloat16", block_tokens=64),
}
HALVES = 2
PLANS = {
    "raw": "raw",
    "int8": "int8",
    "int4": "int4",
    "fp8": "fp8",
    "rotated4": "k8v4",
    "rotated4_both": "int4/token/sym/hadamard/lloyd",
    "int3": "int3",
    "layered": "layered",
}
"""Figures' names and plans. K and V both rotated is no named plan, as K must not be: it is the most that one costs."""


def _aligned(nbytes: int) -> NDArray[np.uint16]:
    """Warm memory that begins at a multiple of 64, as a torch tensor does."""
    room = np.ones(nbytes + 64, np.uint8)
    return room[-room.ctypes.data % 64 :][:nbytes].view(np.uint16)


class Workload:
    """Private KV, as source and as target, and a shared mapping that holds every block twice."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        generator = np.random.default_rng(0)
        values = generator.standard_normal(nbytes // 4, np.float32).view(np.uint32)
        self.source, self.target = _aligned(nbytes), _aligned(nbytes)
        self.source[: len(values)] = self.source[len(values) :] = values >> 16
        folder = Path("/dev/shm")
        with tempfile.TemporaryFile(dir=folder if folder.is_dir() else None) as file:
            file.truncate(HALVES * nbytes + 8192 * 1024)
            self.shared = np.frombuffer(mmap.mmap(file.fileno(), 0), np.uint8)
            self.readonly = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
        self.shared[:] = 1
        self.readonly[::4096].max()

    def copy(self) -> None:
        """The baseline."""
        np.copyto(self.target, self.source)

    def view(self, spec: KVSpec, elements: NDArray[np.uint16]) -> KVView:
        """All of the buffer as the KV of one sequence."""
        return KVView.of(elements.reshape(spec.layers, 2, -1, spec.kv_heads, spec.head_dim), spec)

    def calls(self, codec: Codec, threads: ThreadPoolExecutor, parts: int) -> dict[str, Callable[[], object]]:
        """Encode and decode of all blocks, cut into this many concurrent calls."""
        spec = codec.spec
        blocks = self.nbytes // spec.block_nbytes
        positions = np.arange(blocks, dtype=np.int64)
        tokens = positions * spec.block_tokens
        slot = slot_nbytes(codec.nbytes(0) + 192)
        offsets = positions * slot + 192
        source, target = self.view(spec, self.source), self.view(spec, self.target)
        half, every = count(), range(spec.layers)

        def pieces() -> list[tuple[NDArray[np.int64], ...]]:
            at = next(half) % HALVES * (len(self.shared) // HALVES // 4096 * 4096)
            return list(zip(*(np.array_split(v, parts) for v in (tokens, offsets + at, positions)), strict=True))

        def encode() -> None:
            list(threads.map(lambda p: codec.encode(source, p[0], self.shared, p[1], p[2], every), pieces()))

        def decode() -> None:
            list(threads.map(lambda p: codec.decode(self.readonly, p[1], p[2], target, p[0], every), pieces()))

        encode()
        encode()
        return {"encode": encode, "decode": decode}


def measure(*, smoke: bool) -> Iterator[Figure]:
    """Measure every plan, block size, direction and number of threads; `raw`, first, says what the memory can do."""
    workload = Workload((32 if smoke else 256) << 20)
    bandwidth: dict[tuple[str, str, int], float] = {}
    with ThreadPoolExecutor(2) as threads:
        for size, parts in (("32MiB", 1), ("32MiB", 2), ("256KiB", 1), ("256KiB", 2)):
            for name, plan in PLANS.items():
                codec = codec_for(plan, SHAPES[size])
                blocks = workload.nbytes // codec.spec.block_nbytes
                if blocks < parts or (smoke and name in ("int3", "layered", "rotated4_both")):
                    continue
                moved = workload.nbytes + blocks * codec.nbytes(1)
                calls = workload.calls(codec, threads, parts)
                measured = paired(workload.copy, calls, rounds=1 if smoke else 11, warmups=1)
                for call, ratio in measured.items():
                    best = bandwidth.setdefault((call, size, parts), moved / ratio.seconds)
                    figure = f"codecs.{call}.{name}" + (f".{size}" if size != "32MiB" else "")
                    yield ratio.figure(
                        figure + (f".{parts}threads" if parts > 1 else ""),
                        UNIT,
                        limit=round(ratio.baseline_seconds * best / moved, 2),
                        of_limit=round(moved / best / ratio.seconds, 2),
                        logical_gb_per_second=round(workload.nbytes / ratio.seconds / 1e9, 2),
                        threads=parts,
                    )


def main() -> int:
    chosen = options(__doc__)
    emit(measure(smoke=chosen.smoke), as_json=chosen.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
