"""What a strategy's text means, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.quality.presets import OTHERS, policies, policy
from benchmarks.quality.strategies import COMBINED, CONTROLS, PRUNED, SPLIT, parse, standard
from kvtier.codecs.plan import NAMED, parse_plan, resolve
from kvtier.errors import ConfigError
from kvtier.flow.recipe import parse_recipe
from kvtier.pruning import h2o, snap_kv, streaming_llm
from kvtier.pruning.text import PRESETS
from kvtier.spec import KVSpec


@pytest.mark.parametrize(
    ("text", "plan", "pruning"),
    [
        ("int4", "int4", None),
        (
            "sinks:1(K=int4/channel:64/asym,V=int4/token/asym)",
            "sinks:1(K=int4/channel:64/asym,V=int4/token/asym)",
            None,
        ),
        ("layers(0-1/2:int4;1/2-1:sinks:1(int8))", "layers(0-1/2:int4;1/2-1:sinks:1(int8))", None),
        ("recent:128(int4)", "recent:128(int4)", None),
        ("snap_kv(keep=0.5)", "raw", "snap_kv(keep=0.5)"),
        ("int3*snap_kv(keep=0.5, window=16)", "int3", "snap_kv(keep=0.5, window=16)"),
        ("layers(0-1/2:int4*h2o(keep=0.5);1/2-1:raw)", "layers(0-1/2:int4;1/2-1:raw)", "layers(0-1/2:h2o(keep=0.5))"),
        (str(h2o(0.5)), "raw", str(h2o(0.5))),
        (f"k8v4*{h2o(0.5)}", "k8v4", str(h2o(0.5))),
    ],
)
def test_a_strategy_is_a_plan_a_pruning_or_both(text, plan, pruning):
    found = parse(text, "any")
    assert (found.name, found.plan, found.pruning, found.unrotated) == (text, plan, pruning, False)


def test_a_preset_is_the_librarys_with_short_texts_pruned_too():
    assert policy("snap_kv(keep=0.5)") == snap_kv(0.5, whole=0)
    assert policy("h2o(keep=100, whole=300)") == h2o(100, whole=0)
    assert policy("streaming_llm(sinks=2, recent=62)") == streaming_llm(2, 62)


def test_policies_by_layer_meet_where_plans_by_layer_meet():
    """Layers of the pruned split lose tokens where plans quantise them, whatever the number of layers."""
    for layers in (1, 3, 8, 16, 22, 30, 32):
        found = policies(parse(SPLIT, "any").pruning, layers)
        bottom, middle = (int(share * layers + 0.5) for share in (40 / 128, 88 / 128))
        expected = [snap_kv(0.6, whole=0)] * bottom + [snap_kv(0.8, whole=0)] * (middle - bottom)
        assert found == expected + [None] * (layers - middle)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("int5", "did you mean"),
        ("snapkv(keep=0.5)", "did you mean snap_kv"),
        ("snap_kv(keep=0.5", "cannot be read"),
        ("snap_kv(keep=1.5)", "share above 0, up to 1"),
        ("key_norm(keep=1.5)", "share above 0, up to 1"),
        ("int5*snap_kv(keep=0.5)", "did you mean"),
        ("streaming_llm(sinks=4, recent=60, compact=True) unrotated", "leave it out"),
        ("layers(0-1/0:snap_kv(keep=0.5))", "is no layer"),
        ("layers(0-9:snap_kv(keep=0.5))", "no layer 9; the model has 4"),
        ("layers(0-3/4:snap_kv(keep=0.5);1/4-1:snap_kv(keep=0.5))", "two policies"),
    ],
)
def test_what_is_wrong_is_said(text, says):
    with pytest.raises(ConfigError, match=says):
        policies(parse(text, "any").pruning, 4)


def test_the_standard_set_has_every_plan_and_every_preset_at_every_budget():
    made = standard(1024)
    assert len({one.name for one in made}) == len(made)
    assert {one.plan for one in made if not one.pruning} >= set(NAMED)
    for preset in (*PRESETS, *OTHERS):
        budgets = [one for one in made if one.group == PRUNED and one.name.startswith(preset + "(")]
        assert len(budgets) >= 3, preset
    assert any(one.unrotated for one in made if one.group == CONTROLS)
    for one in made:
        parse_plan(one.plan)
        if one.pruning:
            policies(one.pruning, 30)


@pytest.mark.parametrize("text", [*COMBINED, "layers(0-1/3:int4*h2o(keep=0.5);1/3-1:int8)"])
def test_plans_with_prunings_are_recipes_of_the_flow(text):
    """The same text means the same there, but for short sequences."""
    spec, found = KVSpec(30, 3, 64, "bfloat16"), parse(text, "any")
    layers = parse_recipe(text).resolve(spec)
    assert [layer.plan for layer in layers] == list(resolve(parse_plan(found.plan), spec))
    assert [layer.policy and replace(layer.policy, whole=0) for layer in layers] == policies(found.pruning, 30)


@pytest.mark.parametrize("context", [64, 128, 1024, 4096])
def test_streaming_llm_keeps_the_budgets_of_the_others(context):
    kept = [
        policy(one.pruning).budget.tokens / context
        for one in standard(context)
        if one.group == PRUNED and one.name.startswith("streaming_llm")
    ]
    assert kept == [0.75, 0.5, 0.25, 0.125]
