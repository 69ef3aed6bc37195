"""Pruning in real models: what stays is attended to as if the rest were masked, layer by layer and head by head."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from kvtier.connectors.transformers.forward import cache_argument
from kvtier.errors import UnsupportedKV, UsageError
from kvtier.pruning import (
    ByHead,
    Length,
    Mass,
    Policy,
    Pruner,
    Pyramid,
    Rope,
    Window,
    attention_threshold,
    h2o,
    prune,
    pyramid_kv,
    snap_kv,
    streaming_llm,
    watched,
)
from tests.transformers_fixture import make, words

LAYERS = 3
SMALL = {"whole": 0}
POLICIES = [
    h2o(24, **SMALL),
    streaming_llm(2, 16),
    snap_kv(24, window=8, **SMALL),
    pyramid_kv(24, window=8, beta=4, **SMALL),
    attention_threshold(0.02, recent=8, **SMALL),
    Policy(Mass(), ByHead(Pyramid(Length(24), 4)), recent=4, whole=0),
]
ids = [str(policy.scorer) + "*" + str(policy.budget) for policy in POLICIES]


@pytest.fixture(params=["eager", "sdpa"])
def model(request):
    return models(request.param)


def models(attention, kind="Llama"):
    model = make(kind)
    model.set_attn_implementation(attention)
    return model


def ask(model, cache, tokens, position):
    positions = torch.arange(position, position + len(tokens))[None]
    with torch.no_grad():
        return model(
            input_ids=tokens[None], **{cache_argument(model): cache}, position_ids=positions, use_cache=True
        ).logits[0]


def run(model, policy, calls, *, pruned_after):
    """Compute `calls` one after the other, prune after the one that is named; logits and what is left."""
    pruner = Pruner(policy, LAYERS, rope=Rope.of(model))
    cache, logits = DynamicCache(config=model.config), []
    with watched(model, pruner):
        for number, tokens in enumerate(calls):
            logits.append(ask(model, cache, tokens, pruner.next_position))
            if number == pruned_after:
                prune(cache, pruner)
    return logits, cache, pruner


def masked(model, gone, calls, *, from_call):
    """The same calls over a cache that loses nothing: what `gone` says is masked, from one call on."""
    state = {"call": 0}

    def attend(module, query, key, value, attention_mask, scaling, **_):
        tokens, new = key.shape[2], query.shape[2]
        groups = query.shape[1] // key.shape[1]
        logits = query[0] @ key[0].repeat_interleave(groups, 0).transpose(1, 2) * scaling
        sees = torch.ones(new, tokens, dtype=torch.bool).tril(tokens - new).expand(key.shape[1], -1, -1).clone()
        if state["call"] >= from_call:
            hidden = gone[module.layer_idx]
            sees[:, :, : hidden.shape[1]] &= ~hidden[:, None]
        logits = logits.masked_fill(~sees.repeat_interleave(groups, 0), -torch.inf)
        return (logits.softmax(-1) @ value[0].repeat_interleave(groups, 0)).transpose(0, 1)[None], None

    AttentionInterface.register("masked_oracle", attend)
    AttentionMaskInterface.register("masked_oracle", ALL_MASK_ATTENTION_FUNCTIONS["eager"])
    before = model.config._attn_implementation
    model.set_attn_implementation("masked_oracle")
    cache, logits, position = DynamicCache(config=model.config), [], 0
    for tokens in calls:
        logits.append(ask(model, cache, tokens, position))
        position += len(tokens)
        state["call"] += 1
    model.set_attn_implementation(before)
    return logits


CALLS = [words(0, 60), words(1, 1), words(2, 5), words(3, 1)]


@pytest.mark.parametrize("policy", POLICIES, ids=ids)
def test_what_is_dropped_is_as_if_masked(model, policy):
    """Decoding, and several tokens in one call, over layers and heads of different lengths."""
    logits, cache, pruner = run(model, policy, CALLS, pruned_after=0)
    gone = []
    for layer in range(LAYERS):
        hidden = torch.ones(2, 60, dtype=torch.bool)
        for head, row in enumerate(pruner.positions(layer).tolist()):
            hidden[head, [position for position in row if 0 <= position < 60]] = False
        gone.append(hidden)
    assert any(bool(hidden.any()) for hidden in gone), "something was dropped"
    for found, wanted in zip(logits, masked(model, gone, CALLS, from_call=1), strict=True):
        torch.testing.assert_close(found, wanted, atol=2e-4, rtol=1e-4)
    assert cache.layers[0].keys.shape[2] < 67


def test_layers_and_heads_do_differ(model):
    _, cache, pruner = run(model, POLICIES[-1], CALLS, pruned_after=0)
    assert len({layer.keys.shape[2] for layer in cache.layers}) == LAYERS
    assert any(bool((pruner.positions(layer) < 0).any()) for layer in range(LAYERS))


@pytest.mark.parametrize("compact", [False, True])
def test_keeping_all_is_the_full_cache(model, compact):
    policy = Policy(Window(8), Pyramid(Length(1000)), whole=0, compact=compact)
    logits, cache, _ = run(model, policy, CALLS, pruned_after=0)
    full = DynamicCache(config=model.config)
    position = 0
    for tokens, found in zip(CALLS, logits, strict=True):
        assert torch.equal(found, ask(model, full, tokens, position))
        position += len(tokens)
    for pruned, whole in zip(cache.layers, full.layers, strict=True):
        assert torch.equal(pruned.keys, whole.keys)
        assert torch.equal(pruned.values, whole.values)


@pytest.mark.parametrize("kind", ["Llama", "Qwen3"])
def test_keys_turned_are_keys_computed_there(kind):
    """Of the first layer, where keys depend on nothing but their own token and position."""
    model = models("sdpa", kind)
    policy = streaming_llm(2, 10, compact=True)
    _, cache, pruner = run(model, policy, [CALLS[0]], pruned_after=0)
    assert pruner.next_position == 12
    kept = pruner.positions(0)[0]
    assert kept.tolist() == [0, 1, *range(50, 60)]
    there = DynamicCache(config=model.config)
    ask(model, there, CALLS[0][kept], 0)
    torch.testing.assert_close(cache.layers[0].keys, there.layers[0].keys, atol=1e-5, rtol=1e-5)


def test_closing_up_changes_nothing_where_distances_stay(model):
    """All that is kept are the youngest tokens: closed up, they and the next ones move by the same."""
    kept, _, _ = run(model, streaming_llm(0, 20), CALLS, pruned_after=0)
    closed, _, pruner = run(model, streaming_llm(0, 20, compact=True), CALLS, pruned_after=0)
    assert (pruner.length, pruner.next_position) == (67, 27)
    for one, other in zip(kept, closed, strict=True):
        torch.testing.assert_close(one, other, atol=2e-4, rtol=1e-4)


def test_attention_is_what_the_model_computes():
    """Mass of a prompt is the column sums of the weights that eager attention gives out."""
    model = models("eager")
    pruner = Pruner(h2o(24, whole=0), LAYERS)
    cache = DynamicCache(config=model.config)
    with torch.no_grad(), watched(model, pruner):
        model(input_ids=CALLS[0][None], **{cache_argument(model): cache}, use_cache=True)
    with torch.no_grad():
        attentions = model(input_ids=CALLS[0][None], output_attentions=True).attentions
    for layer, weights in enumerate(attentions):
        state = pruner._layers[layer]
        state.fold(cache.layers[layer].keys[0])
        torch.testing.assert_close(state.mass, weights[0].sum(1).unflatten(0, (2, 2)).mean(1), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("policy", POLICIES, ids=ids)
def test_a_cache_stays_small_while_text_is_generated(model, policy):
    policy = replace(policy, every=10)
    pruner = Pruner(policy, LAYERS)
    cache, tokens, prunings = DynamicCache(config=model.config), CALLS[0], 0
    with watched(model, pruner):
        for _ in range(41):
            tokens = ask(model, cache, tokens, pruner.next_position)[-1:].argmax(-1)
            if pruner.due:
                prune(cache, pruner)
                prunings += 1
    assert (pruner.length, prunings) == (100, 5)
    for number, layer in enumerate(cache.layers):
        positions = pruner.positions(number)
        assert layer.keys.shape[2] == positions.shape[1]
        assert positions[:, -1].tolist() == [99, 99]
    if mean := policy.budget.mean(100):
        held = sum(int((pruner.positions(layer) >= 0).sum()) for layer in range(LAYERS))
        assert held == 2 * LAYERS * mean


def test_the_model_is_left_as_it_was(model):
    attention, known = model.config._attn_implementation, set(AttentionInterface().keys())
    with pytest.raises(RuntimeError, match="in between"), watched(model, Pruner(h2o(), LAYERS)):
        raise RuntimeError("in between")
    assert model.config._attn_implementation == attention
    assert set(AttentionInterface().keys()) == known


def test_several_sequences_are_refused(model):
    pruner = Pruner(h2o(), LAYERS)
    cache = DynamicCache(config=model.config)
    with watched(model, pruner), pytest.raises(UsageError, match="one sequence"):
        model(input_ids=words(0, 10).view(2, 5), **{cache_argument(model): cache})
    with pytest.raises(UsageError, match="one sequence"):
        prune(DynamicCache(config=model.config), Pruner(streaming_llm(), LAYERS))


def test_attention_without_masks_of_its_own_is_refused():
    model = models("flex_attention")
    with pytest.raises(UnsupportedKV, match="sdpa"), watched(model, Pruner(h2o(), LAYERS)):
        pass
