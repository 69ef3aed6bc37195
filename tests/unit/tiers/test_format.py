"""docs/format.md is true: a reader that was written from the page alone reads what a store holds."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
import torch

import kvtier
from tests.golden.read_store import body_of, header_of, plan_of, read_store

LAYERS, HEADS, DIM, BLOCK = 6, 2, 48, 64
PLANS = (
    "raw",
    "int8",
    "fp8",
    "k8v4",
    "int4",
    "int3",
    "layered",
    "K=int3/group:20/sym,V=e5m2/tensor/asym",
    "sinks:3(K=bf16,V=int2/channel:32/asym)",
    "fp16",
)
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def opened(folder, **nvme):
    tables = {"path": str(folder), "capacity": "16MiB", **nvme}
    return kvtier.open({"cpu": {"capacity": "64MiB"}, "nvme": tables})


def space_of(cache, plan, dtype="bfloat16"):
    spec = kvtier.KVSpec(layers=LAYERS, kv_heads=HEADS, head_dim=DIM, dtype=dtype, block_tokens=BLOCK)
    return cache.keyspace(spec, model="m", revision="1", plan=plan)


def kv_of(blocks, dtype="bfloat16", seed=0):
    made = torch.randn(LAYERS, 2, blocks * BLOCK, HEADS, DIM, generator=torch.Generator().manual_seed(seed))
    return made.to(DTYPES[dtype])


def stored(cache, space, tokens, kv):
    """Save, and bring down to NVMe."""
    assert space.save(tokens, kv).result().refused == ""
    assert space.move(tokens, "nvme") == len(tokens) // BLOCK


def loaded(space, tokens, dtype="bfloat16"):
    kv = torch.empty(LAYERS, 2, len(tokens), HEADS, DIM, dtype=DTYPES[dtype])
    with space.match(tokens, wait=10.0) as hit:
        assert hit.load(kv) == len(tokens)
    return kv


def bits(kv):
    return kv.numpy() if kv.dtype == torch.float32 else kv.view(torch.int16).numpy().view(np.uint16)


@pytest.mark.parametrize("dtype", DTYPES)
def test_bodies_of_every_plan_are_what_a_load_gives(tmp_path, dtype):
    tokens = list(range(2 * BLOCK))
    given = {}
    with opened(tmp_path) as cache:
        for number, plan in enumerate(PLANS):
            if dtype == "float32" or plan != "fp16":
                space = space_of(cache, plan, dtype)
                stored(cache, space, tokens, kv_of(2, dtype, number))
                blocks = np.split(bits(loaded(space, tokens, dtype)), 2, 2)
                given.update(zip(space.chain(tokens).addresses, blocks, strict=True))
    found = read_store(tmp_path)
    assert found.keys() == given.keys()
    for address, payload in found.items():
        kv = body_of(payload, LAYERS, BLOCK, HEADS, DIM, dtype)
        np.testing.assert_array_equal(kv, given[address], err_msg=plan_of(payload))


def addresses(space, *sequences):
    return {address for tokens in sequences for address in space.chain(tokens).addresses}


def test_what_a_crash_leaves_and_what_a_close_leaves_say_the_same(tmp_path):
    a, b, c = ([seed, *range(4 * BLOCK - 1)] for seed in (1, 2, 3))
    with opened(tmp_path / "open") as cache:
        space = space_of(cache, "int8")
        for tokens in (a, b, c):
            stored(cache, space, tokens, kv_of(4))
        assert space.evict(b) == 4
        assert space.evict(c, start=2 * BLOCK) == 2
        expected = addresses(space, a, c[: 2 * BLOCK])
        stored(cache, space, [4, *range(BLOCK - 1)], kv_of(1))
        expected |= addresses(space, [4, *range(BLOCK - 1)])
        shutil.copytree(tmp_path / "open", tmp_path / "crashed")
    assert read_store(tmp_path / "open").keys() == expected
    assert read_store(tmp_path / "crashed").keys() == expected


@pytest.mark.parametrize("method", ["lz4", "zstd"])
@pytest.mark.parametrize("heads", [2, 40])
def test_packed_payloads(tmp_path, method, heads):
    """The larger ones are of several pieces."""
    tokens = list(range(2 * BLOCK))
    kv = torch.randn(LAYERS, 2, 2 * BLOCK, heads, DIM).to(torch.bfloat16)
    with opened(tmp_path, lossless=method, capacity="64MiB") as cache:
        spec = kvtier.KVSpec(layers=LAYERS, kv_heads=heads, head_dim=DIM, dtype="bfloat16", block_tokens=BLOCK)
        space = cache.keyspace(spec, model="m", revision="1", plan="raw")
        stored(cache, space, tokens, kv)
        expected = addresses(space, tokens)
    found = read_store(tmp_path)
    assert found.keys() == expected
    assert (tmp_path / "regions").read_bytes().count(b"KVTIERLL") == 2
    for payload in found.values():
        half = slice(0, BLOCK) if header_of(payload)["position"] == 0 else slice(BLOCK, None)
        np.testing.assert_array_equal(body_of(payload, LAYERS, BLOCK, heads, DIM, "bfloat16"), bits(kv)[:, :, half])


def test_regions_that_were_taken_again(tmp_path):
    """More than the file holds: of what was overwritten nothing is left, of the rest everything."""
    with opened(tmp_path, capacity="4MiB", admission="all") as cache:
        space = space_of(cache, "raw")
        for seed in range(24):
            tokens = [seed, *range(3 * BLOCK - 1)]
            assert space.save(tokens, kv_of(3, seed=seed)).result().refused == ""
            space.move(tokens, "nvme")
        listed = {a for seed in range(24) for a in on_nvme(space, [seed, *range(3 * BLOCK - 1)])}
    found = read_store(tmp_path)
    assert 12 <= len(listed) < 72
    assert found.keys() == listed


def on_nvme(space, tokens):
    known = zip(space.chain(tokens).addresses, space.inspect(tokens), strict=True)
    return [address for address, block in known if block is not None and "nvme" in block["tiers"]]


def test_an_altered_block_is_not_given(tmp_path):
    tokens = list(range(2 * BLOCK))
    with opened(tmp_path) as cache:
        space = space_of(cache, "raw")
        stored(cache, space, tokens, kv_of(2))
    file = bytearray((tmp_path / "regions").read_bytes())
    payload = read_store(tmp_path)[space.chain(tokens).addresses[1]]
    file[file.index(payload) + 5000] ^= 1
    (tmp_path / "regions").write_bytes(file)
    assert read_store(tmp_path).keys() == {space.chain(tokens).addresses[0]}
