"""An engine that works through a script on a `TruthHost`, and what is known of it without asking any counter."""

from __future__ import annotations

import time
from collections import Counter

import msgspec
import zmq

from kvtier.client.door import DoorSession
from kvtier.hierarchy.answers import GrantState
from kvtier.testing.session import chain, eventually, fill, reserve
from kvtier.tiers.base import TierNumber
from tests.truth.host import CPU, TruthHost

TOKENS, WAIT = 64, 5.0
SAVED, LOADED = 0.02, 0.003
"""Seconds that the engine says that a save, and a load, took."""


class Script:
    """What it was answered, and what it did.

    Attributes:
        hits, tokens, misses, lookups, refused: by tier, reason and result, as answers said.
        asked: keys of all blocks asked for.
        stored: of all blocks that came into this host.
        requested: of those that went for good, and not to make room.
        left: blocks that left a tier, and not to make room, by tier.
        dropped: blocks that went for good on request or because of what they were, by reason.
        short: blocks that are on NVMe and did not come up, which happens where little can make room.
        again: blocks that were missed although they had been here, and went to make room.
        matches, loads, saves, prefilled, seconds: how many there were, and how long all matches took.
    """

    def __init__(self, host: TruthHost) -> None:
        self.host = host
        self.session = DoorSession(host.settings.socket, call_timeout=10.0)
        self.hits: Counter[str] = Counter()
        self.tokens: Counter[str] = Counter()
        self.misses: Counter[str] = Counter()
        self.lookups: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.left: Counter[str] = Counter()
        self.dropped: Counter[str] = Counter()
        self.asked: set[bytes] = set()
        self.stored: set[bytes] = set()
        self.requested: set[bytes] = set()
        self.again: set[bytes] = set()
        self.matches = self.loads = self.saves = self.short = 0
        self.prefilled = self.seconds = 0.0

    def save(self, first: int, count: int) -> None:
        """Store a chain of new blocks, as far as there is room."""
        with self.session.writing():
            reserved = reserve(self.session, first, count)
            written = fill(self.session, reserved, first)
            assert all(self.session.commit(reserved.ticket, written, SAVED))
        self.saves += 1
        self.stored.update(chain(first, len(written)))
        self.refused[reserved.reason] += count - len(written)
        self.settle()

    def refuse(self, first: int, nbytes: int, why: str) -> None:
        """Ask for room for one block that there is none for."""
        reserved = self.session.reserve(chain(first, 1), [nbytes], 0)
        assert reserved.reason == why
        self.refused[why] += int((reserved.grants["state"] == GrantState.REFUSED).sum())

    def match(self, first: int, count: int, *, prefill: float = 0.0, expected: str | None = None) -> None:
        """Ask for a chain, and wait for what of it is there; `expected` are the first letters of the blocks' tiers."""
        keys = chain(first, count)
        if expected is None:
            expected = "".join(self._letter(block["tiers"]) if block else " " for block in self.session.inspect(keys))
            expected = expected.partition(" ")[0]
        began = time.perf_counter()
        matched = self.session.match(keys, WAIT, prefill=prefill)
        self.seconds += time.perf_counter() - began
        tiers = [TierNumber(tier).name.lower() for tier in matched.tiers.tolist()]
        got = "".join(tier[0] for tier in tiers)
        assert expected.startswith(got), f"{first}: {got}, not {expected}"
        self.short += len(expected) - len(got)
        missed = keys[len(expected) :]
        self.matches += 1
        self.asked.update(keys)
        self.hits.update(tiers)
        self.tokens.update({tier: TOKENS * n for tier, n in Counter(tiers).items()})
        self.prefilled += TOKENS * len(tiers) / prefill if prefill else 0.0
        self.misses["absent"] += len(missed)
        self.lookups["full" if len(tiers) == count else "partial" if tiers else "miss"] += 1
        here = self.session.inspect(missed)
        gone = {key for key, block in zip(missed, here, strict=True) if block is None}
        self.again |= gone & (self.stored - self.requested)
        self.loads += bool(tiers)
        self.session.release(matched.lease, LOADED if tiers else 0.0)
        self.settle()

    def down(self, first: int, count: int) -> None:
        """Move a chain to NVMe, out of memory."""
        for block in self.session.inspect(chain(first, count)):
            self.left.update(tier for tier in block["tiers"] if tier != "nvme")
        assert self.session.move(chain(first, count), TierNumber.NVME, WAIT) == count
        self.settle()

    def went(self, first: int, count: int, why: str) -> None:
        """These are about to be dropped for good, wherever they are."""
        for block in self.session.inspect(chain(first, count)):
            self.left.update(block["tiers"])
        self.requested.update(chain(first, count))
        self.dropped[why] += count

    def settle(self) -> None:
        """Wait until nothing moves any more, and the CPU tier is below its watermark."""
        hierarchy = self.host.hierarchy

        def quiet() -> bool:
            ledger = hierarchy.state.ledger
            relieving = hierarchy.mover.demotion.short or hierarchy.mover.demotion._relieving.locked()
            busy = any(hierarchy.mover.queues().values()) or ledger.leases or relieving
            return not busy and hierarchy.state.cpu.pool.used <= 0.9 * CPU

        assert eventually(lambda: not hierarchy.state.ledger.leases)
        hierarchy.mover.drain()
        assert eventually(quiet)

    def present(self) -> dict[bytes, dict]:
        """What is known of each block that was ever stored and is here still."""
        keys = sorted(self.stored)
        return {key: block for key, block in zip(keys, self.session.inspect(keys), strict=True) if block is not None}

    def of(self, tier: str) -> int:
        """Blocks in a tier."""
        return sum(tier in block["tiers"] for block in self.present().values())

    def _letter(self, tiers: list[str]) -> str:
        return "c" if "cpu" in tiers else "g" if "gpu" in tiers else "n"


class Follower:
    """A router that counts what it is told."""

    def __init__(self, endpoint: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.subscribe("")
        self._socket.connect(endpoint)
        self.batches = self.blocks = 0

    def hear(self) -> None:
        """Take what there is, until nothing has come for a while."""
        while self._socket.poll(500):
            _, _, payload = self._socket.recv_multipart()
            self.batches += 1
            for event in msgspec.msgpack.decode(payload)[1]:
                self.blocks += len(event["block_hashes"])

    def close(self) -> None:
        self._socket.close(0)
        self._context.term()
