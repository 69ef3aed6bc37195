"""Match, load and save as an engine uses them, all in this process."""

from __future__ import annotations

import gc
import sys
import threading
import time
from concurrent.futures import Future

import numpy as np
import pytest

import kvtier
from kvtier import KVSpec
from kvtier.block import PAGE, slot_nbytes
from kvtier.client import save as saving
from kvtier.client.cache import Cache
from kvtier.client.save import PENDING, Saved
from kvtier.client.scope import Chain
from kvtier.errors import (
    BadTokens,
    ClosedError,
    ConfigError,
    DeadlineExceeded,
    KVMismatch,
    SessionUnavailable,
    UsageError,
)
from kvtier.hierarchy.cache import Limits
from kvtier.tiers.base import TierNumber
from tests.hierarchy_fixture import Host

NVME = TierNumber.NVME
SPEC = KVSpec(3, 2, 8, "float32", block_tokens=4)
MLA = KVSpec(3, 1, 24, "bfloat16", block_tokens=4, mla=True)


@pytest.fixture
def cache():
    with kvtier.open({"cpu": {"capacity": "4MiB"}}) as opened:
        yield opened


@pytest.fixture
def space(cache):
    return cache.keyspace(SPEC, model="m", revision="1")


def kv_of(tokens: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((3, 2, tokens, 2, 8), np.float32)


def stored(space, tokens, kv=None) -> np.ndarray:
    kv = kv_of(len(tokens)) if kv is None else kv
    assert space.save(tokens, kv).result(10.0).refused == ""
    return kv


def loaded(space, tokens, **options) -> tuple[int, np.ndarray]:
    out = np.zeros((3, 2, len(tokens), 2, 8), np.float32)
    with space.match(tokens) as hit:
        return hit.load(out, **options), out


def offsets(hit) -> list[int]:
    return hit._slots["offset"].tolist()


class TestLoad:
    def test_what_was_saved_comes_back(self, space):
        kv = stored(space, range(10))
        count, out = loaded(space, range(10))
        assert count == 8, "whole blocks only"
        assert np.array_equal(out[:, :, :8], kv[:, :, :8])
        assert not out[:, :, 8:].any()

    def test_nothing_stored_nothing_loaded(self, space):
        for tokens in ([], [1, 2], range(9)):
            with space.match(tokens) as hit:
                assert (hit.tokens, hit.staging, hit.verified, hit.tiers) == (0, 0, 0, {})
                assert hit.load(kv_of(9)) == 0

    def test_a_kv_with_less_room_gets_the_blocks_that_fit(self, space):
        kv = stored(space, range(16))
        with space.match(range(16)) as hit:
            out = np.zeros((3, 2, 11, 2, 8), np.float32)
            assert hit.load(out) == 8
            assert hit.verified == 8
            assert np.array_equal(out[:, :, :8], kv[:, :, :8])
            assert not out[:, :, 8:].any()
            assert hit.load(np.zeros((3, 2, 3, 2, 8), np.float32)) == 0
            assert hit.verified == 0

    def test_layers_alone_are_not_the_whole(self, space):
        """What an engine loads layer by layer is verified when every layer was."""
        kv = stored(space, range(8))
        out = np.zeros_like(kv)
        with space.match(range(8)) as hit:
            assert hit.load(out, layers=range(1)) == 8
            assert hit.verified == 0
            assert np.array_equal(out[0], kv[0])
            assert not out[1:].any()
            assert hit.load(out, layers=range(0)) == 8
            assert hit.verified == 0
            assert hit.load(out, layers=range(1, 3)) == 8
            assert hit.verified == 8
            assert np.array_equal(out, kv)
            hit.load(np.zeros((3, 2, 4, 2, 8), np.float32), layers=range(1))
            assert hit.verified == 4

    def test_layers_that_are_none_are_the_callers_bug(self, space):
        stored(space, range(8))
        with space.match(range(8)) as hit, pytest.raises(UsageError):
            hit.load(kv_of(8), layers=range(2, 9))

    def test_what_the_engine_has_is_not_loaded(self, space):
        """Its KV begins where what it has ends; blocks before that are neither read nor checked."""
        kv = stored(space, range(18))
        with space.match(range(18)) as hit:
            space.session.writable()[offsets(hit)[1]] ^= 1
            out = np.zeros((3, 2, 9, 2, 8), np.float32)
            assert hit.load(out, origin=8, verify=True) == 16
            assert (hit.verified, hit.tiers) == (16, {"cpu": 8})
            assert np.array_equal(out[:, :, :8], kv[:, :, 8:16])
            assert not out[:, :, 8:].any()
            assert hit.load(out[:, :, :7], origin=8) == 12, "only whole blocks that fit"
            assert hit.load(out, origin=4) == 4, "the first one there is bad: nothing beyond what the engine has"
            assert hit.verified == 4

    def test_layers_from_an_origin_on(self, space):
        kv = stored(space, range(16))
        out = np.zeros((3, 2, 8, 2, 8), np.float32)
        with space.match(range(16)) as hit:
            assert hit.load(out, layers=range(1, 3), origin=8) == 16
            assert hit.verified == 0
            assert hit.load(out[:, :, :4], layers=range(1), origin=8) == 12
            assert hit.verified == 12
            assert hit.load(out, layers=range(1), origin=8) == 16
            assert hit.verified == 16
        assert np.array_equal(out, kv[:, :, 8:])

    def test_an_origin_behind_the_hit_loads_nothing(self, space):
        stored(space, range(8))
        with space.match(range(20)) as hit:
            for origin in (8, 12, 20):
                out = np.zeros((3, 2, 8, 2, 8), np.float32)
                assert hit.load(out, origin=origin) == origin
                assert not out.any()

    @pytest.mark.parametrize("origin", [3, -4, 12, 1.0, "4", None])
    def test_an_origin_where_no_block_of_the_sequence_begins_is_the_callers_bug(self, space, origin):
        stored(space, range(8))
        with space.match(range(10)) as hit:
            with pytest.raises(UsageError, match="origin"):
                hit.load(kv_of(8), origin=origin)
            with pytest.raises(UsageError, match="origin"):
                space.save(range(10), kv_of(10), origin=origin, start=8, vouched=True)
            assert hit.load(kv_of(8), origin=np.int64(4)) == 8

    def test_a_load_that_fails_claims_no_more_than_the_origin(self, space, cache):
        stored(space, range(16))
        with space.match(range(16)) as hit:
            hit.load(kv_of(16))
            arena = cache.session._hierarchy.arena
            arena.generations[offsets(hit)[3] // PAGE] += 1
            assert hit.load(kv_of(8), origin=8) == hit.verified == 12
            arena.generations[offsets(hit)[2] // PAGE] += 1
            assert hit.load(kv_of(8), origin=8) == hit.verified == 8
            cache.session.epoch += 1
            assert hit.load(kv_of(12), origin=4) == hit.verified == 4
            with pytest.raises(KVMismatch):
                hit.load(np.zeros((3, 2, 8, 2, 9), np.float32), origin=12)
            assert hit.verified <= 4

    def test_how_much_of_a_lease_was_read_is_said(self, space, monkeypatch):
        """Else the host takes what was left out for speed."""
        stored(space, range(16))
        said, release = [], space.session.release
        monkeypatch.setattr(space.session, "release", lambda *args: (said.append(args[2]), release(*args)))
        for loads in ([{}], [{"origin": 8}], [{"layers": range(1)}, {"layers": range(1, 3), "origin": 8}], [{}, {}]):
            with space.match(range(16)) as hit:
                for options in loads:
                    hit.load(kv_of(16), **options)
        assert said == pytest.approx([1, 1 / 2, 2 / 3, 2])

    def test_a_lookup_of_a_worker_is_its_schedulers(self, space, cache):
        kv = stored(space, range(8))
        with space.match(range(8)), space.match(range(8), again=True) as hit:
            assert hit.load(out := np.zeros_like(kv)) == 8
        assert np.array_equal(out, kv)
        assert cache.status()["lookups"] == {"full": 1}

    def test_several_threads_decode_one_load(self):
        with kvtier.open({"cpu": {"capacity": "4MiB"}}, threads=3) as cache:
            space = cache.keyspace(SPEC, model="m", revision="1")
            kv = stored(space, range(40))
            for tokens in (range(40), range(8), range(4)):
                count, out = loaded(space, tokens)
                assert count == len(tokens)
                assert np.array_equal(out, kv[:, :, : len(tokens)])

    @pytest.mark.parametrize("plan", ["raw", "int8"])
    def test_latent_attention(self, cache, plan):
        space = cache.keyspace(MLA, model="m", revision="1", plan=plan)
        kv = np.full((3, 9, 24), 0x3F80, np.uint16)  # 1.0
        assert space.save(range(9), kv).result(10.0) == Saved(2, 0)
        with space.match(range(9)) as hit:
            layers = [np.zeros((9, 24), np.uint16) for _ in range(3)]
            assert hit.load(layers) == 8
        assert all((layer[:8] == 0x3F80).all() and not layer[8:].any() for layer in layers)

    def test_another_shape_or_read_only_is_the_callers_bug(self, space):
        stored(space, range(8))
        with space.match(range(8)) as hit:
            for wrong in (np.zeros((3, 2, 8, 2, 9), np.float32), np.zeros((2, 2, 8, 2, 8), np.float32)):
                with pytest.raises(KVMismatch):
                    hit.load(wrong)
            out = kv_of(8)
            out.flags.writeable = False
            with pytest.raises(KVMismatch):
                hit.load(out)
            assert hit.verified == 0

    def test_a_closed_hit_cannot_be_loaded(self, space):
        hit = space.match(range(8))
        hit.close()
        hit.close()
        with pytest.raises(ClosedError):
            hit.load(kv_of(8))

    def test_blocks_stay_while_the_hit_is_open(self, space):
        stored(space, range(8))
        with space.match(range(8)):
            assert [block["leased"] for block in space.inspect(range(8))] == [True, True]
        assert [block["leased"] for block in space.inspect(range(8))] == [False, False]

    def test_where_it_was(self, space):
        stored(space, range(8))
        with space.match(range(8)) as hit:
            assert hit.tiers == {"cpu": 8}


class TestProof:
    """Nothing is returned as verified that may not be what was saved."""

    def test_a_slot_that_was_granted_again_meanwhile_is_not_ours(self, space, cache):
        stored(space, range(16))
        with space.match(range(16)) as hit:
            arena = cache.session._hierarchy.arena
            arena.generations[offsets(hit)[2] // PAGE] += 1
            assert hit.load(kv_of(16)) == 8
            assert hit.verified == 8
        assert cache.counters == {}, "nobody's fault"
        assert all(space.inspect(range(16)))

    def test_nor_is_it_condemned_for_what_another_wrote_there(self, space, cache):
        stored(space, range(16))
        with space.match(range(16)) as hit:
            offset = offsets(hit)[2]
            cache.session._hierarchy.arena.renew(offset, 1)
            cache.session.writable()[offset : offset + 100] = 0
            assert hit.load(kv_of(16)) == 8
        assert cache.counters == {}
        assert all(space.inspect(range(16)))

    def test_a_slot_that_is_granted_again_during_the_copy_is_not_ours(self, space, cache):
        stored(space, range(16))
        arena = cache.session._hierarchy.arena
        with space.match(range(16)) as hit:
            decode = hit._decode

            def decode_and_lose(*args):
                decode(*args)
                arena.generations[offsets(hit)[1] // PAGE] += 1

            hit._decode = decode_and_lose
            assert hit.load(kv_of(16)) == 4

    @pytest.mark.parametrize("at", [0, 9, 12, 24, 40, 71, 104, 112])
    def test_a_wrong_header_is_condemned(self, space, cache, at):
        stored(space, range(16))
        with space.match(range(16)) as hit:
            cache.session.writable()[offsets(hit)[1] + at] ^= 1
            assert hit.load(kv_of(16)) == 4
        assert cache.counters == {"bad_header": 1}
        assert [block is not None for block in space.inspect(range(16))] == [True, False, True, True]

    def test_a_wrong_body_is_condemned_when_it_is_verified(self, space, cache):
        kv = stored(space, range(16))
        with space.match(range(16)) as hit:
            slot = hit._slots[2]
            cache.session.writable()[int(slot["offset"]) + int(slot["nbytes"]) - 1] ^= 128
            assert hit.load(kv_of(16), verify=True) == 8
        assert cache.counters == {"bad_checksum": 1}
        assert cache.status()["faults"] == {"bad_checksum": 1}
        assert space.save(range(16), kv).result(10.0) == Saved(1, 3)
        assert loaded(space, range(16), verify=True)[0] == 16

    def test_a_host_that_restarted_holds_nothing_of_ours(self, space, cache, monkeypatch):
        stored(space, range(8))
        released = []
        monkeypatch.setattr(cache.session, "release", lambda *args: released.append(args))
        with space.match(range(8)) as hit:
            cache.session.epoch += 1
            assert hit.load(kv_of(8)) == 0
        assert released == []

    def test_a_host_that_is_gone_during_a_load_is_a_miss(self, space, cache, monkeypatch):
        stored(space, range(8))

        def gone(*_):
            raise SessionUnavailable("gone")

        with space.match(range(8)) as hit:
            monkeypatch.setattr(cache.session, "epoch", cache.session.epoch + 1)
            assert hit.load(kv_of(8)) == 0
            monkeypatch.undo()
            assert hit.load(kv_of(8)) == 8
        for call in ("readable", "generations"):
            monkeypatch.setattr(cache.session, call, gone)
            with space.match(range(8)) as hit:
                assert hit.load(kv_of(8)) == 0
            monkeypatch.undo()
        assert cache.counters == {"match_SessionUnavailable": 2}


class TestSave:
    def test_only_what_is_missing_is_stored(self, space):
        kv = stored(space, range(8))
        more = np.concatenate([kv, kv_of(8, 1)], axis=2)
        assert space.save(range(16), more).result(10.0) == Saved(2, 2)
        assert np.array_equal(loaded(space, range(16))[1], more)

    def test_the_rest_behind_what_was_loaded(self, space):
        kv = kv_of(16)
        stored(space, range(8), kv[:, :, :8])
        with space.match(range(16)) as hit:
            count = hit.load(np.zeros_like(kv))
        assert space.save(range(16), kv, start=count, after=hit).result(10.0) == Saved(2, 0)

    def test_what_is_not_verified_is_not_built_upon(self, space, cache):
        kv = stored(space, range(8))
        long = np.concatenate([kv, kv], axis=2)
        unverified = Saved(0, 0, "unverified")
        with space.match(range(16)) as hit:
            assert space.save(range(16), long, start=8, after=hit).result() == unverified
            hit.load(long.copy(), layers=range(2))
            assert space.save(range(16), long, start=8, after=hit).result() == unverified
            hit.load(long.copy())
            assert space.save(range(16), long, start=4, after=hit).result() == unverified
            assert space.save(range(16), long, after=hit).result() == unverified
        assert space.save(range(16), long, start=8).result() == unverified
        assert cache.counters == {"save_unverified": 5}

    def test_a_hit_vouches_for_its_own_sequence_only(self, space):
        kv = kv_of(16)
        stored(space, range(8), kv[:, :, :8])
        with space.match(range(16)) as hit:
            hit.load(kv.copy())
        others = [*range(7), 99, *range(8)]
        assert space.save(others, kv, start=8, after=hit).result() == Saved(0, 0, "unverified")
        same_prefix = [*range(8), *range(50, 58)]
        assert space.save(same_prefix, kv, start=8, after=hit).result(10.0) == Saved(2, 0)

    def test_too_few_tokens_of_kv_are_the_callers_bug(self, space):
        with pytest.raises(KVMismatch, match="7 tokens for 8"):
            space.save(range(8), kv_of(7))
        assert space.save(range(8), kv_of(9)).result(10.0) == Saved(2, 0)

    def test_what_an_engine_vouches_for_needs_no_hit(self, space):
        kv = stored(space, range(8))
        more = np.concatenate([kv, kv_of(12, 1)], axis=2)
        assert space.save(range(20), more, start=8, vouched=True).result(10.0) == Saved(3, 0)
        assert np.array_equal(loaded(space, range(20))[1], more)
        assert space.save(range(20), more, start=20, vouched=True).result(10.0) == Saved(0, 0)

    def test_kv_that_begins_later(self, space):
        kv = kv_of(20)
        stored(space, range(8), kv[:, :, :8])
        assert space.save(range(20), kv[:, :, 4:], origin=4, start=8, vouched=True).result(10.0) == Saved(3, 0)
        assert np.array_equal(loaded(space, range(20))[1], kv)
        with space.match([*range(8), *range(50, 58)]) as hit:
            assert hit.load(np.zeros((3, 2, 4, 2, 8), np.float32), origin=4) == 8
            saved = space.save([*range(8), *range(50, 58)], kv[:, :, :8], origin=8, start=8, after=hit)
        assert saved.result(10.0) == Saved(2, 0)

    def test_odd_starts_are_the_callers_bug(self, space):
        for start, origin in ((3, 0), (-4, 0), (24, 0), (4.0, 0), (4, 8)):
            with pytest.raises(UsageError, match="start"):
                space.save(range(20), kv_of(20), start=start, origin=origin, vouched=True)
        with pytest.raises(UsageError, match="start"):
            space.save(range(20), kv_of(20), origin=4)
        with pytest.raises(KVMismatch, match="11 tokens for 12"):
            space.save(range(20), kv_of(11), origin=8, start=8, vouched=True)

    def test_fewer_tokens_than_a_block_are_nothing(self, space):
        assert space.save(range(3), kv_of(3)).result(10.0) == Saved(0, 0)

    def test_a_value_that_the_plan_cannot_say_ends_the_save(self, cache):
        space = cache.keyspace(SPEC, model="m", revision="1", plan="int8")
        kv = kv_of(16)
        kv[1, 0, 9, 1, 3] = np.nan
        assert space.save(range(16), kv).result(10.0) == Saved(2, 0, "bad_values")
        assert cache.counters == {"save_bad_values": 1}
        assert loaded(space, range(16))[0] == 8
        assert cache.status()["reservations"] == 0

    def test_a_chain_of_many_windows(self, space, monkeypatch):
        monkeypatch.setattr(saving, "WINDOW_BLOCKS", 3)
        kv = stored(space, range(44))
        assert np.array_equal(loaded(space, range(44))[1], kv)

    def test_a_quota_smaller_than_a_window_is_no_end(self):
        nbytes = slot_nbytes(192 + SPEC.block_nbytes)
        limits = Limits(session_leased=1 << 30, session_reserved=3 * nbytes)
        with Host(limits=limits) as host, Cache(host.session()) as cache:
            space = cache.keyspace(SPEC, model="m", revision="1")
            assert space.save(range(40), kv_of(40)).result(10.0) == Saved(10, 0)
            assert cache.counters == {}

    def test_a_quota_smaller_than_a_block_lets_one_block_through_at_a_time(self):
        limits = Limits(session_leased=1 << 30, session_reserved=100)
        with Host(limits=limits) as host, Cache(host.session()) as cache:
            space = cache.keyspace(SPEC, model="m", revision="1")
            assert space.save(range(8), kv_of(8)).result(10.0) == Saved(2, 0, "")

    def test_it_stops_at_the_first_refusal(self, monkeypatch):
        """What follows could not be reached."""
        monkeypatch.setattr(saving, "WINDOW_BLOCKS", 2)
        with Host(blocks=16, nvme=None) as host, Cache(host.session()) as cache:
            space = cache.keyspace(SPEC, model="m", revision="1")
            tokens = list(range(4000))
            kv = np.zeros((3, 2, 4000, 2, 8), np.float32)
            saved = space.save(tokens, kv).result(10.0)
            assert saved.refused == "pressure"
            there = [block is not None for block in space.inspect(tokens)]
            assert there == [True] * saved.blocks + [False] * (1000 - saved.blocks)
            host.check()

    def test_a_host_that_is_gone_is_a_refusal(self, space, cache, monkeypatch):
        def gone(*_):
            raise SessionUnavailable("gone")

        monkeypatch.setattr(cache.session, "reserve", gone)
        assert space.save(range(8), kv_of(8)).result(10.0) == Saved(0, 0, "SessionUnavailable")
        monkeypatch.undo()
        monkeypatch.setattr(cache.session, "commit", gone)
        assert space.save(range(8), kv_of(8)).result(10.0) == Saved(0, 0, "SessionUnavailable")

    def test_what_the_host_does_not_make_visible_is_a_refusal(self, space, cache, monkeypatch):
        monkeypatch.setattr(cache.session, "commit", lambda ticket, written, *_: [False] * len(written))
        assert space.save(range(8), kv_of(8)).result(10.0) == Saved(0, 0, "commit")

    def test_too_many_waiting_are_refused_at_once(self, space, cache, monkeypatch):
        go_on, reserve = threading.Event(), cache.session.reserve

        def slow(*args):
            go_on.wait(10.0)
            return reserve(*args)

        monkeypatch.setattr(cache.session, "reserve", slow)
        futures: list[Future[Saved]] = [space.save(range(8), kv_of(8)) for _ in range(PENDING + 2)]
        assert [future.result(0).refused for future in futures[PENDING:]] == ["client_busy"] * 2
        go_on.set()
        assert [future.result(10.0).blocks for future in futures[:PENDING]] == [2] + [0] * (PENDING - 1)
        assert space.save(range(8), kv_of(8)).result(10.0) == Saved(0, 2)

    def test_closing_finishes_what_is_queued(self, space, cache):
        futures = [space.save(range(first, first + 8), kv_of(8)) for first in range(0, 80, 8)]
        cache.close()
        cache.close()
        assert all(future.result(0).blocks == 2 for future in futures)
        with pytest.raises(ClosedError):
            space.save(range(8), kv_of(8))


class TestKeyspaces:
    def test_plans_models_and_ranks_do_not_answer_for_each_other(self, cache):
        stored(cache.keyspace(SPEC, model="m", revision="1"), range(8))
        for parts in (
            {"model": "n", "revision": "1"},
            {"model": "m", "revision": "2"},
            {"model": "m", "revision": "1", "plan": "int8"},
            {"model": "m", "revision": "1", "tp_size": 2, "rank": 1},
            {"model": "m", "revision": "1", "tenant": "t"},
        ):
            assert cache.keyspace(SPEC, **parts).match(range(8)).tokens == 0
        assert cache.keyspace(SPEC, model="m", revision="1").match(range(8)).tokens == 8

    def test_ranks_store_one_chain_side_by_side(self, cache):
        spaces = [cache.keyspace(SPEC, model="m", revision="1", tp_size=2, rank=rank) for rank in (0, 1)]
        kvs = [stored(space, range(8), kv_of(8, rank)) for rank, space in enumerate(spaces)]
        for space, kv in zip(spaces, kvs, strict=True):
            assert np.array_equal(loaded(space, range(8))[1], kv)

    def test_a_rank_that_is_none_is_refused(self, cache):
        for rank in (-1, 1):
            with pytest.raises(ConfigError, match="rank"):
                cache.keyspace(SPEC, model="m", revision="1", rank=rank)

    def test_a_name_and_its_text_are_one_keyspace_and_no_other_plans(self, cache):
        kv = stored(cache.keyspace(SPEC, model="m", revision="1", plan="int8"), range(8))
        text = "K=int8/token/sym,V=int8/token/asym"  # blocks of 4 tokens have no scales of 64
        assert cache.keyspace(SPEC, model="m", revision="1", plan=text).match(range(8)).tokens == 8
        for other in ("raw", "int8/token/sym", f"sinks:1({text})"):
            assert cache.keyspace(SPEC, model="m", revision="1", plan=other).match(range(8)).tokens == 0
        assert np.allclose(
            loaded(cache.keyspace(SPEC, model="m", revision="1", plan="int8"), range(8))[1], kv, atol=0.02
        )

    def test_exact_first_tokens_are_those_of_the_sequence(self, cache):
        space = cache.keyspace(SPEC, model="m", revision="1", plan="sinks:2(int2/token/sym)")
        kv = stored(space, range(8))
        _, out = loaded(space, range(8))
        same = (out == kv).all(axis=(0, 1, 3, 4))
        assert same.tolist() == [True, True] + [False] * 6

    @pytest.mark.parametrize(
        ("plan", "says"),
        [
            ("mixed", "blocks are shared and have no age. Use sinks:1"),
            ("recent:8(int8/token/sym)", "Use int8/token/sym"),
            ("int9", "did you mean 'int"),
            ("sinks:4(int8/token/sym)", "fewer than the 4 of a block"),
            ("layers(0-9:raw)", "there is no layer 9; the spec has 3"),
        ],
    )
    def test_plans_that_blocks_cannot_follow_are_refused(self, cache, plan, says):
        with pytest.raises(ConfigError, match=says):
            cache.keyspace(SPEC, model="m", revision="1", plan=plan)

    def test_a_plan_that_no_header_holds_is_refused_before_anything_is_stored(self, cache):
        spec = KVSpec(200, 1, 8, "float32", block_tokens=256)
        plan = ";".join(f"{i}:K=int8/channel:{i + 2}/asym,V=raw" for i in range(200))
        with pytest.raises(ConfigError, match="at most 3952 fit a block header"):
            cache.keyspace(spec, model="m", revision="1", plan=f"layers({plan})")

    def test_opened_twice_is_listed_once(self, cache):
        for _ in range(2):
            space = cache.keyspace(SPEC, model="m", revision="1")
        stored(space, range(9))
        seen = cache.inspect(range(9))
        assert [(block["model"], block["plan"], block["position"]) for block in seen] == [
            ("m", "raw", 0),
            ("m", "raw", 1),
        ]

    def test_extra_digests_are_part_of_the_key(self, space):
        stored(space, range(8))
        assert space.match(range(8), extra=[b"", b"picture"]).tokens == 4
        with pytest.raises(BadTokens):
            space.match(range(8), extra=[b""])

    def test_a_chain_is_hashed_once(self, space):
        chain = space.chain(range(8))
        assert isinstance(chain, Chain)
        assert space.chain(chain) is chain
        assert space.save(chain, kv_of(8)).result(10.0) == Saved(2, 0)
        assert space.match(chain).tokens == 8


class TestHostTrouble:
    def test_a_host_that_is_gone_is_a_miss_with_a_reason(self, space, cache, monkeypatch):
        def gone(*_, **__):
            raise SessionUnavailable("gone")

        for call in ("match", "move", "prefetch", "inspect", "status", "pin", "unpin", "evict", "clear"):
            monkeypatch.setattr(cache.session, call, gone)
        assert space.pin(range(8), ttl=1.0) == space.unpin(range(8)) == 0
        for delete in (space.clear, lambda: space.evict(range(8))):
            with pytest.raises(SessionUnavailable):
                delete()
        assert space.match(range(8)).tokens == 0
        assert space.move(range(8), "nvme") == 0
        assert space.prefetch(range(8)).result(0) == 0
        assert space.inspect(range(8)) == [None, None]
        assert cache.counters == {"match_SessionUnavailable": 1, "call_SessionUnavailable": 5}
        assert cache.status() == {"error": "gone", "client": dict(cache.counters), "device": "not attached"}

    def test_a_move_that_takes_too_long_goes_on(self, space, cache):
        stored(space, range(8))
        cache.session._hierarchy.move = lambda *_: Future()
        with pytest.raises(DeadlineExceeded):
            cache.session.move([], 2, 0.0)
        assert space.move(range(8), "cpu", wait=0.0) == 0
        assert cache.counters == {"call_DeadlineExceeded": 1}

    def test_no_such_tier(self, space):
        with pytest.raises(ConfigError, match="gpu, cpu, nvme"):
            space.move(range(8), "tape")

    def test_a_closed_cache_is_a_miss(self, space, cache):
        cache.close()
        assert space.match(range(8)).tokens == 0
        assert space.move(range(8), "cpu") == 0


class TestOpen:
    def test_only_the_tiers_that_are_named(self, tmp_path):
        tables = {
            "cpu": {"capacity": "4MiB"},
            "nvme": {"capacity": "4MiB", "path": str(tmp_path)},
            "gpu": {"capacity": "1MiB", "device": "cpu"},
        }
        with kvtier.open(tables) as cache:
            labels = [tier["label"] for tier in cache.status()["tiers"]]
            assert labels == ["gpu(host)", "cpu", "nvme"]
            space = cache.keyspace(SPEC, model="m", revision="1")
            kv = stored(space, range(8))
            for tier in ("nvme", "gpu", "cpu"):
                assert space.move(range(8), tier) == 2
                with space.match(range(8), wait=10.0) as hit:
                    out = np.zeros_like(kv)
                    assert hit.load(out, verify=True) == 8
                    assert np.array_equal(out, kv)
                    assert hit.tiers == {tier: 8}
        with kvtier.open({"cpu": {"capacity": "4MiB"}}) as cache:
            assert [tier["tier"] for tier in cache.status()["tiers"]] == ["cpu"]

    @pytest.mark.parametrize("moved", [True, False])
    def test_what_is_on_disk_is_there_after_a_restart(self, tmp_path, moved):
        """What only memory has is written down by `close`."""
        tables = {"cpu": {"capacity": "4MiB"}, "nvme": {"capacity": "4MiB", "path": str(tmp_path)}}
        with kvtier.open(tables) as cache:
            space = cache.keyspace(SPEC, model="m", revision="1")
            kv = stored(space, range(8))
            if moved:
                assert space.move(range(8), "nvme") == 2
        with kvtier.open(tables) as cache:
            space = cache.keyspace(SPEC, model="m", revision="1")
            with space.match(range(8), wait=10.0) as hit:
                out = np.zeros_like(kv)
                assert hit.load(out) == 8
                assert np.array_equal(out, kv)

    def test_an_open_that_fails_leaves_no_folder_locked(self, tmp_path):
        tables = {"cpu": {"capacity": "4MiB"}, "nvme": {"capacity": "4MiB", "path": str(tmp_path)}}
        with pytest.raises(ConfigError):
            kvtier.open({**tables, "gpu": {"capacity": "1MiB", "device": "cuda:99"}})
        kvtier.open(tables).close()

    def test_a_file(self, tmp_path):
        path = tmp_path / "kvtier.toml"
        path.write_text('[cpu]\ncapacity = "4MiB"\n')
        kvtier.open(path).close()
        with pytest.raises(ConfigError, match="cannot be read"):
            kvtier.open(tmp_path / "absent.toml")


def test_a_forked_child_is_told_to_open_its_own(space, monkeypatch):
    stored(space, list(range(8)))
    monkeypatch.setattr(saving.os, "getpid", lambda: -1)
    with pytest.raises(UsageError, match="fork"):
        space.save(list(range(8)), kv_of(8))


def test_any_wait_that_is_a_number_is_waited_for(space):
    stored(space, list(range(8)))
    for wait in (float("inf"), 1e300, -1, 0):
        with space.match(list(range(8)), wait=wait) as hit:
            assert hit.tokens == 8
    assert space.move(list(range(8)), "cpu", wait=float("inf")) == 2
    for wait in (float("nan"), "soon"):
        with pytest.raises(UsageError, match="wait"):
            space.match(list(range(8)), wait=wait)


def test_a_save_reads_what_it_was_given_whatever_becomes_of_the_list(space, monkeypatch):
    begin, real = threading.Event(), saving._save
    monkeypatch.setattr(saving, "_save", lambda job: (begin.wait(10), real(job))[1])
    want = kv_of(8)
    kv = [[part.copy() for part in layer] for layer in want]
    done = space.save(list(range(8)), kv)
    for layer in kv:
        layer[:] = [np.full((9, 2, 8), 7.0, np.float32), np.full((9, 2, 8), 7.0, np.float32)]
    junk = [np.full((8, 2, 8), 9.0, np.float32) for _ in range(64)]
    begin.set()
    assert done.result(10).blocks == 2
    out = np.zeros_like(want)
    with space.match(list(range(8))) as hit:
        assert hit.load(out, verify=True) == 8
    assert np.array_equal(out, want), len(junk)


def test_a_chain_of_another_space_is_refused(cache, space):
    other = cache.keyspace(SPEC, model="other", revision="1")
    chain = space.chain(list(range(8)))
    for call in (other.match, other.inspect, lambda one: other.save(one, kv_of(8))):
        with pytest.raises(UsageError, match="another keyspace"):
            call(chain)


def test_a_prefetch_whose_host_dies_brings_nothing_and_is_counted(cache, space, monkeypatch):
    lost: Future[int] = Future()
    monkeypatch.setattr(space.session, "prefetch", lambda *_: lost)
    asked = space.prefetch(list(range(8)))
    lost.set_exception(SessionUnavailable("gone"))
    assert asked.result(5) == 0
    assert cache.counters["call_SessionUnavailable"] == 1


def test_a_block_that_no_slot_can_describe_is_refused_at_once(cache):
    with pytest.raises(ConfigError, match="block_tokens"):
        cache.keyspace(KVSpec(64, 64, 128, "float32", block_tokens=4096), model="m", revision="1")


def test_a_block_larger_than_half_the_arena_can_be_stored(cache):
    wide = cache.keyspace(KVSpec(3, 2, 8, "float32", block_tokens=7000), model="wide", revision="1")
    tokens = list(range(7000))
    assert space_blocks(wide, tokens) == 1


def space_blocks(space, tokens) -> int:
    return space.save(tokens, kv_of(len(tokens))).result(30).blocks


def test_a_hit_on_an_arena_that_became_smaller_loads_nothing(space):
    stored(space, list(range(8)))
    with space.match(list(range(8))) as hit:
        hit._arena = type(hit._arena)(hit._arena.epoch, hit._arena.memory[:PAGE], hit._arena.generations[:1])
        assert hit.load(kv_of(8)) == 0


class TestStreams:
    """A load that waits decodes what is there while the rest comes up."""

    @pytest.fixture
    def host(self):
        with Host(blocks=100, limits=Limits(1 << 20, 1 << 20)) as host:
            yield host

    @pytest.fixture
    def space(self, host):
        space = Cache(host.session()).keyspace(SPEC, model="m", revision="1")
        self.kv = stored(space, range(12))
        assert space.move(range(12), "nvme") == 3
        return space

    def load(self, space, wait: float) -> tuple[int, int, dict[str, int]]:
        out = np.zeros_like(self.kv)
        with space.match(range(12), wait=wait) as hit:
            tokens, count = hit.tokens, hit.load(out)
            assert hit.verified == count
            assert np.array_equal(out[:, :, :count], self.kv[:, :, :count])
            return tokens, count, hit.tiers

    def test_what_is_on_its_way_is_waited_for(self, space, host):
        assert self.load(space, 5.0) == (12, 12, {"nvme": 12})
        assert host.stats.lookups == {"full": 1}
        assert host.stats.misses.total() == 0

    def test_what_does_not_come_in_time_is_not_loaded(self, space, host):
        space.prefetch(range(4)).result(5.0)
        host.nvme.gate.clear()
        assert self.load(space, 0.05) == (12, 4, {"cpu": 4})
        assert host.stats.misses["staging"] == 2
        host.nvme.gate.set()
        host.mover.drain()
        assert self.load(space, 5.0) == (12, 12, {"cpu": 4, "nvme": 8})

    def test_without_waiting_it_says_what_is_on_its_way(self, space, host):
        host.nvme.gate.clear()
        with space.match(range(12)) as hit:
            assert (hit.tokens, hit.staging) == (0, 12)

    def test_layers_are_loaded_one_after_the_other(self, space):
        out = np.zeros_like(self.kv)
        with space.match(range(12), wait=5.0) as hit:
            for layer in range(3):
                assert hit.load(out, layers=range(layer, layer + 1)) == 12
            assert hit.verified == 12
        assert np.array_equal(out, self.kv)

    def test_nothing_stays_leased(self, space, host):
        self.load(space, 5.0)
        host.nvme.gate.clear()
        assert host.hierarchy.status()["leases"] == 0

    def test_what_the_engine_computes_sooner_is_no_hit(self, space, host):
        for _ in range(3):
            host.state.pace.observe(NVME, 10 << 20, 100.0, host.now)
        space.computed(3, 1e-9)  # less than a block says nothing
        for tokens, seconds in ((-1, 1.0), (8, -1.0), (8, float("nan"))):
            with pytest.raises(UsageError, match="cannot be"):
                space.computed(tokens, seconds)
        assert space.match(range(12), wait=5.0).tokens == 12
        host.mover.drain()
        space.move(range(12), "nvme")
        space.computed(1000, 0.001)
        assert space.match(range(12), wait=5.0).tokens == 0
        assert host.stats.misses["declined_recompute_cheaper"] == 3
        for _ in range(2):
            space.computed(1000, 1000.0)
        assert space.match(range(12), wait=5.0).tokens == 12


class TestRetention:
    def test_blocks_expire_by_their_keyspaces_time(self, cache, monkeypatch):
        brief = cache.keyspace(SPEC, model="m", revision="1", ttl=100.0)
        stored(brief, range(8))
        lasting = cache.keyspace(SPEC, model="m", revision="2")
        stored(lasting, range(8))
        monkeypatch.setattr(cache.session._hierarchy.state, "clock", lambda: time.time() + 102.0)
        assert brief.match(range(8)).tokens == 0
        assert lasting.match(range(8)).tokens == 8
        assert len(cache.inspect(range(8))) >= 2

    @pytest.mark.parametrize("ttl", [0, -1.0, float("nan"), float("inf")])
    def test_a_time_that_cannot_be_is_refused(self, cache, space, ttl):
        with pytest.raises(ConfigError, match="seconds above 0"):
            cache.keyspace(SPEC, model="m", revision="1", ttl=ttl)
        with pytest.raises(UsageError):
            space.pin(range(8), ttl=ttl)

    def test_a_sequence_is_pinned_and_evicted(self, cache, space):
        stored(space, range(16))
        assert space.pin(range(16), ttl=60.0) == 4
        assert space.unpin(range(8)) == 2
        assert space.evict(range(16), start=5) == 2
        assert space.match(range(16)).tokens == 8
        assert cache.status()["pins"] == 0

    def test_clearing_is_of_one_keyspace(self, cache, space):
        other = cache.keyspace(SPEC, model="other", revision="1")
        for each in (space, other):
            stored(each, range(8))
        assert space.clear() == 2
        assert (space.match(range(8)).tokens, other.match(range(8)).tokens) == (0, 8)


def test_a_keyspace_that_nobody_uses_any_more_is_let_go(cache):
    """Who serves many sessions opens one each."""
    for number in range(50):
        cache.keyspace(SPEC, model="m", revision="1", tenant=str(number))
    held = cache.keyspace(SPEC, model="m", revision="1")
    stored(held, range(8))
    gc.collect()
    assert list(cache._spaces.values()) == [held]
    assert cache.keyspace(SPEC, model="m", revision="1") is held
    assert [block["position"] for block in cache.inspect(range(8))] == [0, 1]


def test_keyspaces_are_opened_while_others_are_looked_at(cache):
    held = [cache.keyspace(SPEC, model="m", revision=str(number)) for number in range(100)]

    def opening():
        held.extend(cache.keyspace(SPEC, model="m", revision=str(number)) for number in range(100, 400))

    thread, interval = threading.Thread(target=opening), sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        thread.start()
        while thread.is_alive():
            assert cache.inspect(range(8)) == cache.where(range(8)) == []
    finally:
        sys.setswitchinterval(interval)
        thread.join()
    assert len(cache._spaces) == len(held) == 400
