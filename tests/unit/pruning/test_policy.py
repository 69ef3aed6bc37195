"""What a policy promises, and its text."""

import hashlib
from dataclasses import FrozenInstanceError, replace

import pytest
import torch

from kvtier.errors import ConfigError
from kvtier.keys import Keyspace
from kvtier.pruning import (
    ByHead,
    Evidence,
    KeyNorm,
    Length,
    Mass,
    Policy,
    Pyramid,
    Ratio,
    Recency,
    Window,
    attention_threshold,
    h2o,
    pyramid_kv,
    snap_kv,
    streaming_llm,
)
from kvtier.spec import KVSpec

TEXTS = {
    "prune/1(mass*ratio:0.7,sinks:0,recent:0/0.5,every:100,whole:512,positions:kept)": h2o(),
    "prune/1(recency*length:516,sinks:4,recent:512/0.0,every:100,whole:0,positions:kept)": streaming_llm(),
    "prune/1(window:32/max:7*ratio:0.7,sinks:0,recent:32/0.0,every:100,whole:512,positions:kept)": snap_kv(),
    "prune/1(window:32/max:7*pyramid:20(ratio:0.7),sinks:0,recent:32/0.0,every:100,whole:512,positions:kept)": (
        pyramid_kv()
    ),
    "prune/1(mass/mean*threshold:0.001,sinks:4,recent:32/0.0,every:100,whole:512,positions:kept)": (
        attention_threshold(0.001)
    ),
    "prune/1(mass*byhead:0.2(pyramid:20(length:64)),sinks:4,recent:8/0.0,every:10,whole:0,positions:compact)": Policy(
        Mass(), ByHead(Pyramid(Length(64))), recent=8, every=10, whole=0, compact=True
    ),
    "prune/1(keynorm*ratio:1.0,sinks:4,recent:32/0.0,every:100,whole:512,positions:kept)": Policy(KeyNorm(), Ratio(1)),
}


@pytest.mark.parametrize("text", TEXTS)
def test_texts_are_what_they_were(text):
    assert str(TEXTS[text]) == text


def test_policies_are_values():
    assert h2o(0.5) == h2o(0.5)
    assert hash(h2o(0.5)) == hash(h2o(0.5))
    with pytest.raises(FrozenInstanceError):
        h2o().sinks = 8


def test_a_recipe_makes_keys_of_its_own():
    exact = Keyspace(KVSpec(2, 2, 8, "bfloat16"), "m", "0", "raw")
    contexts = [hashlib.sha256(text).digest() for text in (b"one", b"two")]
    recipes = [policy.recipe(context) for policy in (h2o(), h2o(0.6)) for context in contexts]
    roots = {replace(exact, recipe=recipe).root for recipe in ["", *recipes]}
    assert len(roots) == 5


def test_a_recipe_needs_the_whole_digest():
    with pytest.raises(ConfigError, match="SHA-256"):
        h2o().recipe(b"\0" * 16)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: snap_kv(recent=16), "recent=32"),
        (lambda: Policy(KeyNorm(), ByHead(Ratio(0.5))), "KV heads"),
        (lambda: attention_threshold(recent_share=0.5), "recent="),
        (lambda: h2o(every=0), "every"),
        (lambda: h2o(sinks=-1), "sinks"),
        (lambda: h2o(recent_share=2.0), "recent_share"),
    ],
)
def test_policies_that_cannot_be(make, says):
    with pytest.raises(ConfigError, match=says):
        make()


def evidence(heads, tokens, **rest):
    keys = torch.randn(heads, tokens, 4, generator=torch.Generator().manual_seed(0))
    return Evidence(keys, keys, torch.arange(tokens).expand(heads, tokens), tokens, 0.5, **rest)


def test_h2o_keeps_as_many_heavy_as_recent():
    # Of 20 tokens 8: the last 4, and of the others the 4 with most mass.
    mass = torch.arange(20.0).roll(7)[None]
    kept = h2o(8, whole=0).choose(evidence(1, 20, mass=mass, seen=mass), layer=0, layers=1)
    assert kept.columns.tolist() == [[3, 4, 5, 6, 16, 17, 18, 19]]


def test_streaming_llm_keeps_sinks_and_window():
    policy = streaming_llm(sinks=2, recent=3)
    assert policy.choose(evidence(1, 9), layer=0, layers=1).positions.tolist() == [[0, 1, 6, 7, 8]]
    assert policy.choose(evidence(1, 5), layer=0, layers=1).positions.tolist() == [[0, 1, 2, 3, 4]]
    assert policy.choose(evidence(1, 4), layer=0, layers=1).positions.tolist() == [[0, 1, 2, 3]]


def test_short_sequences_stay_whole():
    assert Policy(KeyNorm(), Ratio(0.5), whole=20).choose(evidence(1, 20), layer=0, layers=1).counts == [20]
    assert Policy(KeyNorm(), Ratio(0.5), recent=4, whole=19).choose(evidence(1, 20), layer=0, layers=1).counts == [10]


def test_the_protected_stay_beyond_the_budget():
    policy = Policy(Recency(), Length(3), sinks=2, recent=4, whole=0)
    assert policy.choose(evidence(2, 20), layer=0, layers=1).positions.tolist() == [[0, 1, 16, 17, 18, 19]] * 2


def test_something_always_stays():
    seen = torch.full((2, 20), 1e9)
    policy = attention_threshold(sinks=0, recent=0, whole=0)
    assert policy.choose(evidence(2, 20, mass=torch.ones(2, 20), seen=seen), layer=0, layers=1).counts == [1, 1]


def test_scores_that_are_no_numbers_go_first():
    mass = torch.tensor([[torch.nan, 1.0, torch.inf, 2.0]])
    policy = Policy(Mass(), Length(2), sinks=0, recent=0, whole=0)
    assert policy.choose(evidence(1, 4, mass=mass, seen=mass), layer=0, layers=1).columns.tolist() == [[2, 3]]


def test_the_youngest_are_protected_by_number_or_by_share():
    assert Policy(Window(8), Ratio(0.5), recent=8).youngest(1000) == 8
    assert Policy(Window(8), Ratio(0.5), recent=8, recent_share=0.5).youngest(1000) == 250
    assert Policy(Window(8), Ratio(0.5), recent=8, recent_share=0.5).youngest(10) == 8


@pytest.mark.parametrize("preset", [snap_kv, pyramid_kv])
def test_a_window_alone_is_no_budget(preset):
    """Without the first tokens, and all but the last, a model says nothing sensible."""
    for keep in (1, 32):
        with pytest.raises(ConfigError, match="leaves nothing but the window of 32 tokens"):
            preset(keep)
    assert preset(33).budget
    assert preset(0.01).budget
