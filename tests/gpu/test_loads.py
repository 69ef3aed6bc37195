"""`Hit.load` into tensors where the GPU's codec decodes: out of the arena, out of the GPU tier's memory, out of both.

On a device the GPU tier is there too, and its memory is read in place; in Triton's interpreter it is emulated.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

import kvtier
from kvtier.client import reading
from kvtier.codecs.gpu import DeviceView
from kvtier.spec import KVSpec
from tests.gpu.kit import DEVICE

SPEC = KVSpec(2, 2, 64, "bfloat16", block_tokens=16)
BLOCKS = 5
TOKENS = BLOCKS * SPEC.block_tokens
PLACE = "cpu" if DEVICE == "cpu" else "cuda:0"
PATIENCE = 60.0


@pytest.fixture
def cache():
    with kvtier.open({"cpu": {"capacity": "8MiB"}, "gpu": {"capacity": "4MiB", "device": PLACE}}) as opened:
        yield opened


def bits(kv: torch.Tensor) -> np.ndarray:
    return kv.cpu().view(torch.int16).numpy()


def load(space, *, device: bool, **options) -> tuple[int, dict[str, int], np.ndarray]:
    """Into KV of the device, or of the CPU."""
    out = torch.zeros(2, 2, TOKENS, 2, 64, dtype=torch.bfloat16, device=PLACE if device else "cpu")
    with space.match(range(TOKENS)) as hit:
        into = DeviceView.of(out, SPEC) if device else out
        return hit.load(into, **options), hit.tiers, bits(out)


@pytest.mark.parametrize("plan", ["raw", "int8", "int4"])
def test_the_bits_are_those_of_the_cpu_wherever_blocks_lie(cache, plan):
    space = cache.keyspace(SPEC, model="m", revision="1", plan=plan)
    torch.manual_seed(0)
    kv = torch.randn(2, 2, TOKENS, 2, 64, dtype=torch.bfloat16)
    assert space.save(range(TOKENS), kv).result(PATIENCE).blocks == BLOCKS
    on_gpu = range(3 * SPEC.block_tokens)
    assert space.prefetch(on_gpu, tier="gpu").result(PATIENCE) == 3
    first = load(space, device=True)
    assert first[:2] == (TOKENS, {"cpu": TOKENS})
    space.prefetch(range(TOKENS), tier="gpu").result(PATIENCE)
    both = load(space, device=True, verify=True)
    assert both[:2] == (TOKENS, {"gpu": TOKENS})
    cpu = load(space, device=False)
    assert cpu[:2] == (TOKENS, {"gpu": TOKENS})
    for found in (first, both):
        assert np.array_equal(found[2], cpu[2])
    space.evict(range(TOKENS), start=len(on_gpu))
    assert space.save(range(TOKENS), kv).result(PATIENCE).blocks == 2
    mixed = load(space, device=True)
    assert mixed[:2] == (TOKENS, {"gpu": len(on_gpu), "cpu": TOKENS - len(on_gpu)})
    assert np.array_equal(mixed[2], cpu[2])


def test_through_the_arena_some_bodies_at_a_time(cache, monkeypatch):
    """Three pieces and two of pinned memory: one is filled again after it was sent."""
    space = cache.keyspace(SPEC, model="m", revision="1", plan="int8")
    kv = torch.randn(2, 2, TOKENS, 2, 64, dtype=torch.bfloat16)
    assert space.save(range(TOKENS), kv).result(PATIENCE).blocks == BLOCKS
    cpu = load(space, device=False)
    monkeypatch.setattr(reading, "PIECE_NBYTES", 20_000)
    assert cpu[0] == TOKENS
    assert np.array_equal(load(space, device=True)[2], cpu[2])


def test_layer_by_layer(cache):
    space = cache.keyspace(SPEC, model="m", revision="1", plan="int8")
    kv = torch.randn(2, 2, TOKENS, 2, 64, dtype=torch.bfloat16)
    space.save(range(TOKENS), kv).result(PATIENCE)
    space.prefetch(range(TOKENS), tier="gpu").result(PATIENCE)
    whole = load(space, device=True)
    out = torch.zeros(2, 2, TOKENS, 2, 64, dtype=torch.bfloat16, device=PLACE)
    with space.match(range(TOKENS)) as hit:
        for layer in range(SPEC.layers):
            assert hit.load(DeviceView.of(out, SPEC), layers=range(layer, layer + 1)) == TOKENS
        assert hit.verified == TOKENS
        assert hit.tiers == {"gpu": TOKENS}
    assert np.array_equal(bits(out), whole[2])
