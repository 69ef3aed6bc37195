"""A flow answers as the model does over what is held, holds what it says, and shares nothing that is not exact."""

from __future__ import annotations

import gc

import pytest
import torch

import kvtier
from kvtier.errors import ClosedError, ConfigError, KVMismatch, UnsupportedKV, UsageError

transformers = pytest.importorskip("transformers")

from transformers import DynamicCache, GenerationConfig  # noqa: E402

from kvtier.connectors.transformers.forward import cache_argument  # noqa: E402
from kvtier.flow import Flow, FlowCache, parse_recipe  # noqa: E402
from kvtier.pruning import watched  # noqa: E402
from tests.transformers_fixture import BLOCK, adapted, make, plain, space_of, stored, words  # noqa: E402

PROMPT = words(0, 300)
GREEDY = {"max_new_tokens": 40, "do_sample": False}
PRUNED = "int4*snap_kv(0.5,window=8,whole=0);recent:16;every:10"
RAGGED = (
    "int8*prune/1(mass*byhead:0.2(ratio:0.4),sinks:2,recent:8/0.0,every:1,whole:0,positions:kept);recent:20;every:15"
)
SPLIT = "layers(0:int4*h2o(0.4,whole=0);1:int8*snap_kv(0.6,window=8,whole=0);2:raw);recent:0.1;every:10"
RECIPES = ["int4", "int3;recent:5", "K=raw,V=int8/token/sym;recent:0", PRUNED, SPLIT, RAGGED]


@pytest.fixture(params=["eager", "sdpa"])
def model(request):
    return models(request.param)


def models(attention="sdpa", dtype=torch.float32, **changes):
    made = make(dtype=dtype, num_key_value_heads=2, **changes)
    made.set_attn_implementation(attention)
    return made


def ask(model, cache, tokens, position):
    places = torch.arange(position, position + len(tokens))[None]
    given = {cache_argument(model): cache, "position_ids": places}
    with torch.no_grad():
        return model(input_ids=tokens[None], **given, use_cache=True).logits[0]


def answered(flow, ids, **options):
    out = flow.generate(ids, **(GREEDY | options))
    return out[0, len(ids) :].tolist()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_whole_in_16_bits_is_a_dynamic_cache(dtype):
    """Bit for bit, in a model of 16 bits; of float32 what the prompt says first, before it is rounded."""
    model = models(dtype=dtype)
    ours, theirs = FlowCache(model, "raw"), DynamicCache(config=model.config)
    tokens, position = PROMPT, 0
    for step in range(20):
        found, wanted = ask(model, ours, tokens, position), ask(model, theirs, tokens, position)
        if dtype != torch.float32 or step == 0:
            assert torch.equal(found, wanted)
        else:
            torch.testing.assert_close(found, wanted, atol=0.1, rtol=0.1)
        position += len(tokens)
        tokens = wanted[-1:].argmax(-1)
    if dtype != torch.float32:
        flow = Flow(model, "raw")
        assert answered(flow, PROMPT) == plain(model, PROMPT[None], 40)[0]
        assert flow.report.held == flow.report.native == flow.report.recent


@pytest.mark.parametrize("recipe", RECIPES)
def test_attention_is_over_what_is_held(model, recipe):
    """Each step, of one token and of several, as a full cache gives it that holds just this, the rest masked."""
    cache = FlowCache(model, recipe)
    calls = [words(1, 1) if number % 7 else words(number, 5) for number in range(1, 31)]
    with watched(model, cache.pruner) if cache.pruner else torch.no_grad():
        ask(model, cache, PROMPT, 0)
        for tokens in calls:
            cache.upkeep()
            held = [[part.clone() for part in store.read()] for store in cache.stores]
            pads = [store.columns - store.tokens for store in cache.stores]
            found = ask(model, cache, tokens, cache.tokens)
            wanted = over(model, held, pads, tokens, cache.tokens - len(tokens))
            torch.testing.assert_close(found, wanted, atol=3e-4, rtol=1e-4)


def over(model, held, pads, tokens, position):
    """Logits over this KV; what stands in front of a head's tokens is masked."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    def attend(module, query, key, value, attention_mask, scaling, **_):
        total, new = key.shape[2], query.shape[2]
        groups = query.shape[1] // key.shape[1]
        logits = query[0] @ key[0].repeat_interleave(groups, 0).transpose(1, 2) * scaling
        sees = torch.ones(new, total, dtype=torch.bool).tril(total - new).expand(key.shape[1], -1, -1).clone()
        for head, pad in enumerate(pads[module.layer_idx].tolist()):
            sees[head, :, :pad] = False
        logits = logits.masked_fill(~sees.repeat_interleave(groups, 0), -torch.inf)
        return (logits.softmax(-1) @ value[0].repeat_interleave(groups, 0)).transpose(0, 1)[None], None

    AttentionInterface.register("flow_oracle", attend)
    AttentionMaskInterface.register("flow_oracle", ALL_MASK_ATTENTION_FUNCTIONS["eager"])
    before = model.config._attn_implementation
    model.set_attn_implementation("flow_oracle")
    full = DynamicCache(config=model.config)
    for layer, (keys, values) in zip(full.layers, held, strict=True):
        layer.lazy_initialization(keys, values)
        layer.keys, layer.values = keys[None], values[None]
    logits = ask(model, full, tokens, position)
    model.set_attn_implementation(before)
    return logits


@pytest.mark.parametrize("recipe", RECIPES)
def test_what_stays_is_what_the_recipe_says(recipe):
    """Positions, counts and precision, layer by layer, after prompt and answer."""
    model = models()
    flow = Flow(model, recipe)
    answered(flow, PROMPT)
    cache = flow.cache
    assert cache.tokens == 339
    for number, (store, layer) in enumerate(zip(cache.stores, parse_recipe(recipe).resolve(cache.spec), strict=True)):
        if layer.policy is None:
            assert store.tokens.tolist() == [339] * 2
            continue
        since = cache.pruner.length - cache.pruner._pruned
        assert since < parse_recipe(recipe).every
        budget = layer.policy.budget.mean(339 - since)
        assert int(store.tokens.sum()) == 2 * (budget + since)
        positions = cache.pruner.positions(number)
        assert positions.shape[1] == store.columns
        assert positions[:, -1].tolist() == [338] * 2
        assert ((positions >= 0).sum(1).numpy() == store.tokens).all()
    if "raw" not in recipe:
        assert all(store.aged.nbytes for store in cache.stores)


@pytest.mark.parametrize("recipe", ["int4", PRUNED])
def test_a_token_is_encoded_from_what_the_model_computed(recipe):
    """The values of an aged token are one encoding of its 16 bits, however often others left."""
    model = models()
    flow = Flow(model, recipe)
    sequence = flow.generate(PROMPT, **GREEDY)[0]
    exact = DynamicCache(config=model.config)
    ask(model, exact, sequence[:-1], 0)
    keys, _ = flow.cache.stores[0].read()
    places = flow.cache.pruner.positions(0) if flow.cache.pruner else torch.arange(339).expand(2, -1)
    whole = exact.layers[0].keys[0]
    wanted = torch.stack([whole[head, places[head].long()] for head in range(2)])
    spread = wanted.amax() - wanted.amin()
    assert (keys - wanted).abs().max() < spread / 15 / 2 * 1.1, "half a step of 4 bits, over the widest channel"


def test_sampling_and_dictionaries():
    model = models()
    options = {
        "max_new_tokens": 25,
        "do_sample": True,
        "temperature": 0.8,
        "top_k": 20,
        "return_dict_in_generate": True,
    }
    made = []
    for _ in range(2):
        torch.manual_seed(3)
        made.append(Flow(model, PRUNED).generate(PROMPT[None], **options).sequences[0].tolist())
    assert made[0] == made[1]
    assert len(made[0]) == 325


def test_turns_go_on_and_other_texts_begin_anew():
    model = models()
    flow = Flow(model, PRUNED)
    first = flow.generate(PROMPT, **GREEDY)[0]
    cache, seen = flow.cache, []
    flow.cache.stores[0].append, append = (
        lambda new: seen.append(new[0].shape[1]) or append(new),
        flow.cache.stores[0].append,
    )
    second = flow.generate(torch.cat([first, words(7, 30)]), **GREEDY)[0]
    assert flow.cache is cache
    assert seen == [31, *[1] * 39], "the last token of the answer and the new ones, then one a step"
    assert (len(second), cache.tokens) == (410, 409)
    edited = second.clone()
    edited[5] += 1
    flow.generate(edited, max_new_tokens=2)
    assert flow.cache is not cache
    flow.generate(edited, max_new_tokens=2, generation_config=GenerationConfig(pad_token_id=0, do_sample=False))
    assert flow.cache.tokens == 411


def test_a_failed_turn_leaves_no_cache_to_go_on_with():
    model = models()
    flow = Flow(model, PRUNED)
    first, cache = flow.generate(PROMPT, **GREEDY)[0], flow.cache

    def stop(ids, scores):
        raise KeyboardInterrupt

    longer = torch.cat([first, words(7, 30)])
    with pytest.raises(KeyboardInterrupt):
        flow.generate(longer, logits_processor=[stop], **GREEDY)
    again = flow.generate(longer, **GREEDY)[0]
    assert flow.cache is not cache
    assert again.tolist() == Flow(model, PRUNED).generate(longer, **GREEDY)[0].tolist()


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_report_is_what_is_held(recipe):
    model = models()
    flow = Flow(model, recipe)
    answered(flow, PROMPT)
    report, cache = flow.report, flow.cache
    assert report.native == 339 * 3 * 2 * (16 + 16) * 2
    assert report.pruned == sum(int(store.tokens.sum()) for store in cache.stores) * (16 + 16) * 2
    assert report.stored == report.exact + report.aged + report.recent
    assert report.held == report.stored + report.scratch + report.pruner
    assert report.saved == pytest.approx(1 - report.held / report.native)
    tensors = {}
    for store in cache.stores:
        for rows in (store.exact, store.recent):
            tensors |= {part.data_ptr(): part.untyped_storage().nbytes() for part in rows.parts if part.numel()}
    assert report.exact + report.recent == sum(tensors.values())
    assert report.aged == sum(store.aged._memory.nbytes for store in cache.stores if store.aged)
    assert report.peak >= 300 * 3 * 2 * (16 + 16) * 4, "the prompt as it came, in float32"
    assert "after pruning" in str(report)


def test_pruning_and_quantising_free_memory():
    model = models(head_dim=64)
    held = {}
    for recipe in ("raw", "int4", "int4*snap_kv(0.5,window=8,whole=0)", "raw*snap_kv(0.5,window=8,whole=0)"):
        flow = Flow(model, recipe + ";recent:16")
        answered(flow, words(0, 1500))
        held[recipe] = flow.report.held - flow.report.scratch
    raw, int4, both, pruned = held.values()
    assert int4 < 0.45 * raw
    assert pruned < 0.65 * raw
    assert both < 0.7 * int4


@pytest.fixture
def host():
    with kvtier.open({"cpu": {"capacity": "16MiB"}}) as opened:
        yield opened


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("recipe", ["raw", "int4", PRUNED, RAGGED])
def test_a_prompts_exact_blocks_are_shared_and_nothing_else(host, recipe, dtype):
    model = models(dtype=dtype)
    space = space_of(host, model)
    # Of a model as small as this one everything is computed faster than it is read.
    flow = Flow(model, recipe, space=space)
    sequence = flow.generate(PROMPT, **GREEDY)[0]
    whole = len(PROMPT) // BLOCK
    assert (flow.loaded, flow.saved[0].result().blocks, flow.saved[0].result().refused) == (0, whole, "")
    flow.generate(torch.cat([sequence, words(9, 100)]), **GREEDY)
    assert stored(space, sequence) == whole * BLOCK, "neither the answer nor the second turn"
    exact = DynamicCache(config=model.config)
    ask(model, exact, PROMPT, 0)
    with space.match(PROMPT) as hit:
        parts = [tuple(torch.empty(whole * BLOCK, 2, 16, dtype=dtype) for _ in "kv") for _ in range(3)]
        assert hit.load(parts) == whole * BLOCK
    for (keys, values), layer in zip(parts, exact.layers, strict=True):
        assert torch.equal(keys.transpose(0, 1), layer.keys[0, :, : whole * BLOCK])
        assert torch.equal(values.transpose(0, 1), layer.values[0, :, : whole * BLOCK])


@pytest.mark.parametrize("recipe", ["raw", "int4", PRUNED])
def test_a_loaded_prefix_answers_as_a_computed_one(host, recipe):
    model = models()
    space = space_of(host, model)
    first = Flow(model, recipe, space=space)
    first.generate(PROMPT[:200], max_new_tokens=1)
    first.saved[0].result()
    flow = Flow(model, recipe, space=space)
    sequence = flow.generate(PROMPT, **GREEDY)[0]
    assert flow.loaded == 200 // BLOCK * BLOCK
    assert flow.saved[0].result().blocks == 300 // BLOCK - 200 // BLOCK
    assert sequence.tolist() == Flow(model, recipe).generate(PROMPT, **GREEDY)[0].tolist()
    again = Flow(model, recipe, space=space)
    assert again.generate(PROMPT, **GREEDY)[0].tolist() == sequence.tolist()
    assert again.loaded == 299 // BLOCK * BLOCK


def test_what_was_loaded_is_not_held_twice(host):
    """Neither in a prompt nor behind it: all of a model's own dtype that is left is the scratch."""
    model = models()
    space = space_of(host, model)
    for tokens in (0, 288):
        flow = Flow(model, "int4", space=space)
        flow.generate(PROMPT, **GREEDY)
        flow.saved[0].result()
        assert flow.loaded == tokens
    gc.collect()
    alive = [each for each in gc.get_objects() if type(each) is torch.Tensor and each.shape[-1:] == (16,)]
    wide = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in alive if each.numel() > 9000}
    assert sum(wide.values()) == flow.report.scratch


def test_who_asks_every_token_loads_none(host):
    """What accumulated attention keeps depends on all queries of the prompt, so that all of them are computed."""
    model = models()
    space, recipe = space_of(host, model), "int8*h2o(0.4,whole=0);recent:16;every:10"
    for blocks in (300 // BLOCK, 0):
        flow = Flow(model, recipe, space=space)
        sequence = flow.generate(PROMPT, **GREEDY)[0]
        assert flow.loaded == 0
        assert flow.saved[0].result().blocks == blocks
    alone = Flow(model, recipe)
    assert alone.generate(PROMPT, **GREEDY)[0].tolist() == sequence.tolist()
    for layer in range(3):
        assert torch.equal(flow.cache.pruner.positions(layer), alone.cache.pruner.positions(layer))


def test_a_model_that_was_changed_needs_another_flow(host):
    model = adapted(models())
    space = space_of(host, model, adapter="a", adapter_digest="1")
    flow = Flow(model, "int4", space=space)
    flow.generate(PROMPT[:100], max_new_tokens=1)
    flow.saved[0].result()
    for layer in model.model.layers:
        layer.self_attn.v_proj._active_adapter = ["b"]
    with pytest.raises(UsageError, match="not what it was"):
        flow.generate(PROMPT, max_new_tokens=1)
    assert stored(space, PROMPT) == 100 // BLOCK * BLOCK


def test_a_prompt_in_chunks_is_computed_on_exact_kv(host):
    model = models()
    whole = Flow(model, PRUNED).generate(PROMPT, **GREEDY)[0]
    space = space_of(host, model)
    flow = Flow(model, PRUNED, space=space)
    assert flow.generate(PROMPT, prefill_chunk_size=70, **GREEDY)[0].tolist() == whole.tolist()
    assert flow.saved[0].result().blocks == 300 // BLOCK


def test_what_cannot_be_is_refused(host):
    model = models()
    flow = Flow(model)
    for options in ({"num_beams": 2}, {"use_cache": False}, {"attention_mask": torch.ones(1, 5)}):
        with pytest.raises(UsageError):
            flow.generate(PROMPT, **options)
    with pytest.raises(UsageError, match="no 'guidance_scale'"):
        Flow(model, PRUNED).generate(PROMPT, guidance_scale=2.0)
    for ids in (words(0, 10).view(2, 5), torch.empty(0, dtype=torch.long), PROMPT.float()):
        with pytest.raises(UsageError, match="one sequence"):
            flow.generate(ids)
    with pytest.raises(UsageError, match="training"):
        Flow(model.train()).generate(PROMPT)
    model.eval()
    with pytest.raises(ConfigError, match="no plan"):
        Flow(model, "int5")
    with pytest.raises(KVMismatch, match="the space was made for"):
        Flow(make(num_hidden_layers=2), space=space_of(host, model))
    with pytest.raises(UsageError, match="plan='raw'"):
        Flow(model, space=space_of(host, model, plan="int8"))
    with pytest.raises(UsageError, match="autocast"), torch.autocast("cpu"):
        flow.generate(PROMPT)
    with pytest.raises(UnsupportedKV, match="a flow goes by that"):
        Flow(make("GPTNeoX")).generate(PROMPT, **GREEDY)  # its configuration has KV heads that the model has not
    with pytest.raises(UnsupportedKV, match="sliding window"):
        Flow(make("Mistral", sliding_window=8, num_key_value_heads=2))
    flow.close()
    flow.close()
    for use in (lambda: flow.report, lambda: flow.generate(PROMPT)):
        with pytest.raises(ClosedError):
            use()


def test_a_cache_by_itself():
    """Its model must be watched where tokens leave; it is of one sequence, and only grows."""
    model = models()
    cache = FlowCache(model, PRUNED)
    ask(model, cache, PROMPT, 0)
    with pytest.raises(UsageError, match="watched"):
        ask(model, cache, words(1, 1), 300)
    cache = FlowCache(model, PRUNED)
    with watched(model, cache.pruner):
        options = {cache_argument(model): cache, "attention_mask": torch.ones(1, 300, dtype=torch.long)}
        alone = model.generate(PROMPT[None], **options, **GREEDY)[0].tolist()
    assert alone == Flow(model, PRUNED).generate(PROMPT, **GREEDY)[0].tolist()
    for change in (cache.reset, lambda: cache.crop(-1), lambda: cache.load([])):
        with pytest.raises(UsageError):
            change()
    with pytest.raises(UsageError, match="no longer exact"):
        cache.exact()
    with pytest.raises(UsageError, match="one sequence"):
        model(input_ids=words(0, 10).view(2, 5), **{cache_argument(model): FlowCache(model, "int4")})
