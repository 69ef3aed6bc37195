"""What it costs a model to hold less: that the measuring is right, and what must hold on the real one.

Margins are wide: losses differ by text, and what is asserted is what users are told in docs/quality.md.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from transformers import DynamicCache

from benchmarks.quality.measure import measure
from benchmarks.quality.model import load
from benchmarks.quality.passage import go_on, read
from benchmarks.quality.presets import policy
from benchmarks.quality.pruned import pruned
from benchmarks.quality.stored import stored, stored_heads
from benchmarks.quality.strategies import BUDGETS, SPLIT, parse
from benchmarks.quality.texts import texts
from benchmarks.quality.unusable import Unusable
from kvtier.codecs.plan import NAMED
from kvtier.connectors.transformers import spec_for
from kvtier.connectors.transformers.forward import cache_argument
from kvtier.pruning import Pruner, prune, watched
from kvtier_services.demo.model import require_packages
from tests.transformers_fixture import make, words

CONTEXT, TOKENS = 256, 24
EVERYTHING = (
    "snap_kv(keep=1.0)",
    "h2o(keep=0.5)",
    "ada_kv(keep=0.5)",
    "pyramid_kv(keep=0.5)",
    "attention_threshold(weight=0.003)",
    "key_norm(keep=0.5)",
    "streaming_llm(sinks=4, recent=60, compact=True)",
    "int4*snap_kv(keep=0.5)",
    "int3*ada_kv(keep=0.5)",
    "mixed*h2o(keep=0.5)",
    SPLIT,
)


class Reader:
    """A tokenizer of texts that are their own numbers."""

    def __call__(self, _text, **_):
        return SimpleNamespace(input_ids=words(7, CONTEXT + TOKENS + 1)[None])


@pytest.mark.parametrize("kind", ["Llama", "Qwen3", "Mistral", "Phi3"])
def test_any_model_is_measured(kind):
    model = make(kind, **({"sliding_window": None} if kind in ("Mistral", "Phi3") else {}))
    results = measure(
        model,
        Reader(),
        [parse(text, "any") for text in ("raw", "int4", *EVERYTHING)],
        texts()[:2],
        context=CONTEXT,
        tokens=TOKENS,
        say=lambda _: None,
    )
    found = {one.name: one for one in results}
    assert found["raw"].mean("kl").value == 0
    assert found["snap_kv(keep=1.0)"].mean("kl").value < 1e-9, "a watched model that loses nothing is the model"
    for one in results:
        assert one.mean("kl").value >= -1e-12
        assert one.share == pytest.approx(one.keep * one.bits / 16)
    for name in ("h2o(keep=0.5)", "ada_kv(keep=0.5)", "pyramid_kv(keep=0.5)", "key_norm(keep=0.5)"):
        assert found[name].keep == pytest.approx(0.5)
        assert found[name].mean("kl").value > 0
    assert found["streaming_llm(sinks=4, recent=60, compact=True)"].keep == 0.25
    assert 0 < found["attention_threshold(weight=0.003)"].keep < 1
    # 3 layers: the bottom keeps .6 of 256 tokens, the middle .8, the top all.
    assert found[SPLIT].keep == pytest.approx((154 / 256 + 205 / 256 + 1) / 3)


def test_what_is_measured_is_what_a_pruned_cache_answers():
    """Predictions over what is left are those of a model whose cache the library pruned, in its own bfloat16 KV."""
    model, strategy = make(), parse("ada_kv(keep=0.5)", "any")
    passage = read(model, Reader(), texts()[0], CONTEXT, TOKENS, window=32)
    left = pruned(passage.kv, passage.evidence, strategy, model)
    found = go_on(model, passage.ids, left.kv, left)

    pruner, cache = Pruner(policy(strategy.pruning), 3), DynamicCache(config=model.config)
    ids = words(7, CONTEXT + TOKENS + 1)[None]
    with torch.no_grad(), watched(model, pruner):
        model(ids[:, :CONTEXT], **{cache_argument(model): cache}, use_cache=True)
        prune(cache, pruner)
        for layer in cache.layers:
            layer.keys, layer.values = layer.keys.bfloat16().float(), layer.values.bfloat16().float()
        at = torch.arange(CONTEXT, CONTEXT + TOKENS)[None]
        logits = model(ids[:, CONTEXT:-1], **{cache_argument(model): cache}, position_ids=at).logits[0]
    torch.testing.assert_close(found, logits.double().log_softmax(-1), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("plan", NAMED)
def test_heads_that_lost_nothing_are_stored_as_blocks_are(plan):
    model = make()
    spec = replace(spec_for(model), dtype="bfloat16")
    passage = read(model, Reader(), texts()[0], CONTEXT, TOKENS)
    whole, bits = stored(passage.kv, spec, plan)
    heads, each = stored_heads(passage.kv, [[CONTEXT] * 2] * 3, spec, plan)
    for (keys, values), (others, rest) in zip(whole, heads, strict=True):
        assert torch.equal(keys, others)
        assert torch.equal(values, rest)
    assert each == pytest.approx(bits, rel=0.01), "but for what aligns the parts of a block"


def test_attention_that_cannot_be_watched_is_refused():
    model = make()
    model.set_attn_implementation("flex_attention")
    strategies = [parse(text, "any") for text in ("int4", "h2o(keep=0.5)")]
    lengths = {"context": CONTEXT, "tokens": TOKENS, "say": lambda _: None}
    with pytest.raises(Unusable, match=r"flex_attention.*--no-pruning"):
        measure(model, Reader(), strategies, texts()[:1], **lengths)


REAL = (
    *("raw", "int8", "int4", "snap_kv(keep=0.75)", "snap_kv(keep=0.5)", "snap_kv(keep=0.25)", "snap_kv(keep=0.125)"),
    *("h2o(keep=0.75)", "h2o(keep=0.5)", "h2o(keep=0.25)", "h2o(keep=0.125)"),
    *("h2o(keep=0.5, recent_share=0.0)", "h2o(keep=0.25, recent_share=0.0)", "pyramid_kv(keep=0.5)"),
    *("streaming_llm(sinks=4, recent=508)", "streaming_llm(sinks=0, recent=512)"),
    *("streaming_llm(sinks=4, recent=508, compact=True)", "streaming_llm(sinks=4, recent=508) unrotated"),
    "int4*snap_kv(keep=0.5)",
)


@pytest.fixture(scope="module")
def kl():
    """Mean KL of each strategy over a text of each kind, on SmolLM2-135M-Instruct."""
    require_packages()
    model, tokenizer = load(None, 1)
    results = measure(
        model,
        tokenizer,
        [parse(text, "any") for text in REAL],
        texts()[:4],
        context=1024,
        tokens=64,
        say=lambda _: None,
    )
    return {one.name: one.mean("kl").value for one in results}


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["snap_kv", "h2o"])
def test_more_budget_is_never_worse(kl, preset):
    losses = [kl[f"{preset}(keep={keep})"] for keep in BUDGETS]
    assert all(more < 1.1 * less for more, less in pairwise(losses))
    assert losses[0] < losses[-1] / 5


@pytest.mark.slow
def test_a_window_without_sinks_is_worse_by_far(kl):
    assert kl["streaming_llm(sinks=0, recent=512)"] > 5 * kl["streaming_llm(sinks=4, recent=508)"]


@pytest.mark.slow
@pytest.mark.parametrize("keep", [0.5, 0.25])
def test_h2o_needs_its_recent_half(kl, keep):
    assert kl[f"h2o(keep={keep}, recent_share=0.0)"] > 1.5 * kl[f"h2o(keep={keep})"]


@pytest.mark.slow
def test_closing_up_is_right_with_rotation_and_destroys_the_cache_without(kl):
    apart = kl["streaming_llm(sinks=4, recent=508)"]
    assert kl["streaming_llm(sinks=4, recent=508, compact=True)"] == pytest.approx(apart, rel=0.25)
    assert kl["streaming_llm(sinks=4, recent=508) unrotated"] > 10 * apart


@pytest.mark.slow
def test_quantising_beats_pruning_at_equal_bytes(kl):
    half = [loss for name, loss in kl.items() if "keep=0.5" in name or "recent=508" in name]
    assert kl["int8"] < min(half) / 20
    assert kl["int4"] < min(kl["snap_kv(keep=0.25)"], kl["h2o(keep=0.25)"]) / 3


@pytest.mark.slow
def test_what_is_kept_can_be_quantised_too(kl):
    both = kl["int4*snap_kv(keep=0.5)"]
    assert 0.8 * kl["snap_kv(keep=0.5)"] < both < 2 * (kl["snap_kv(keep=0.5)"] + kl["int4"])
    assert both < kl["snap_kv(keep=0.125)"] / 2, "at nearly equal bytes"


@pytest.mark.slow
def test_a_pyramid_is_no_better_than_a_uniform_budget_on_this_model(kl):
    assert kl["pyramid_kv(keep=0.5)"] > kl["snap_kv(keep=0.5)"]
