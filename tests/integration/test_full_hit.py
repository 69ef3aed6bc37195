"""What a full hit costs, by counts: timings would lie on a busy machine."""

from __future__ import annotations

from collections import Counter

import numpy as np

from kvtier import KVSpec
from kvtier.client.cache import Cache
from kvtier.hierarchy import transfer
from tests.hierarchy_fixture import Host

SPEC = KVSpec(4, 2, 16, "float32")
TOKENS = 2048


class CountingSession:
    """Counts the control calls of a session; reading the mapped arena is none."""

    def __init__(self, session) -> None:
        self._session = session
        self.calls: Counter[str] = Counter()

    def __getattr__(self, name: str):
        found = getattr(self._session, name)
        if name in ("match", "reserve", "commit", "condemn", "move", "prefetch", "inspect", "status"):
            self.calls[name] += 1
        return found


def test_a_full_hit_of_2048_tokens_costs_one_call_and_one_copy(monkeypatch):
    """One match; no index read, no eviction, no tier call, no copy by anybody but the reader."""
    with Host(blocks=200, gpu=None) as host:
        session = CountingSession(host.session())
        with Cache(session) as cache:
            space = cache.keyspace(SPEC, model="m", revision="1")
            kv = np.random.default_rng(1).standard_normal((4, 2, TOKENS, 2, 16), np.float32)
            assert space.save(range(TOKENS), kv).result(30.0).blocks == TOKENS // 64
            host.mover.drain()

            session.calls.clear()
            tier_calls, lookups = Counter(host.nvme.calls), host.index.status()["lookups"]
            generations, bytes_before = host.arena.generations.copy(), host.arena.memory.copy()
            copies: list[str] = []
            for name in ("read", "write"):
                monkeypatch.setattr(transfer, name, lambda *_, name=name: copies.append(name))
            monkeypatch.setattr(host.index, "add", lambda *_: copies.append("index.add"))

            out = np.zeros_like(kv)
            with space.match(range(TOKENS), wait=1.0) as hit:
                assert (hit.tokens, hit.staging, hit.tiers) == (TOKENS, 0, {"cpu": TOKENS})
                assert hit.load(out) == TOKENS
            host.mover.drain()

            assert np.array_equal(out, kv)
            assert session.calls == {"match": 1}
            assert host.index.status()["lookups"] == lookups
            assert host.nvme.calls == tier_calls
            assert copies == []
            assert host.stats.dropped == host.stats.moves == {}
            assert np.array_equal(host.arena.generations, generations), "no slot was granted"
            assert np.array_equal(host.arena.memory, bytes_before), "nobody wrote into the arena"
            assert host.stats.hits == {"cpu": TOKENS // 64}
            assert host.stats.lookups == {"full": 1}
