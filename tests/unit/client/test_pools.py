"""A public pool and a session's own blocks."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch

import kvtier
from kvtier import KVSpec
from kvtier.client.pools import Pooled, Pools
from kvtier.errors import ConfigError, UsageError

SPEC = KVSpec(3, 2, 8, "float32", block_tokens=4)
SYSTEM, ASKED, OTHER = list(range(100, 110)), list(range(13)), list(range(50, 63))
PROMPT = SYSTEM + ASKED
EDGE = 8


@pytest.fixture
def cache():
    with kvtier.open({"cpu": {"capacity": "4MiB"}}) as opened:
        yield opened


@pytest.fixture
def pools(cache):
    return partial(Pools, partial(cache.keyspace, SPEC, model="m", revision="1"))


def kv_of(tokens: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((3, 2, tokens, 2, 8), np.float32)


def empty(tokens: int) -> np.ndarray:
    return np.zeros((3, 2, tokens, 2, 8), np.float32)


def found(tokens: int, public: int, edge: int = EDGE) -> Pooled:
    return Pooled(public, tokens - public, edge, None)


def saved(pool: Pools, ids: list[int], kv, public: int = len(SYSTEM)) -> Pooled:
    loaded = pool.load(ids, empty(len(ids)), public)
    assert all(not done.result(10.0).refused for done in pool.save(ids, kv, loaded))
    return loaded


def test_what_may_be_loaded_does_not_move_the_edge(pools):
    kv = kv_of(len(PROMPT))
    pool = pools("alice's secret")
    saved(pool, PROMPT, kv)
    for most, wanted in ((0, (0, 0)), (6, (4, 4)), (EDGE, (8, 8)), (15, (12, 8)), (len(PROMPT), (20, 8))):
        out = empty(most)
        assert pool.load(PROMPT, out, len(SYSTEM), most=most) == found(*wanted)
        assert np.array_equal(out[:, :, : wanted[0]], kv[:, :, : wanted[0]])


def test_the_system_prompt_is_everybodys_and_the_rest_the_sessions(pools):
    kv = kv_of(len(PROMPT))
    alice, bob = pools("alice's secret"), pools("bob's secret")
    assert saved(alice, PROMPT, kv) == found(0, 0)
    out = empty(len(PROMPT))
    assert alice.load(PROMPT, out, len(SYSTEM)) == found(20, EDGE)
    assert np.array_equal(out[:, :, :20], kv[:, :, :20])
    out = empty(len(PROMPT))
    assert bob.load(PROMPT, out, len(SYSTEM)) == found(EDGE, EDGE)
    assert np.array_equal(out[:, :, :EDGE], kv[:, :, :EDGE])
    assert not out[:, :, EDGE:].any()


def test_nothing_behind_the_edge_is_where_others_look(pools):
    """Neither the public chain nor one without a secret answers for it, whatever is called public then."""
    alice = pools("alice's secret")
    saved(alice, PROMPT, kv_of(len(PROMPT)))
    with alice.public.match(PROMPT) as hit:
        assert hit.tokens == EDGE
    assert pools("bob's secret").load(PROMPT, empty(len(PROMPT)), len(PROMPT)).tokens == EDGE
    with alice.public.match(PROMPT[EDGE:]) as hit:
        assert hit.tokens == 0


def test_own_blocks_follow_only_what_they_were_computed_on(pools):
    alice = pools("alice's secret")
    saved(alice, PROMPT, kv_of(len(PROMPT)))
    elsewhere = OTHER[:10] + ASKED
    saved(alice, elsewhere, kv_of(len(elsewhere), 1), public=10)
    out = empty(len(elsewhere))
    alice.load(elsewhere, out, 10)
    assert np.array_equal(out[:, :, :20], kv_of(len(elsewhere), 1)[:, :, :20])
    assert alice.load(PROMPT, empty(len(PROMPT)), 0) == found(EDGE, EDGE, 0), "those of the pool, and none of her own"


def test_without_the_public_part_nothing_own_is_loaded(pools):
    alice = pools("alice's secret")
    saved(alice, PROMPT, kv_of(len(PROMPT)))
    alice.public.evict(PROMPT[:EDGE], start=4)
    assert alice.load(PROMPT, empty(len(PROMPT)), len(SYSTEM)) == found(4, 4)
    assert saved(alice, PROMPT, kv_of(len(PROMPT))).tokens == 4
    assert alice.load(PROMPT, empty(len(PROMPT)), len(SYSTEM)).tokens == 20


def test_a_conversation_grows(pools):
    alice, longer = pools("alice's secret"), PROMPT + list(range(30, 40))
    saved(alice, PROMPT, kv_of(len(longer))[:, :, : len(PROMPT)])
    again = alice.load(longer, empty(len(longer)), len(SYSTEM))
    assert again == found(20, EDGE)
    assert [done.result(10.0).blocks for done in alice.save(longer, kv_of(len(longer)), again)] == [3]
    out = empty(len(longer))
    assert alice.load(longer, out, len(SYSTEM)) == found(32, EDGE)
    assert np.array_equal(out[:, :, :32], kv_of(len(longer))[:, :, :32])


def test_nothing_to_store_is_no_save(pools):
    alice = pools("alice's secret")
    saved(alice, PROMPT, kv_of(len(PROMPT)))
    loaded = alice.load(PROMPT, empty(len(PROMPT)), len(SYSTEM))
    assert alice.save(PROMPT, kv_of(len(PROMPT)), loaded) == []


def test_pairs_of_tensors(pools):
    kv = torch.from_numpy(kv_of(len(PROMPT)))
    alice = pools("alice's secret")
    saved(alice, PROMPT, [(layer[0], layer[1]) for layer in kv])
    out = [(torch.zeros(len(PROMPT), 2, 8), torch.zeros(len(PROMPT), 2, 8)) for _ in range(3)]
    assert alice.load(PROMPT, out, len(SYSTEM)).tokens == 20
    assert all(
        torch.equal(part[:20], kv[layer, which, :20]) for layer, two in enumerate(out) for which, part in enumerate(two)
    )


def test_latents(cache):
    spec = KVSpec(3, 1, 24, "float32", block_tokens=4, mla=True)
    alice = Pools(partial(cache.keyspace, spec, model="m", revision="1"), "alice's secret")
    kv = np.random.default_rng(0).standard_normal((3, len(PROMPT), 24), np.float32)
    loaded = alice.load(PROMPT, np.zeros_like(kv), len(SYSTEM))
    assert [done.result(10.0).blocks for done in alice.save(PROMPT, kv, loaded)] == [2, 3]
    out = [np.zeros((len(PROMPT), 24), np.float32) for _ in range(3)]
    assert alice.load(PROMPT, out, len(SYSTEM)).tokens == 20
    assert all(np.array_equal(mine[:20], theirs[:20]) for mine, theirs in zip(out, kv, strict=True))


def test_what_cannot_be_is_said(pools):
    with pytest.raises(ConfigError, match="session is empty; give a secret"):
        pools("")
    with pytest.raises(ConfigError, match="session is bytes; give text"):
        pools(b"secret")
    with pytest.raises(UsageError, match="public is 24; pass how many of the 23 tokens may be shared"):
        pools("s").load(PROMPT, empty(len(PROMPT)), 24)
    with pytest.raises(UsageError, match=r"public is 1\.5"):
        pools("s").load(PROMPT, empty(len(PROMPT)), 1.5)


def test_what_the_public_pool_has_beyond_the_edge_is_loaded_too(pools):
    """Whoever forgets to say what is public computes nothing anew, and shares nothing."""
    alice, longer = pools("alice's secret"), PROMPT + list(range(30, 40))
    kv = kv_of(len(longer))
    saved(alice, PROMPT, kv[:, :, : len(PROMPT)])
    forgot = alice.load(longer, empty(len(longer)), 0)
    assert (forgot.tokens, forgot.public, forgot.own) == (EDGE, EDGE, 0)
    assert [done.result(10.0).blocks for done in alice.save(longer, kv, forgot)] == [8]
    out = empty(len(longer))
    again = alice.load(longer, out, 0)
    assert (again.tokens, again.own) == (32, 32)
    assert np.array_equal(out[:, :, :32], kv[:, :, :32])
    with alice.public.match(longer) as hit:
        assert hit.tokens == EDGE
    # Somebody made more of it public than the session's own blocks reach.
    bob = pools("bob's secret")
    saved(bob, longer[:20] + [7] * 8, kv[:, :, :28], public=28)
    assert alice.load(longer[:20], empty(20), 8).tokens == 20
    assert alice.load(longer[:20], empty(20), 8).own == 0
