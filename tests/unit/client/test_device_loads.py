"""Loads out of the GPU tier's memory, emulated in host memory."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import kvtier
from kvtier import KVSpec
from kvtier.block import PAGE
from kvtier.client import reading
from kvtier.client.reading import Bodies
from kvtier.errors import SessionUnavailable
from kvtier.memory import device as device_module

SPEC = KVSpec(3, 2, 8, "float32", block_tokens=4)
PATIENCE = 10.0


@pytest.fixture(params=[1, 3], ids=["one thread", "three threads"])
def cache(request):
    config = {"cpu": {"capacity": "4MiB"}, "gpu": {"capacity": "1MiB", "device": "cpu"}}
    with kvtier.open(config, threads=request.param) as opened:
        yield opened


@pytest.fixture
def space(cache):
    return cache.keyspace(SPEC, model="m", revision="1")


def kv_of(tokens: int) -> np.ndarray:
    return np.random.default_rng(tokens).standard_normal((3, 2, tokens, 2, 8), np.float32)


def stored(space, tokens: int, on_gpu: int | None = None) -> np.ndarray:
    """Save a sequence, and bring its first `on_gpu` tokens to the GPU tier."""
    kv = kv_of(tokens)
    assert space.save(range(tokens), kv).result(PATIENCE).refused == ""
    on_gpu = tokens if on_gpu is None else on_gpu
    assert space.prefetch(range(on_gpu), tier="gpu").result(PATIENCE) == on_gpu // 4
    return kv


def load(space, tokens: int, **options) -> tuple[int, dict[str, int], np.ndarray]:
    out = np.zeros((3, 2, tokens, 2, 8), np.float32)
    with space.match(range(tokens)) as hit:
        return hit.load(out, **options), hit.tiers, out


def attach(space, tokens: int) -> None:
    """The first load of a client is out of the arena."""
    count, tiers, _ = load(space, tokens)
    assert (count, tiers) == (tokens, {"cpu": tokens})


def memory_of(cache) -> np.ndarray:
    """The GPU tier's memory, writable."""
    (tier,) = (t for t in cache.session._hierarchy.state.tiers.values() if t.name == "gpu")
    return tier._memory.memory.numpy()


def test_from_the_second_on_loads_are_out_of_its_memory(space, cache):
    kv = stored(space, 24)
    attach(space, 24)
    cache.session.writable()[:] = 0xA5
    for verify in (False, True):
        count, tiers, out = load(space, 24, verify=verify)
        assert (count, tiers) == (24, {"gpu": 24})
        assert np.array_equal(out, kv)
    assert cache.status()["hits"] == {"cpu": 6, "gpu": 12}
    assert not cache.counters


def test_the_rest_of_a_chain_is_out_of_the_arena_in_the_same_load(space, cache):
    kv = stored(space, 24, on_gpu=16)
    attach(space, 24)
    for options in ({}, {"verify": True}):
        cache.session._hierarchy.mover.drain()  # each load promotes what it read
        assert space.evict(range(24), start=16) == 2
        assert space.save(range(24), kv).result(PATIENCE).blocks == 2
        count, tiers, out = load(space, 24, **options)
        assert (count, tiers) == (24, {"gpu": 16, "cpu": 8})
        assert np.array_equal(out, kv)


def test_layer_by_layer(space):
    kv = stored(space, 16)
    attach(space, 16)
    out = np.zeros_like(kv)
    with space.match(range(16)) as hit:
        for layer in range(3):
            assert hit.load(out, layers=range(layer, layer + 1)) == 16
        assert hit.verified == 16
    assert np.array_equal(out, kv)


def test_what_only_the_gpu_tier_has_is_a_hit_at_once(space):
    kv = stored(space, 16)
    attach(space, 16)
    assert space.move(range(16), "gpu") == 4
    count, tiers, out = load(space, 16)
    assert (count, tiers) == (16, {"gpu": 16})
    assert np.array_equal(out, kv)


@pytest.mark.parametrize(("at", "why"), [(40, "bad_header"), (-1, "bad_checksum")])
def test_bad_bytes_there_are_condemned(space, cache, at, why):
    stored(space, 16)
    attach(space, 16)
    with space.match(range(16)) as hit:
        slot = hit._slots[1]
        memory_of(cache)[int(slot["offset"]) + at % int(slot["nbytes"])] ^= 1
        assert hit.load(np.zeros((3, 2, 16, 2, 8), np.float32), verify=True) == 4
    assert cache.counters == {why: 1}
    assert [block is not None for block in space.inspect(range(16))] == [True, False, True, True]


def test_a_slot_that_is_granted_again_during_the_copy_is_not_ours(space, cache):
    stored(space, 16)
    attach(space, 16)
    (tier,) = (t for t in cache.session._hierarchy.state.tiers.values() if t.name == "gpu")
    with space.match(range(16)) as hit:
        decode = hit._decode

        def decode_and_lose(*args):
            decode(*args)
            tier._memory.generations[int(hit._slots["offset"][2]) // PAGE] += 1

        hit._decode = decode_and_lose
        assert hit.load(np.zeros((3, 2, 16, 2, 8), np.float32)) == 8


def test_memory_whose_owner_lets_go_during_the_copy_is_not_ours(space, cache):
    stored(space, 16, on_gpu=8)
    attach(space, 16)
    (tier,) = (t for t in cache.session._hierarchy.state.tiers.values() if t.name == "gpu")
    with space.match(range(8)) as hit:
        decode = hit._decode

        def decode_and_lose(*args):
            decode(*args)
            tier.close()

        hit._decode = decode_and_lose
        assert hit.load(np.zeros((3, 2, 8, 2, 8), np.float32)) == 0
    assert load(space, 16)[:2] == (16, {"cpu": 16})


def test_what_cannot_be_attached_is_tried_once_and_counted(space, cache, monkeypatch):
    kv = stored(space, 16)
    monkeypatch.setattr(device_module, "_mine", {})  # as if this were another process
    for _ in range(3):
        count, tiers, out = load(space, 16)
        assert (count, tiers) == (16, {"cpu": 16})
        assert np.array_equal(out, kv)
    assert cache.counters == {"device_refused": 1}
    assert cache.status()["faults"] == {"device_refused": 1}
    assert "another process" in cache.status()["device"]


def test_a_host_that_does_not_answer_is_asked_again_later(space, cache, monkeypatch):
    stored(space, 16)
    with monkeypatch.context() as away:

        def gone(_device):
            raise SessionUnavailable("gone")

        away.setattr(cache.session, "attach", gone)
        attach(space, 16)
    assert cache.counters == {"device_SessionUnavailable": 1}
    attach(space, 16)
    assert load(space, 16)[1] == {"gpu": 16}


def test_a_stream_reads_both(space):
    kv = stored(space, 24, on_gpu=12)
    attach(space, 24)
    out = np.zeros_like(kv)
    with space.match(range(24), wait=5.0) as hit:
        assert hit.load(out) == 24
    assert np.array_equal(out, kv)


class TestWays:
    """Bodies on their way between memories; tensors of the CPU stand for those of a GPU."""

    @pytest.fixture
    def bodies(self):
        random = np.random.default_rng(0)
        nbytes = np.array([100, 64, 1, 5000, 4000, 63, 128], np.int64)
        offsets = np.array([8192, 0, 64, 20_000, 4096, 128, 12_288], np.int64)
        return Bodies(random.integers(0, 256, 32_768).astype(np.uint8), offsets, nbytes, np.arange(7))

    def contents(self, bodies: Bodies) -> list[bytes]:
        return [
            np.asarray(bodies.memory)[at : at + nbytes].tobytes()
            for at, nbytes in zip(bodies.offsets.tolist(), bodies.nbytes.tolist(), strict=True)
        ]

    @pytest.mark.parametrize("piece", [1, 200, 4096, 1 << 20])
    def test_every_body_arrives_whole_and_aligned(self, bodies, piece, monkeypatch):
        monkeypatch.setattr(reading, "PIECE_NBYTES", piece)
        there = Bodies(torch.from_numpy(bodies.memory), bodies.offsets, bodies.nbytes, bodies.positions)
        for parts in (list(reading._on_host(there)), list(reading._on_device(bodies, torch.device("cpu")))):
            assert [content for part in parts for content in self.contents(part)] == self.contents(bodies)
            assert np.concatenate([part.positions for part in parts]).tolist() == list(range(7))
            assert not any((part.offsets % 64).any() for part in parts)
            # In multiples of 64: 128, 64, 64, 5056, 4032, 64, 128.
            assert len(parts) == {1: 7, 200: 5, 4096: 4, 1 << 20: 1}[piece]

    def test_in_place_nothing_is_copied(self, bodies):
        assert next(reading._on_host(bodies)) is bodies
        there = Bodies(torch.from_numpy(bodies.memory), bodies.offsets, bodies.nbytes, bodies.positions)
        assert next(reading._on_device(there, torch.device("cpu"))) is there

    def test_headers_of_tensors_are_those_of_arrays(self, bodies):
        places = np.array([0, 64, 4096], np.int64)
        found = reading.heads(bodies.memory, places, 64)
        assert np.array_equal(found, reading.heads(torch.from_numpy(bodies.memory), places, 64))
        assert found[1].tolist() == bodies.memory[64:128].tolist()
        assert reading.on_host(torch.from_numpy(bodies.memory), 5, 9).tolist() == bodies.memory[5:14].tolist()
