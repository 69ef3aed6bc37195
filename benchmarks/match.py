"""What does it cost to ask the host for a long prefix?

* `match.vs_mget`: one `match` of 2,048 keys (131,072 tokens in blocks of 64, hashed before, all in the CPU tier; the
  door is another process), its lease taken and given back, over one MGET of the same keys by redis-py and hiredis on a
  Unix socket. Both interleaved; the median ratio.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
import xxhash
from redis import Redis

from benchmarks._harness import Figure, emit, options, paired
from benchmarks._host import host
from kvtier.block import BlockHeader, address
from kvtier.client.door import DoorSession
from kvtier.keys import Keyspace
from kvtier.spec import KVSpec
from kvtier_services import redis_server

BLOCK_TOKENS = 64
VALUE = bytes(range(23))
"""As long as an index entry of two replicas."""


def addresses_of(tokens: int) -> list[bytes]:
    spec = KVSpec(layers=1, kv_heads=1, head_dim=64, dtype="bfloat16", block_tokens=BLOCK_TOKENS)
    keyspace = Keyspace(spec, "bench", "1", "raw")
    return [address(key) for key in keyspace.chain(np.arange(tokens, dtype=np.uint32))]


def store(session: DoorSession, keys: Sequence[bytes]) -> None:
    """Fill the table: payloads are headers without a body, which is all that a match looks at."""
    for first in range(0, len(keys), 256):
        window = keys[first : first + 256]
        payloads = [
            BlockHeader(
                key=key[:32],
                rank=0,
                position=first + i,
                tokens=BLOCK_TOKENS,
                codec=1,
                plan="raw",
                spec_digest=bytes(32),
                body_nbytes=0,
                checksum=xxhash.xxh3_64_intdigest(b""),
            ).pack()
            for i, key in enumerate(window)
        ]
        with session.writing():
            reserved = session.reserve(keys[: first + 256], [len(payload) for payload in payloads], first)
            memory = session.writable()
            for payload, offset in zip(payloads, reserved.grants["offset"].tolist(), strict=True):
                memory[offset : offset + len(payload)] = np.frombuffer(payload, np.uint8)
            if not all(session.commit(reserved.ticket, range(len(window)))):
                raise RuntimeError("the host did not take all blocks")


def measure(tokens: int, rounds: int) -> Iterator[Figure]:
    keys = addresses_of(tokens)
    folder = Path(tempfile.mkdtemp(prefix="kvt"))
    try:
        server = redis_server.start(folder)
        with (
            host(max(16 << 20, len(keys) * 4096 * 4)) as socket,
            closing(DoorSession(socket)) as session,
            closing(Redis.from_url(server.url, password=server.address.credentials()[-1])) as redis,
        ):
            store(session, keys)
            redis.mset(dict.fromkeys(keys, VALUE))

            def mget() -> None:
                if None in redis.mget(keys):
                    raise RuntimeError("Redis lost a key")

            def match() -> None:
                matched = session.match(keys, 0.0)
                if len(matched.slots) != len(keys):
                    raise RuntimeError("the host lost a block")
                session.release(matched.lease)

            ratio = paired(mget, {"match": match}, rounds=rounds, warmups=5)["match"]
        yield Figure(
            "match.vs_mget",
            round(1 / ratio.ratio, 3),
            "ratio to MGET",
            "lower",
            {
                "low": round(1 / ratio.high, 3),
                "high": round(1 / ratio.low, 3),
                "match_ms": round(1e3 * ratio.seconds, 3),
                "mget_ms": round(1e3 * ratio.baseline_seconds, 3),
                "keys": len(keys),
                "rounds": rounds,
            },
        )
    finally:
        redis_server.stop(folder)
        shutil.rmtree(folder)


if __name__ == "__main__":
    args = options(__doc__)
    emit(measure(8192, 5) if args.smoke else measure(131_072, 101), as_json=args.json)
