"""What does the fleet's index cost?

* `index.vs_mget.SIZE`: a lookup of 2,048 keys among 10 thousand, 1 million and 10 million blocks of two replicas each
  through `RedisIndex.match`, over a bare MGET of the same keys by redis-py and hiredis, both on a Unix socket. Each
  call has other keys than the one before, so that neither finds the server's caches warm.
* `index.flatness`: the largest of these ratios over the smallest: whether the index adds anything that grows.
* `index.updates`: blocks told a second, in batches, by one host that is not paced.
* `index.bytes_per_block`: Redis memory a block, hash table and all, with one and with two replicas; the most of all.

`--sizes 10000 1000000` measures only these. 10 million blocks take 1.6 GB; a size for which there is no room is left
out.
"""

from __future__ import annotations

import itertools
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

import psutil
from redis import Redis

from benchmarks._harness import Figure, emit, paired, parser
from kvtier.index.address import RedisAddress
from kvtier.index.base import Life
from kvtier.index.connect import parts
from kvtier.index.entry import VERSION, pack_body, pack_owner
from kvtier.index.options import RedisIndexOptions
from kvtier.index.redis import RedisIndex
from kvtier.index.sweep import KEY_NBYTES
from kvtier_services import redis_server

KEYS = 2048
SAMPLES = 64
NBYTES = 1 << 20
ALICE, BOB = Life(1, 1, "alice"), Life(2, 1, "bob")
PATIENT = RedisIndexOptions(
    lookup_timeout=5.0, update_timeout=10.0, publish_rate=1e9, max_pending=1 << 20, sweep_every=1e6
)
SIZES = {10_000: "10k", 1_000_000: "1M", 10_000_000: "10M"}
ROOM = 256
"""Bytes of memory that must be available a block."""
FILL = 10_000


def index_of(server: RedisAddress, life: Life) -> RedisIndex:
    _, lookups, masters = parts(server, PATIENT)
    return RedisIndex(lookups, masters, life, options=PATIENT)


def wait_until_both_are_found(index: RedisIndex, keys: list[bytes]) -> None:
    """The first lookup that names a new host only asks the background to look who that is."""
    deadline = time.monotonic() + 10
    while not all(len(found) == 2 for found in index.match(keys) or [()]):
        if time.monotonic() > deadline:
            raise RuntimeError(f"a lookup does not find both replicas: {index.status()}")
        time.sleep(0.001)


def some_keys(count: int) -> list[bytes]:
    """Block addresses: as random as SHA-256."""
    data = os.urandom(count * KEY_NBYTES)
    return [data[at : at + KEY_NBYTES] for at in range(0, len(data), KEY_NBYTES)]


def told(server: RedisAddress, bare: Redis, blocks: int) -> Iterator[Figure]:
    """Blocks told the way hosts tell them."""
    keys = some_keys(blocks)
    with closing(index_of(server, ALICE)) as alice, closing(index_of(server, BOB)) as bob:
        empty = int(bare.info("memory")["used_memory"])
        for replicas, index in ((1, alice), (2, bob)):
            start = time.perf_counter()
            index.publish((key, 2, NBYTES) for key in keys)
            took = time.perf_counter() - start
            extra = {"blocks": blocks, "replicas": replicas}
            yield Figure("index.updates", round(blocks / took), "blocks/s", "higher", extra)
            yield memory(bare, empty, blocks, replicas)


def memory(bare: Redis, empty: int, blocks: int, replicas: int) -> Figure:
    grown = int(bare.info("memory")["used_memory"]) - empty
    extra = {"blocks": blocks, "replicas": replicas}
    return Figure("index.bytes_per_block", round(grown / blocks, 1), "bytes", "lower", extra)


def fill(bare: Redis, blocks: int, value: bytes) -> list[list[bytes]]:
    """Enter so many blocks past the index, quickly; samples of their keys."""
    kept: list[bytes] = []
    wanted = min(blocks, KEYS * SAMPLES)
    for first in range(0, blocks, FILL):
        keys = some_keys(min(FILL, blocks - first))
        bare.mset(dict.fromkeys(keys, value))
        kept += random.sample(keys, min(len(keys), -(-wanted * len(keys) // blocks)))
    return [random.sample(kept, KEYS) for _ in range(SAMPLES)]


def looked_up(server: RedisAddress, bare: Redis, blocks: int, rounds: int) -> Iterator[Figure]:
    bare.flushall()
    empty = int(bare.info("memory")["used_memory"])
    body = pack_body(2, NBYTES)
    value = bytes([VERSION]) + b"".join(pack_owner(life) + body for life in (ALICE, BOB))
    samples = fill(bare, blocks, value)
    yield memory(bare, empty, blocks, 2)
    with closing(index_of(server, ALICE)) as alice, closing(index_of(server, BOB)):
        wait_until_both_are_found(alice, samples[0])
        mine, theirs = itertools.cycle(samples), itertools.cycle(samples[SAMPLES // 2 :] + samples[: SAMPLES // 2])
        ratio = paired(
            lambda: bare.mget(next(theirs)), {"match": lambda: alice.match(next(mine))}, rounds=rounds, warmups=20
        )["match"]
        if alice.status()["lookup_errors"]:
            raise RuntimeError(f"lookups failed: {alice.status()}")
    yield Figure(
        f"index.vs_mget.{SIZES.get(blocks, blocks)}",
        round(1 / ratio.ratio, 3),
        "ratio to MGET's time",
        "lower",
        {
            "low": round(1 / ratio.high, 3),
            "high": round(1 / ratio.low, 3),
            "seconds": round(ratio.seconds, 6),
            "baseline_seconds": round(ratio.baseline_seconds, 6),
            "rounds": rounds,
            "keys": KEYS,
            "blocks": blocks,
        },
    )


def figures(server: RedisAddress, sizes: Sequence[int], rounds: int) -> Iterator[Figure]:
    most: Figure | None = None
    ratios: list[float] = []
    with closing(Redis.from_url(server.url, password=server.credentials()[-1])) as bare:
        runs = [told(server, bare, min(sizes[-1], 100_000))]
        for blocks in sizes:
            if psutil.virtual_memory().available < blocks * ROOM:
                print(f"{blocks:,} blocks do not fit into this machine's memory now", file=sys.stderr)
                continue
            runs.append(looked_up(server, bare, blocks, rounds))
        for figure in itertools.chain.from_iterable(runs):
            if figure.figure == "index.bytes_per_block":
                most = max(most or figure, figure, key=lambda one: one.value)
                continue
            if figure.figure.startswith("index.vs_mget"):
                ratios.append(figure.value)
            yield figure
    if most:
        yield most
    yield Figure("index.flatness", round(max(ratios) / min(ratios), 3), "largest over smallest ratio", "lower")


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--sizes", type=int, nargs="+", help="blocks in the index")
    chosen = made.parse_args()
    sizes = sorted(chosen.sizes or ((4_096, 16_384) if chosen.smoke else SIZES))
    folder = Path(tempfile.mkdtemp(prefix="kvt"))
    try:
        server = redis_server.start(folder)
        emit(figures(server.address, sizes, 5 if chosen.smoke else 201), as_json=chosen.json)
    finally:
        redis_server.stop(folder)
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
