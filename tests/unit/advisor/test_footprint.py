"""Bytes of KV under plans, pruning and pages, against hand computations, codecs and a growing sequence."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.advisor.footprint import Footprint, Storage, keep_of, storage_of
from kvtier.advisor.models import spec_of
from kvtier.codecs.plan import NAMED
from kvtier.codecs.registry import codec_for
from kvtier.errors import ConfigError
from kvtier.pruning import Evidence, KeyNorm, Length, Policy, Ratio, attention_threshold, h2o, pyramid_kv, streaming_llm
from kvtier.spec import KVSpec

GIB = 1 << 30
SPEC = KVSpec(4, 2, 32, "bfloat16")
BLOCKS = [plan for plan in NAMED if plan != "mixed"]


@pytest.mark.parametrize(("context", "gib"), [(2048, 1), (4096, 2), (8192, 4), (32_768, 16)])
@pytest.mark.parametrize("model", ["llama-7b", "llama-2-7b"])
def test_llama_7b_in_fp16(model, context, gib):
    """K and V x 32 layers x 32 heads x 128 x 2 bytes is half a MiB a token."""
    footprint = Footprint(spec_of(model, 64))
    assert 2 * 32 * 32 * 128 * 2 * context == gib * GIB
    assert footprint.held(context) == footprint.most(context) == gib * GIB
    assert footprint.longest(gib * GIB) == context
    assert footprint.sequences(5 * gib * GIB + 1, context) == 5
    assert footprint.longest(5 * gib * GIB, 5) == context


def test_int4_of_llama_by_hand():
    """A block of 64 tokens of 8 heads of 128: K and V have half a byte an element; K a scale and a zero point for each
    channel, V for each token and head, 2 bytes each; the first block one exact token in place of a coded one."""
    codes, channels, rows = 64 * 1024 // 2, 2 * 2 * 1024, 2 * 2 * 64 * 8
    later = 32 * (2 * codes + channels + rows)
    exact = 2 * 1024 * 2 - 2 * 512 - 2 * 2 * 8
    first = later + 32 * exact
    footprint = Footprint(spec_of("llama-3.1-8b", 64), Storage("int4"))
    # Each part is filled up to 64 bytes: V's 32 bytes less for the exact token leave it 32 short.
    assert footprint.held(64) == first + 32 * 32
    assert footprint.held(64 * 11) - footprint.held(64 * 10) == later
    assert 8 * later / (64 * 32 * 2 * 1024) == 4.375
    assert footprint.bits(1 << 20) == pytest.approx(4.375, abs=0.001)


@pytest.mark.parametrize("plan", BLOCKS)
@pytest.mark.parametrize(
    "spec", [SPEC, KVSpec(3, 1, 96, "float32", mla=True), KVSpec(5, 3, 40, "float16", v_head_dim=24)]
)
def test_blocks_have_the_bytes_of_their_codec(plan, spec):
    codec, footprint = codec_for(plan, spec), Footprint(spec, Storage(plan, page_tokens=1))
    assert footprint.held(64) == codec.nbytes(0)
    assert footprint.held(64 * 7) == codec.nbytes(0) + 6 * codec.nbytes(1)


def test_tokens_that_make_no_block_stay_as_they_are_in_pages():
    footprint = Footprint(SPEC, Storage("int8", page_tokens=16))
    blocks = Footprint(SPEC, Storage("int8")).held(128)
    assert footprint.held(128 + 17) == blocks + 32 * SPEC.token_nbytes
    assert footprint.waste(128 + 17) == 15 * SPEC.token_nbytes
    assert Footprint(SPEC, Storage(page_tokens=64)).waste(65) == 63 * SPEC.token_nbytes
    assert Footprint(SPEC).held(65) == 80 * SPEC.token_nbytes


@pytest.mark.parametrize("storage", [Storage("mixed"), Storage(NAMED["int4"], recent=128)])
def test_the_youngest_stay_as_they_are(storage):
    footprint, old = Footprint(SPEC, storage), Footprint(SPEC, Storage("int4"))
    assert footprint.held(128) == 128 * SPEC.token_nbytes
    assert footprint.held(128 + 640) == old.held(640) + 128 * SPEC.token_nbytes


def test_a_share_of_the_youngest():
    """Of 1,000 tokens 250 are young; of the other 750 11 blocks are whole."""
    footprint = Footprint(SPEC, Storage("int8", recent=0.25, page_tokens=1))
    blocks = Footprint(SPEC, Storage("int8")).held(11 * 64)
    assert footprint.held(1000) == blocks + (1000 - 11 * 64) * SPEC.token_nbytes


def test_layers_apart():
    """Bottom int4 and .5 kept, the rest raw and whole."""
    footprint = Footprint(SPEC, Storage("layers(0:int4;1-3:raw)", (0.5, 1.0, 1.0, 1.0)))
    one = KVSpec(1, 2, 32, "bfloat16")
    low = Footprint(one, Storage("int4")).held(640)
    assert footprint.layers(1280) == (low, *[1280 * one.token_nbytes] * 3)
    assert footprint.kept(1280) == (640, 1280, 1280, 1280)
    assert footprint.held(1280) == sum(footprint.layers(1280))
    assert footprint.share(1280) == footprint.held(1280) / (1280 * SPEC.token_nbytes)


@pytest.mark.parametrize(
    ("policy", "length"),
    [
        (Policy(KeyNorm(), Ratio(0.3)), 1000),
        (Policy(KeyNorm(), Ratio(0.3)), 512),
        (Policy(KeyNorm(), Length(20), sinks=4, recent=32), 600),
        (Policy(KeyNorm(), Length(700)), 600),
        (streaming_llm(4, 60), 100),
        (streaming_llm(4, 60), 50),
    ],
)
def test_a_policy_keeps_what_it_says(policy, length):
    keys = torch.randn(2, length, 8, generator=torch.Generator().manual_seed(1))
    positions = torch.arange(length, dtype=torch.int32).expand(2, -1)
    kept = policy.choose(Evidence(keys, keys, positions, length, 1.0), layer=0, layers=4)
    assert Footprint(SPEC, Storage("raw", policy)).kept(length) == (kept.positions.shape[1],) * 4


def test_shares_numbers_and_policies():
    assert Footprint(SPEC, Storage(keep=0.7)).kept(1000) == (700,) * 4
    assert Footprint(SPEC, Storage(keep=100)).kept(1000) == Footprint(SPEC, Storage(keep=100)).kept(5000) == (100,) * 4
    assert Footprint(SPEC, Storage(keep=100)).kept(7) == (7,) * 4
    assert Footprint(SPEC, Storage(keep=h2o(0.25))).kept(1000) == (250,) * 4
    assert Footprint(SPEC, Storage(keep=pyramid_kv(0.5))).kept(1000) == (500,) * 4


storages = st.builds(
    Storage,
    st.sampled_from(list(NAMED)),
    st.floats(0.01, 1.0) | st.integers(1, 300) | st.sampled_from([h2o(0.5), streaming_llm(4, 100), pyramid_kv(80)]),
    recent=st.integers(0, 100) | st.floats(0, 1),
    page_tokens=st.integers(1, 64),
    every=st.integers(1, 120),
)


@settings(deadline=None, max_examples=150)
@given(storages, st.integers(1, 2000), st.integers(1, 300))
def test_more_context_never_takes_less(storage, context, more):
    footprint = Footprint(SPEC, storage)
    assert footprint.held(context) <= footprint.most(context) <= footprint.most(context + more)
    assert footprint.most(context) <= 2 * Footprint(SPEC, Storage(page_tokens=storage.page_tokens)).held(context)


@settings(deadline=None, max_examples=50)
@given(storages, st.integers(1, 700))
def test_a_growing_sequence_holds_the_most_and_no_more(storage, length):
    """Token by token: what waits for a pruning is there, too. The bound is met where nothing is pruned."""
    footprint = Footprint(SPEC, storage)
    every = getattr(storage.keep, "every", storage.every)
    greatest, pruned, n = 0, 0, 0
    for context in range(1, length + 1):
        n += 1
        if context - pruned >= every:
            n, pruned = min(n, footprint.kept(context)[0]), context
        greatest = max(greatest, sum(layer.held(n) for layer in footprint._layers))
    assert greatest <= footprint.most(length)
    if isinstance(storage.keep, float) and storage.keep == 1 and storage.plan != "layered":
        assert greatest == footprint.most(length)


@settings(deadline=None, max_examples=100)
@given(storages, st.integers(0, 1 << 24), st.integers(1, 9))
def test_what_fits_fits_and_no_more(storage, memory, sequences):
    footprint = Footprint(SPEC, storage)
    longest = footprint.longest(memory, sequences)
    if longest is None:
        assert sequences * footprint.most(1 << 40) <= memory
        return
    assert longest == 0 or sequences * footprint.most(longest) <= memory
    assert sequences * footprint.most(longest + 1) > memory
    if longest:
        assert footprint.sequences(memory, longest) >= sequences
        assert footprint.sequences(memory, longest + 1) < sequences


@pytest.mark.parametrize("context", [64, 640, 6400])
def test_fewer_bits_take_fewer_bytes(context):
    sizes = [Footprint(SPEC, Storage(plan)).held(context) for plan in ("raw", "int8", "k8v4", "int4", "int3")]
    assert sizes == sorted(sizes, reverse=True)
    assert len(set(sizes)) == len(sizes)
    kept = [Footprint(SPEC, Storage("raw", keep)).held(context) for keep in (1.0, 0.75, 0.5, 0.25)]
    assert kept == sorted(kept, reverse=True)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Storage(keep=0.0), "keep is 0.0; write a share"),
        (lambda: Storage(keep=1.5), "keep is 1.5"),
        (lambda: Storage(keep=float("nan")), "keep is nan"),
        (lambda: Storage(keep=0), "keep is 0;"),
        (lambda: Storage(keep=True), "keep is True"),
        (lambda: Storage(keep=attention_threshold()), r"threshold:0.001 keeps only a text says"),
        (lambda: Storage(page_tokens=0), "Storage.page_tokens is 0"),
        (lambda: Storage(recent=-1), "Storage.recent is -1"),
        (lambda: Storage(recent=1.5), "Storage.recent is 1.5"),
        (lambda: Footprint(SPEC, Storage("intt")), "no plan 'intt'"),
        (lambda: Footprint(SPEC, Storage(keep=(0.5, 1.0))), "what 2 layers keep; the model has 4"),
        (lambda: keep_of("half"), "'half' is no share"),
        (lambda: keep_of("0"), "keep is 0.0"),
        (lambda: keep_of("1.5"), "keep is 1.5"),
        (lambda: keep_of("120%"), "keep is 1.2"),
    ],
)
def test_what_cannot_be_is_said(make, says):
    with pytest.raises(ConfigError, match=says):
        make()


def test_as_people_write_it():
    assert (keep_of("0.7"), keep_of("70%"), keep_of("1024"), keep_of("1")) == (0.7, 0.7, 1024, 1.0)
    assert isinstance(keep_of("1024"), int)
    assert storage_of("", "", 16) is None
    assert storage_of("int4", "0.5", 8) == ("int4, keep 0.5", Storage("int4", 0.5, page_tokens=8))
    assert storage_of("", "100", 16) == ("raw, keep 100", Storage("raw", 100))
    assert storage_of("k8v4", "", 16) == ("k8v4", Storage("k8v4"))
