"""A host of a fleet as its CPU tier's process puts it together, without Ray; also as a process of its own.

    python -m tests.fleet_host NAME REDIS_URL PASSWORD_FILE BLOCKS NBYTES

It prints its door, and does what it is told line by line: `save FIRST COUNT`, `drain SECONDS`, `status`.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict

import msgspec
import numpy as np

from kvtier.block import slot_nbytes
from kvtier.client.local import LocalSession
from kvtier.config import Config, IndexConfig, RayConfig
from kvtier.hierarchy.cache import Hierarchy, Limits
from kvtier.memory.arena import Arena
from kvtier.testing.payloads import key_of, payload_of
from kvtier.tiers.base import TierNumber
from kvtier_services.actors.index import open_index
from kvtier_services.actors.peers import open_peers
from kvtier_services.settings import Secret, Settings

SECRET = Secret("a secret of the test's fleet")


class FleetHost:
    """One host; the process's `KVTIER_HOST` is its name."""

    def __init__(self, redis_url: str, password_file: str, blocks: int, nbytes: int) -> None:
        config = Config(ray=RayConfig(host="127.0.0.1"), index=IndexConfig(redis_url, password_file))
        settings = Settings(config, redis_url, fleet_secret=SECRET)
        self.nbytes = nbytes
        self.arena = Arena.private(blocks * slot_nbytes(nbytes))
        peers = open_peers(self.arena, settings, "127.0.0.1")
        assert peers is not None
        self.peers = peers
        self.hierarchy = Hierarchy(
            self.arena, {TierNumber.PEER: peers.tier}, open_index(settings, peers.door), limits=Limits(1 << 40, 1 << 40)
        )
        peers.serve(self.hierarchy.lending)
        self.session = LocalSession(self.hierarchy)

    def save(self, seeds: Sequence[int]) -> int:
        """Store a chain; how many blocks of it are there, and told to the index."""
        reserved = self.session.reserve([key_of(seed) for seed in seeds], [self.nbytes] * len(seeds), 0)
        granted = np.flatnonzero(reserved.grants["state"] == 0).tolist()
        for i in granted:
            offset = int(reserved.grants["offset"][i])
            self.arena.memory[offset : offset + self.nbytes] = np.frombuffer(
                payload_of(seeds[i], self.nbytes), np.uint8
            )
        stored = sum(self.session.commit(reserved.ticket, granted))
        self.hierarchy.state.index.flush(5.0)
        return stored

    def load(self, seeds: Sequence[int], wait: float) -> int:
        """How many blocks of a chain are hits; their bytes are compared."""
        matched = self.session.match([key_of(seed) for seed in seeds], wait)
        for seed, slot in zip(seeds, matched.slots, strict=False):
            offset, nbytes = int(slot["offset"]), int(slot["nbytes"])
            assert self.arena.memory[offset : offset + nbytes].tobytes() == payload_of(seed, self.nbytes), "wrong bytes"
        self.session.release(matched.lease)
        return len(matched.slots)

    def spoil(self, seed: int) -> None:
        """Change one byte of a block in memory."""
        table = self.hierarchy.state.table
        self.arena.memory[int(table.offset[table.rows[key_of(seed)]]) + self.nbytes - 1] ^= 1

    def status(self) -> dict[str, object]:
        """Of hierarchy and peers."""
        return self.hierarchy.status() | {"lending": self.peers.status()}

    def close(self) -> None:
        """Stop."""
        with ExitStack() as last_first:
            last_first.callback(self.hierarchy.close)
            last_first.callback(self.peers.close)
            last_first.callback(self.session.close)


def _say(what: object) -> None:
    sys.stdout.write(f"{what}\n")
    sys.stdout.flush()


def main(name: str, redis_url: str, password_file: str, blocks: str, nbytes: str) -> None:
    """Be a host until the standard input ends."""
    os.environ["KVTIER_HOST"] = name
    host = FleetHost(redis_url, password_file, int(blocks), int(nbytes))
    _say(host.peers.door)
    for line in sys.stdin:
        command, *numbers = line.split()
        if command == "save":
            first, count = map(int, numbers)
            _say(host.save(range(first, first + count)))
        elif command == "drain":
            _say(json.dumps(asdict(host.hierarchy.hand_over(float(numbers[0])))))
        elif command == "status":
            _say(msgspec.json.encode(host.status()).decode())
    host.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
