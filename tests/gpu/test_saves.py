"""`Space.save` of KV where the GPU's codec encodes: the payloads are those of a save out of CPU memory."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

import kvtier
from kvtier.client import reading
from kvtier.client.save import Saved
from kvtier.codecs.gpu import DeviceView, GpuCodec
from kvtier.spec import KVSpec
from tests.gpu.kit import DEVICE, PAGE_TOKENS

SPEC = KVSpec(2, 2, 64, "bfloat16", block_tokens=16)
BLOCKS = 5
TOKENS = BLOCKS * SPEC.block_tokens
PLACE = "cpu" if DEVICE == "cpu" else "cuda:0"
PATIENCE = 60.0
on_hardware = pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter has no streams")


@pytest.fixture
def cache():
    with kvtier.open({"cpu": {"capacity": "8MiB"}}) as opened:
        yield opened


@pytest.fixture
def other():
    with kvtier.open({"cpu": {"capacity": "8MiB"}}) as opened:
        yield opened


def space_of(cache, plan: str = "int8"):
    return cache.keyspace(SPEC, model="m", revision="1", plan=plan)


def random_kv(tokens: int = TOKENS) -> torch.Tensor:
    return torch.randn(2, 2, tokens, 2, 64, generator=torch.Generator().manual_seed(0)).bfloat16()


def on_device(kv: torch.Tensor) -> DeviceView:
    return DeviceView.of(kv.to(PLACE), SPEC)


def save(space, kv, **options) -> Saved:
    return space.save(range(TOKENS), kv, **options).result(PATIENCE)


def payloads(space) -> list[bytes]:
    with space.match(range(TOKENS)) as hit:
        memory = space.session.readable()
        return [memory[int(s["offset"]) : int(s["offset"]) + int(s["nbytes"])].tobytes() for s in hit._slots]


@pytest.mark.parametrize("piece", [32 << 20, 20_000], ids=["at once", "some at a time"])
@pytest.mark.parametrize("plan", ["raw", "int8", "sinks:2(K=int4/channel/asym,V=int2/token/asym)"])
def test_payloads_are_those_of_the_cpu(cache, other, plan, piece, monkeypatch):
    monkeypatch.setattr(reading, "PIECE_NBYTES", piece)
    kv = random_kv()
    assert save(space_of(other, plan), kv) == Saved(BLOCKS, 0)
    assert save(space_of(cache, plan), on_device(kv)) == Saved(BLOCKS, 0)
    found = payloads(space_of(cache, plan))
    assert len(found) == BLOCKS
    assert found == payloads(space_of(other, plan))


def test_pages_from_an_origin_on(cache, other):
    """What lies before `start` is not read: the pool has something else there."""
    kv = random_kv()
    pages = np.random.default_rng(0).permutation(3 * BLOCKS)[: BLOCKS - 1]
    pools = [[torch.full((3 * BLOCKS, PAGE_TOKENS, 2, 64), 7.0).bfloat16().to(PLACE) for _ in "kv"] for _ in range(2)]
    for layer in range(2):
        for part in range(2):
            for number, page in enumerate(pages.tolist()[1:], 2):
                pools[layer][part][page] = kv[layer, part, number * 16 : number * 16 + 16].to(PLACE)
    assert save(space_of(other), kv) == Saved(BLOCKS, 0)
    assert space_of(cache).save(range(32), on_device(kv[:, :, :32])).result(PATIENCE) == Saved(2, 0)
    view = DeviceView.paged(pools, pages, SPEC)
    assert save(space_of(cache), view, origin=16, start=32, vouched=True) == Saved(BLOCKS - 2, 0)
    assert payloads(space_of(cache)) == payloads(space_of(other))


@pytest.mark.parametrize("piece", [32 << 20, 20_000], ids=["at once", "some at a time"])
def test_a_value_that_the_plan_cannot_say_ends_the_save(cache, piece, monkeypatch):
    monkeypatch.setattr(reading, "PIECE_NBYTES", piece)
    kv = random_kv()
    kv[1, 0, 3 * 16 + 2, 1, 3] = float("nan")
    assert save(space_of(cache), on_device(kv)) == Saved(3, 0, "bad_values")
    assert space_of(cache).match(range(TOKENS)).tokens == 48
    assert save(space_of(cache, "raw"), on_device(kv)) == Saved(BLOCKS, 0), "there it is a value like any other"


def test_a_device_that_fails_is_a_refusal_and_what_came_before_stays(cache, monkeypatch):
    monkeypatch.setattr(reading, "PIECE_NBYTES", 1)
    encode, calls = GpuCodec.encode, []

    def fails(*args):
        calls.append(args)
        if len(calls) == 4:
            raise RuntimeError("out of memory")
        return encode(*args)

    monkeypatch.setattr(GpuCodec, "encode", fails)
    saved = save(space_of(cache), on_device(random_kv()))
    assert saved.refused == "device_error"
    assert saved.blocks == space_of(cache).match(range(TOKENS)).tokens // 16 >= 2
    assert cache.counters == {"save_device_error": 1}
    assert cache.status()["reservations"] == 0
    assert save(space_of(cache), on_device(random_kv())) == Saved(BLOCKS - saved.blocks, saved.blocks)


def test_its_memory_stays_until_it_is_saved(cache, other, monkeypatch):
    """The caller may let go of it at once."""
    begin, reserve = threading.Event(), cache.session.reserve
    monkeypatch.setattr(cache.session, "reserve", lambda *args: (begin.wait(PATIENCE), reserve(*args))[1])
    done = space_of(cache).save(range(TOKENS), on_device(random_kv()))
    junk = [torch.full((2, 2, TOKENS, 2, 64), 9.0, device=PLACE).bfloat16() for _ in range(8)]
    begin.set()
    assert done.result(PATIENCE) == Saved(BLOCKS, 0)
    save(space_of(other), random_kv())
    assert payloads(space_of(cache)) == payloads(space_of(other)), len(junk)


@on_hardware
@pytest.mark.parametrize("side", [False, True], ids=["default stream", "a stream of the engine's"])
def test_what_is_queued_when_it_is_called_is_saved(cache, other, side):
    """Saving waits for what computes the KV; who calls does not."""
    kv, there = random_kv(), torch.zeros(2, 2, TOKENS, 2, 64, dtype=torch.bfloat16, device=PLACE)
    ready = kv.pin_memory()
    save(space_of(other), on_device(kv))  # what is made at first is made
    stream = torch.cuda.Stream() if side else torch.cuda.current_stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(1_000_000_000)
        there.copy_(ready, non_blocking=True)
        done = space_of(cache).save(range(TOKENS), DeviceView.of(there, SPEC))
        assert not stream.query(), "the caller has waited"
    assert done.result(PATIENCE) == Saved(BLOCKS, 0)
    assert payloads(space_of(cache)) == payloads(space_of(other))


@on_hardware
def test_tensors_of_the_device_are_taken_as_they_are(cache, other):
    kv = random_kv()
    assert save(space_of(cache), kv.to(PLACE)) == Saved(BLOCKS, 0)
    save(space_of(other), kv)
    assert payloads(space_of(cache)) == payloads(space_of(other))
