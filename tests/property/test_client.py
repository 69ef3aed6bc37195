"""Whatever is saved comes back, and what is not what was saved is never called verified."""

from __future__ import annotations

from contextlib import contextmanager

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kvtier
from kvtier import KVSpec
from kvtier.block import PAGE
from kvtier.client.headers import Headers
from kvtier.codecs import reference
from tests.codec_cases import plans

FEW = settings(max_examples=40, deadline=None)
ITEM = {"bfloat16": np.uint16, "float16": np.float16, "float32": np.float32}


@pytest.fixture(scope="module")
def cache():
    with kvtier.open({"cpu": {"capacity": "16MiB"}}) as opened:
        yield opened


_models = iter(range(1 << 30))


def space_of(cache, spec, plan="raw"):
    """A keyspace that no other example has."""
    return cache.keyspace(spec, model=f"m{next(_models)}", revision="1", plan=plan)


@st.composite
def specs(draw):
    head_dim = draw(st.sampled_from([8, 16, 40, 64]))
    block_tokens = draw(st.sampled_from([1, 2, 4, 16]))
    dtype = draw(st.sampled_from(sorted(ITEM)))
    layers = draw(st.integers(1, 4))
    if draw(st.booleans()):
        return KVSpec(layers, 1, head_dim, dtype, block_tokens=block_tokens, mla=True)
    v_head_dim = draw(st.sampled_from([head_dim, 8]))
    return KVSpec(layers, draw(st.integers(1, 3)), head_dim, dtype, v_head_dim, block_tokens)


def random_bits(rng, shape, dtype, *, finite):
    """Any bits for raw; for the rest numbers that every plan can say."""
    if not finite:
        nbytes = np.dtype(ITEM[dtype]).itemsize
        return rng.integers(0, 256, (*shape[:-1], shape[-1] * nbytes), np.uint8).view(ITEM[dtype])
    values = rng.standard_normal(shape, np.float32)
    return (values.view(np.uint32) >> 16).astype(np.uint16) if dtype == "bfloat16" else values.astype(ITEM[dtype])


def layers_of(rng, spec, tokens, layout, *, finite):
    """One (k, v) pair a layer, as an engine may have it: contiguous, heads first, or with room in between."""

    def part(dim):
        shape = (tokens, spec.kv_heads, dim)
        if layout == "heads first":
            return random_bits(rng, (spec.kv_heads, tokens, dim), spec.dtype, finite=finite).transpose(1, 0, 2)
        if layout == "padded":
            return random_bits(rng, (tokens, spec.kv_heads + 1, dim + 8), spec.dtype, finite=finite)[:, :-1, :dim]
        return random_bits(rng, shape, spec.dtype, finite=finite)

    return [part(spec.head_dim) if spec.mla else tuple(map(part, spec.head_dims)) for _ in range(spec.layers)]


def parts(layers):
    return [part for layer in layers for part in (layer if isinstance(layer, tuple) else (layer,))]


def bits(part):
    return np.ascontiguousarray(part).view(np.uint8)


LAYOUTS = st.sampled_from(["contiguous", "heads first", "padded"])


@FEW
@given(
    spec=specs(),
    blocks=st.integers(0, 5),
    rest=st.integers(0, 3),
    seed=st.integers(0, 99),
    saved=LAYOUTS,
    wanted=LAYOUTS,
    room=st.integers(0, 90),
    verify=st.booleans(),
)
def test_raw_comes_back_bit_for_bit(cache, spec, blocks, rest, seed, saved, wanted, room, verify):
    """Any bits, NaN included, from any strides into any strides, as far as there is room; nothing beyond is touched."""
    rng = np.random.default_rng(seed)
    tokens = blocks * spec.block_tokens + min(rest, spec.block_tokens - 1)
    kv = layers_of(rng, spec, tokens, saved, finite=False)
    out = layers_of(rng, spec, room, wanted, finite=False)
    before = [part.copy() for part in parts(out)]
    space = space_of(cache, spec)
    ids = rng.integers(0, 1 << 32, tokens, np.uint32)
    assert space.save(ids, kv).result(30.0).blocks == blocks
    with space.match(ids) as hit:
        assert hit.tokens == blocks * spec.block_tokens
        count = hit.load(out, verify=verify)
        assert count == hit.verified == min(blocks, room // spec.block_tokens) * spec.block_tokens
    for part, original, old in zip(parts(out), parts(kv), before, strict=True):
        assert np.array_equal(bits(part[:count]), bits(original[:count]))
        assert np.array_equal(bits(part[count:]), bits(old[count:]))


@FEW
@given(spec=specs(), blocks=st.integers(1, 4), seed=st.integers(0, 99), layer=st.data())
def test_int8_comes_back_within_half_a_step_of_each_token_and_head(cache, spec, blocks, seed, layer):
    """The bound is the one that `PlanCodec` states."""
    rng = np.random.default_rng(seed)
    tokens = blocks * spec.block_tokens
    kv = layers_of(rng, spec, tokens, "heads first", finite=True)
    space = space_of(cache, spec, "int8/token/sym")
    ids = rng.integers(0, 1 << 32, tokens, np.uint32)
    assert space.save(ids, kv).result(30.0).blocks == blocks
    out = layers_of(rng, spec, tokens, "padded", finite=True)
    first = layer.draw(st.integers(0, spec.layers))
    with space.match(ids) as hit:
        assert hit.load(out, layers=range(first)) == tokens
        assert hit.load(out, layers=range(first, spec.layers), verify=True) == tokens
        assert hit.verified == tokens
    roundoff = {"bfloat16": 2**-8, "float16": 2**-11, "float32": 0}[spec.dtype] + 2**-24
    for part, original in zip(parts(out), parts(kv), strict=True):
        x, y = values(original, spec.dtype), values(part, spec.dtype)
        step = np.abs(x).max(axis=-1, keepdims=True) / 127 * (1 + 2**-9) + 2**-24
        assert (np.abs(x - y) <= (0.5 + 2**-14) * step + roundoff * np.abs(y)).all()


def values(part, dtype):
    part = np.ascontiguousarray(part)
    return (part.astype(np.uint32) << 16).view(np.float32) if dtype == "bfloat16" else part.astype(np.float32)


@FEW
@given(
    spec=specs(), blocks=st.integers(1, 4), seed=st.integers(0, 99), layouts=st.tuples(LAYOUTS, LAYOUTS), data=st.data()
)
def test_every_block_comes_back_as_the_specification_says_of_its_place(cache, spec, blocks, seed, layouts, data):
    """The first of a sequence may be stored otherwise than the rest."""
    plan = data.draw(plans(spec))
    rng = np.random.default_rng(seed)
    tokens = blocks * spec.block_tokens
    kv, out = (layers_of(rng, spec, tokens, layout, finite=True) for layout in layouts)
    space = space_of(cache, spec, plan)
    ids = rng.integers(0, 1 << 32, tokens, np.uint32)
    assert space.save(ids, kv).result(30.0).blocks == blocks
    with space.match(ids) as hit:
        assert hit.load(out, verify=data.draw(st.booleans())) == tokens
    for position in range(blocks):
        here = slice(position * spec.block_tokens, (position + 1) * spec.block_tokens)
        given, found = ([as_parts(layer, here, spec) for layer in layers] for layers in (kv, out))
        body = reference.encode(spec, plan, position, given)
        for parts_found, parts_wanted in zip(found, reference.decode(spec, plan, position, body), strict=True):
            for one, other in zip(parts_found, parts_wanted, strict=True):
                assert np.array_equal(bits(one), bits(other))


def as_parts(layer, tokens, spec):
    """One layer's tokens as the specification takes them: 16-bit elements as their bits."""
    whole = layer if isinstance(layer, tuple) else (layer,)
    kind = np.float32 if spec.dtype == "float32" else np.uint16
    return [np.ascontiguousarray(part[tokens]).view(kind) for part in whole]


@FEW
@given(
    common=st.integers(0, 4),
    tails=st.lists(st.integers(0, 3), min_size=2, max_size=4),
    seed=st.integers(0, 99),
    threads=st.integers(1, 3),
)
def test_continuations_share_their_prefix_and_nothing_else(common, tails, seed, threads):
    """KV of one token depends on the tokens up to it only; the tests' KV too: it is made from the block's key."""
    spec = KVSpec(2, 2, 8, "float32", block_tokens=4)
    with kvtier.open({"cpu": {"capacity": "2MiB"}}, threads=threads) as cache:
        space = space_of(cache, spec)
        prompts = [[*range(common * 4), *range(1000 * n, 1000 * n + tail * 4)] for n, tail in enumerate(tails, 1)]
        new = [space.save(prompt, kv_by_key(space, prompt)).result(30.0) for prompt in prompts]
        assert sum(saved.blocks for saved in new) == common + sum(tails)
        for prompt in [*prompts, [*prompts[0], 7, 7, 7, 7, 7]]:
            out = np.zeros((2, 2, len(prompt), 2, 8), np.float32)
            with space.match(prompt) as hit:
                count = hit.load(out, verify=True)
            assert count >= min(len(prompt), common * 4)
            assert np.array_equal(out[:, :, :count], kv_by_key(space, prompt)[:, :, :count])


def kv_by_key(space, prompt):
    kv = np.zeros((2, 2, len(prompt), 2, 8), np.float32)
    for i, key in enumerate(space.keyspace.chain(prompt)):
        rng = np.random.default_rng(list(key))
        kv[:, :, 4 * i : 4 * i + 4] = rng.standard_normal((2, 2, 4, 2, 8), np.float32)
    return kv


@contextmanager
def one_chain(plan="raw"):
    """Five blocks in a cache of their own."""
    spec = KVSpec(2, 2, 16, "float32", block_tokens=4)
    with kvtier.open({"cpu": {"capacity": "1MiB"}}) as cache:
        space = space_of(cache, spec, plan)
        kv = np.random.default_rng(5).standard_normal((2, 2, 20, 2, 16), np.float32)
        assert space.save(range(20), kv).result(30.0).blocks == 5
        yield cache, space, kv


@FEW
@given(data=st.data(), plan=st.sampled_from(["raw", "int8", "sinks:2(K=int4/group:8/asym,V=e4m3/token/sym)"]))
def test_a_flipped_bit_is_never_verified(data, plan):
    """Anywhere in a payload: the load ends before it, the block is condemned and counted, the rest stays."""
    with one_chain(plan) as (cache, space, _):
        with space.match(range(20)) as hit:
            reference = np.zeros((2, 2, 20, 2, 16), np.float32)
            assert hit.load(reference) == 20
            block = data.draw(st.integers(0, 4))
            offset, nbytes = int(hit._slots["offset"][block]), int(hit._slots["nbytes"][block])
            at = data.draw(st.integers(0, nbytes - 1))
            cache.session.writable()[offset + at] ^= 1 << data.draw(st.integers(0, 7))
            out = np.zeros_like(reference)
            count = hit.load(out, verify=True)
            header = hit._scope.headers.nbytes
        # All that a reader knows is compared. It does not know when a block expires (the host does), nor the header's
        # own checksum, which covers that.
        seen = not (128 <= at < 136 or header - 8 <= at < header)
        assert count == hit.verified == (block * 4 if seen else 20)
        assert np.array_equal(out[:, :, :count], reference[:, :, :count])
        why = "bad_header" if at < header and not 32 <= at < 40 else "bad_checksum"
        assert cache.counters == ({why: 1} if seen else {})
        assert cache.status()["faults"] == ({why: 1} if seen else {})
        assert [one is not None for one in space.inspect(range(20))] == [i != block or not seen for i in range(5)]


@FEW
@given(lost=st.lists(st.integers(0, 4), min_size=1), during=st.booleans())
def test_what_was_granted_again_is_not_verified_and_not_condemned(lost, during):
    with one_chain() as (cache, space, kv):
        generations = cache.session._hierarchy.arena.generations

        def lose():
            generations[hit._slots["offset"][lost].astype(np.int64) // PAGE] += np.uint32(1)

        with space.match(range(20)) as hit:
            if during:
                decode = hit._decode
                hit._decode = lambda *args: (decode(*args), lose())
            else:
                lose()
            out = np.zeros_like(kv)
            count = hit.load(out, verify=True)
        assert count == 4 * min(lost)
        assert np.array_equal(out[:, :, :count], kv[:, :, :count])
        assert cache.counters == {}
        assert all(space.inspect(range(20)))


@settings(max_examples=60, deadline=None)
@given(spec=specs(), rank=st.integers(0, 2), count=st.integers(1, 5), data=st.data())
def test_headers_are_made_and_checked_alike(cache, spec, rank, count, data):
    """Each header that is made passes, in its place and for its key only."""
    plan = data.draw(plans(spec))
    space = cache.keyspace(spec, model="m", revision="1", plan=plan, tp_size=3, rank=rank)
    headers: Headers = space._scope.headers
    addresses = space.chain(range(count * spec.block_tokens)).addresses
    memory = np.zeros(count * PAGE, np.uint8)
    offsets = np.arange(count, dtype=np.int64) * PAGE
    for i, (key, offset) in enumerate(zip(addresses, offsets, strict=True)):
        memory[offset : offset + headers.nbytes] = np.frombuffer(headers.make(key[:32], i, 99 + i), np.uint8)
    assert headers.matching(memory, offsets, addresses) == count
    assert headers.matching(memory, offsets[::-1].copy(), addresses) in (0, count // 2, 1) or count == 1
    assert headers.matching(memory, offsets, [bytes(34), *addresses[1:]]) == 0


def test_torch_tensors_are_taken_as_they_are(cache):
    spec = KVSpec(2, 2, 8, "bfloat16", block_tokens=4)
    space = space_of(cache, spec)
    kv = torch.randn(2, 2, 12, 2, 8).to(torch.bfloat16)
    ids = torch.arange(12)
    assert space.save(ids, kv).result(30.0).blocks == 3
    out = torch.zeros(2, 2, 2, 12, 8, dtype=torch.bfloat16).transpose(2, 3)
    with space.match(ids) as hit:
        assert hit.load(out) == 12
    assert torch.equal(out, kv)
