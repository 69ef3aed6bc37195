"""Recipes as text: what is written is what is meant, whatever the model; what is not is told what to write."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.advisor.strategies import read_measured
from kvtier.errors import ConfigError
from kvtier.flow.recipe import NAMED, Recipe, parse_recipe
from kvtier.pruning import h2o, parse_policy, snap_kv
from kvtier.spec import KVSpec
from kvtier_services.planning import recipe_of

SPEC = KVSpec(30, 3, 64, "bfloat16")

plans = st.sampled_from(["raw", "int8", "int4", "int3", "k8v4", "K=raw,V=int8/token/sym", "sinks:4(int8/token/sym)"])
policies = st.none() | st.sampled_from(["snap_kv(0.5)", "h2o(100)", "streaming_llm", str(snap_kv(0.3))])


@st.composite
def parts(draw):
    plan, policy = draw(plans), draw(policies)
    return plan if policy is None else f"{plan}*{policy}"


@st.composite
def recipes(draw):
    edges = sorted(draw(st.sets(st.integers(1, 29), max_size=3)))
    ranges = zip([0, *edges], [*edges, 30], strict=True)
    if draw(st.booleans()):
        what = ";".join(f"{a}-{b - 1}:{draw(parts())}" for a, b in ranges)
    else:
        what = ";".join(f"{a}/30-{b}/30:{draw(parts())}" for a, b in ranges)
    text = draw(st.sampled_from([f"layers({what})", draw(parts()), draw(st.sampled_from(list(NAMED))), "layered"]))
    recent = draw(st.sampled_from(["", ";recent:0", ";recent:200", ";recent:0.25", ";recent:0.00001"]))
    return text + recent + draw(st.sampled_from(["", ";every:7"]))


@given(recipes())
def test_a_recipes_text_is_that_recipe(text):
    recipe = parse_recipe(text)
    assert parse_recipe(str(recipe)) == recipe
    one = recipe.canonical(SPEC)
    assert one.resolve(SPEC) == recipe.resolve(SPEC)
    assert one.canonical(SPEC) == one
    assert parse_recipe(str(one)) == one
    policies = [layer.policy for layer in recipe.resolve(SPEC) if layer.policy]
    assert {policy.every for policy in policies} <= {recipe.every}


def test_the_split_is_40_48_40():
    """Of 30 layers 9, 12 and 9, rounded as plans round; of 128 just these."""
    for layers, edges in ((30, (9, 21)), (128, (40, 88))):
        spec = KVSpec(layers, 1, 64, "bfloat16")
        found = parse_recipe("split").resolve(spec)
        keeps = [layer.policy and layer.policy.budget.keep for layer in found]
        first, second = edges
        assert keeps == [0.6] * first + [0.8] * (second - first) + [None] * (layers - second)
        assert [layer.exact for layer in found] == [False] * second + [True] * (layers - second)
        assert found[0].plan.sinks == 1


def test_one_policy_for_a_plan_that_differs_by_layer():
    found = parse_recipe("layers(0-1/2:int4;1/2-1:raw)*snap_kv(0.7)").resolve(SPEC)
    assert {layer.policy for layer in found} == {parse_policy("snap_kv(0.7)")}
    assert [layer.exact for layer in found] == [False] * 15 + [True] * 15


def test_what_is_the_same_has_one_text():
    same = ["int4;recent:64", "int4", "layers(0-1/2:int4;1/2-1:int4)", "layers(0-29:int4)", "default;recent:64"]
    assert len({parse_recipe(text).text(SPEC, bytes(32)) for text in same}) == 1
    other = ["int4;recent:65", "int4;every:99", "int8", "int4*snap_kv(0.7)", "raw"]
    assert len({parse_recipe(text).text(SPEC, bytes(32)) for text in (*other, "int4")}) == 6
    with pytest.raises(ConfigError, match="32 of a SHA-256"):
        parse_recipe("int4").text(SPEC, b"short")
    text = parse_recipe("int8;recent:0").text(SPEC, bytes(range(32)))
    whole = "K=int8/channel:64/asym,V=int8/token/asym"
    assert text == f"flow/1(layers(0-29:{whole});recent:0;every:100)@{bytes(range(32)).hex()}"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("int5", "no plan 'int5'"),
        ("", "no plan"),
        ("int4*snapkv(0.7)", "did you mean snap_kv"),
        ("int4*", "no pruning policy"),
        ("int4;recnt:64", "write ;recent:64"),
        ("int4;recent:-1", "no option"),
        ("int4;recent:1.5", "or a share of them"),
        ("int4;recent:64;recent:32", "says recent twice"),
        ("int4;every:0", "1 or more"),
        ("int4*snap_kv(0.5)(0.3)", "it is no call"),
        ("int4*snap_kv(0.5).h2o(0.3)", "it is no call"),
        ("int4*snap_kv(keep=0.5,keep=0.6)", "stands there twice"),
        ("int4*snap_kv(True)", "True is no number"),
        ("int4*streaming_llm(compact=1)", "1 is no True or False"),
        ("int4*snap_kv(0.5,recent=9999999999)", "more than 999,999,999"),
        ("int4*snap_kv(0.5,kernel=7.0)", "kernel an odd number"),
        ("int4*pyramid_kv(0.5,beta=2.5)", "a whole number"),
        (str(snap_kv(0.5)).replace("sinks:0", "sinks:9999999999").join(["int4*", ""]), "9 at most"),
        ("int4;every:0.5", "every:100"),
        ("recent:64(int4)", "a recipe says itself what is recent"),
        ("int4*streaming_llm(compact=True)", "compact=False"),
        ("layers(0-9:int4;10-29:layered)", "differs by layer or age itself"),
        ("layers(0-9:int4;10-29:mixed)", "differs by layer or age itself"),
        ("layers(int4)", "no range of layers"),
        ("layers(0-1/2:int4)", "layer 15 has no plan"),
        ("layers(0-20:int4;20-29:int8)", "layer 20 has two plans"),
        ("layers(0-30:int4)", "no layer 30"),
    ],
)
def test_what_cannot_be_read_is_refused(text, says):
    with pytest.raises(ConfigError, match=re.escape(says)):
        parse_recipe(text).resolve(SPEC)


def test_a_named_recipe_takes_options():
    assert parse_recipe("default") == parse_recipe("int4;recent:128")
    assert parse_recipe("default;every:5") == parse_recipe("int4;recent:128;every:5")
    assert parse_recipe("split;recent:0.1").recent == 0.1


def test_what_is_no_text_is_refused():
    with pytest.raises(ConfigError, match="NoneType"):
        parse_recipe(None)
    with pytest.raises(ConfigError, match="1 or more"):
        Recipe(parse_recipe("int4").stages, every=1.5)
    for recent in (float("nan"), "64", True, -1, 1.5):
        with pytest.raises(ConfigError, match="recent is"):
            Recipe(parse_recipe("int4").stages, recent=recent)


@pytest.mark.parametrize(
    "policy", ["h2o(keep=0.75)", "snap_kv(0.5)", "streaming_llm(sinks=4, recent=60)", str(h2o(0.3))]
)
def test_a_policy_alone_leaves_precision_as_it_is(policy):
    assert parse_recipe(policy) == parse_recipe(f"raw*{policy}")
    assert parse_recipe(f"layers(0-1/2:{policy};1/2-1:int4)") == parse_recipe(f"layers(0-1/2:raw*{policy};1/2-1:int4)")


def test_every_measured_strategy_can_be_done():
    """What `kvtier advise` recommends is a recipe."""
    assert all(parse_recipe(recipe_of(strategy)) for strategy in read_measured(None).strategies)
