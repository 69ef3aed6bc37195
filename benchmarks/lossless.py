"""How much smaller does the lossless stage make 16-bit KV, and how fast is it against copying the bytes?

The KV is that of real models in tests/data: 256 tokens of 6 layers as one payload body, and its K and V apart. `plain`
is the compressor on the bytes as they are, without planes. `lossless.pack.*` and `lossless.unpack.*` are ratios to a
one-thread numpy copy of the same bytes, out of cache, interleaved within the same second.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pyarrow as pa

from benchmarks._harness import Figure, emit, options, paired
from benchmarks._kv import bodies
from kvtier.lossless.frame import pack, unpack
from kvtier.lossless.method import Method

CODECS = {"lz4": pa.Codec("lz4_raw"), "zstd": pa.Codec("zstd", compression_level=1)}
METHODS = {"lz4": Method.LZ4, "zstd": Method.ZSTD}
SPEED = "ratio to memcpy"


def sizes() -> Iterator[Figure]:
    """Bytes before over bytes after."""
    for parts, suffix in (("kv", ""), ("k", ".k"), ("v", ".v")):
        sample = bodies(parts)
        total = sum(map(len, sample))
        room = memoryview(bytearray(total))
        for name, codec in CODECS.items():
            plain = sum(min(len(body), codec.compress(body, asbytes=False).size) for body in sample)
            split = sum(pack(body, METHODS[name], room) or len(body) for body in sample)
            yield Figure(f"lossless.ratio.{name}{suffix}", round(total / split, 3), "times smaller")
            yield Figure(f"lossless.ratio.{name}{suffix}.plain", round(total / plain, 3), "times smaller")


class Workload:
    """The same bodies again and again, each copy in memory of its own, so that nothing stays in the cache."""

    def __init__(self, nbytes: int) -> None:
        sample = bodies()
        self.bodies = [
            memoryview(bytearray(body)) for _ in range(nbytes // sum(map(len, sample)) + 1) for body in sample
        ]
        self.nbytes = sum(map(len, self.bodies))
        self.rooms = [memoryview(bytearray(len(body))) for body in self.bodies]
        self.source, self.target = np.ones(self.nbytes, np.uint8), np.ones(self.nbytes, np.uint8)

    def copy(self) -> None:
        """The baseline."""
        np.copyto(self.target, self.source)

    def calls(self, name: str, each: Callable[..., object]) -> dict[str, Callable[[], object]]:
        """Packing and unpacking all of it, with planes and without."""
        codec, method = CODECS[name], METHODS[name]
        plain = [codec.compress(body, asbytes=False) for body in self.bodies]
        frames = [bytes(room[: pack(body, method, room)]) for body, room in zip(self.bodies, self.rooms, strict=True)]
        return {
            f"pack.{name}": lambda: each(lambda body, room: pack(body, method, room), self.bodies, self.rooms),
            f"unpack.{name}": lambda: each(unpack, frames, self.rooms),
            f"pack.{name}.plain": lambda: each(lambda body: codec.compress(body, asbytes=False), self.bodies),
            f"unpack.{name}.plain": lambda: each(
                lambda body, room: codec.decompress(body, len(room), asbytes=False), plain, self.rooms
            ),
        }


def speeds(*, smoke: bool) -> Iterator[Figure]:
    """On one thread, then on two at a time."""
    workload = Workload((4 if smoke else 64) << 20)
    with ThreadPoolExecutor(2) as threads:
        for each, suffix in (map, ""), (threads.map, ".2threads"):
            for name in METHODS:
                calls = workload.calls(name, lambda *args, each=each: list(each(*args)))
                for call, ratio in paired(workload.copy, calls, rounds=1 if smoke else 9, warmups=1).items():
                    rate = round(workload.nbytes / ratio.seconds / 1e9, 2)
                    yield ratio.figure(f"lossless.{call}{suffix}", SPEED, payload_gb_per_second=rate)


def measure(*, smoke: bool) -> Iterator[Figure]:
    """Sizes, then speeds."""
    yield from sizes()
    yield from speeds(smoke=smoke)


def main() -> int:
    chosen = options(__doc__)
    emit(measure(smoke=chosen.smoke), as_json=chosen.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
