"""How fast is each codec against copying the bytes?

Blocks move between private buffers (bfloat16 KV) and a shared mapping, out of cache: 256 MiB a call, every second call
another half of the mapping. The baseline is a one-thread numpy copy of the same 256 MiB between warm private buffers.
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

    def calls(
        self, codec: Codec, spec: KVSpec, threads: ThreadPoolExecutor, parts: int
    ) -> dict[str, Callable[[], object]]:
        """Encode and decode of all blocks, cut into this many concurrent calls."""
        blocks = self.nbytes // spec.block_nbytes
        tokens = np.arange(blocks, dtype=np.int64) * spec.block_tokens
        slot = slot_nbytes(codec.nbytes(spec, 0) + 192)
        offsets = np.arange(blocks, dtype=np.int64) * slot + 192
        source, target = self.view(spec, self.source), self.view(spec, self.target)
        half, every = count(), range(spec.layers)

        def pieces() -> list[tuple[NDArray[np.int64], NDArray[np.int64]]]:
            at = next(half) % HALVES * (len(self.shared) // HALVES // 4096 * 4096)
            return list(zip(np.array_split(tokens, parts), np.array_split(offsets + at, parts), strict=True))

        def encode() -> None:
            list(threads.map(lambda p: codec.encode(spec, source, p[0], self.shared, p[1], every), pieces()))

        def decode() -> None:
            list(threads.map(lambda p: codec.decode(spec, self.readonly, p[1], target, p[0], every), pieces()))

        encode()
        encode()
        return {"encode": encode, "decode": decode}


def measure(*, smoke: bool) -> Iterator[Figure]:
    """Measure every codec, block size, direction and number of threads."""
    workload = Workload((32 if smoke else 256) << 20)
    with ThreadPoolExecutor(2) as threads:
        for name in ("raw", "int8"):
            codec = codec_for(name)
            for size, spec in SHAPES.items():
                for parts in (1, 2):
                    if workload.nbytes // spec.block_nbytes < parts:
                        continue
                    calls = workload.calls(codec, spec, threads, parts)
                    measured = paired(workload.copy, calls, rounds=1 if smoke else 11, warmups=1)
                    for call, ratio in measured.items():
                        rate = round(workload.nbytes / ratio.seconds / 1e9, 2)
                        figure = f"codecs.{call}.{name}.{size}" + (f".{parts}threads" if parts > 1 else "")
                        yield ratio.figure(figure, UNIT, logical_gb_per_second=rate, threads=parts)


def main() -> int:
    chosen = options(__doc__)
    emit(measure(smoke=chosen.smoke), as_json=chosen.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
