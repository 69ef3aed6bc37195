"""What does the fleet's index cost?

* `index.vs_mget.N`: a lookup of 2,048 keys among N blocks through `RedisIndex.match`, over a bare MGET of the same keys
  by redis-py and hiredis, both on a Unix socket.
* `index.updates`: blocks told a second, in batches, by one host.
* `index.bytes_per_block`: Redis memory a block, hash table and all, with one and with two replicas.
"""

from __future__ import annotations

import hashlib
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from redis import Redis

from benchmarks._harness import Figure, emit, options, paired
from kvtier.block import address
from kvtier.index.base import Life
from kvtier.index.address import RedisAddress
from kvtier.index.connect import parts
from kvtier.index.options import RedisIndexOptions
from kvtier.index.redis import RedisIndex
from kvtier_services import redis_server

KEYS = 2048
NBYTES = 1 << 20
PATIENT = RedisIndexOptions(lookup_timeout=5.0, publish_rate=1e9, max_pending=1 << 20)


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


def figures(server: RedisAddress, blocks: int, rounds: int) -> Iterator[Figure]:
    addresses = [address(hashlib.sha256(number.to_bytes(8, "big")).digest()) for number in range(blocks)]
    asked = addresses[:: max(1, blocks // KEYS)][:KEYS]
    with (
        closing(Redis.from_url(server.url, password=server.credentials()[-1])) as bare,
        closing(index_of(server, Life(1, 1, "alice"))) as alice,
        closing(index_of(server, Life(2, 1, "bob"))) as bob,
    ):
        empty = int(bare.info("memory")["used_memory"])
        for replicas, index in ((1, alice), (2, bob)):
            start = time.perf_counter()
            index.publish((key, 2, NBYTES) for key in addresses)
            took = time.perf_counter() - start
            extra = {"blocks": blocks, "replicas": replicas}
            yield Figure("index.updates", round(blocks / took), "blocks/s", "higher", extra)
            grown = int(bare.info("memory")["used_memory"]) - empty
            yield Figure("index.bytes_per_block", round(grown / blocks, 1), "bytes", "lower", extra)
        wait_until_both_are_found(alice, asked)
        ratio = paired(lambda: bare.mget(asked), {"match": lambda: alice.match(asked)}, rounds=rounds)["match"]
        yield Figure(
            f"index.vs_mget.{blocks}",
            round(1 / ratio.ratio, 3),
            "ratio to MGET's time",
            "lower",
            {
                "low": round(1 / ratio.high, 3),
                "high": round(1 / ratio.low, 3),
                "seconds": round(ratio.seconds, 6),
                "baseline_seconds": round(ratio.baseline_seconds, 6),
                "rounds": rounds,
                "keys": len(asked),
            },
        )


def main() -> None:
    chosen = options(__doc__)
    blocks, rounds = (4_096, 5) if chosen.smoke else (100_000, 201)
    folder = Path(tempfile.mkdtemp(prefix="kvt"))
    try:
        server = redis_server.start(folder)
        emit(figures(server.address, blocks, rounds), as_json=chosen.json)
    finally:
        redis_server.stop(folder)
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
