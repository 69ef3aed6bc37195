"""Loading a prefix changes how fast a model answers, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import kvtier
from kvtier.errors import ConfigError, KVMismatch, SessionUnavailable, UnsupportedKV, UsageError

transformers = pytest.importorskip("transformers")

from kvtier.connectors.transformers import KVTierCache, generate, prefill, spec_for  # noqa: E402
from tests.transformers_fixture import BLOCK, adapted, make, space_of, stored  # noqa: E402

DOCUMENT = torch.arange(7, 7 + 5 * BLOCK)[None] * 13 % 500
QUESTION = torch.arange(3, 24)[None] * 29 % 500
PROMPT = torch.cat([DOCUMENT, QUESTION], dim=1)
GREEDY = {"max_new_tokens": 8, "do_sample": False}


@pytest.fixture
def cache() -> Iterator[kvtier.Cache]:
    with kvtier.open({"cpu": {"capacity": "16MiB"}}) as opened:
        yield opened


@torch.no_grad()
def computed(model, *pieces):
    """Logits of the last token without kvtier, the prompt computed in these pieces."""
    cache = transformers.DynamicCache(config=model.config)
    for piece in pieces:
        out = model(input_ids=piece, cache=cache, use_cache=True, logits_to_keep=1)
    return out.logits[0, -1], cache


def store(model, space, ids=DOCUMENT):
    saved = prefill(model, ids, space).saved.result()
    assert (saved.blocks, saved.refused) == (ids.shape[1] // BLOCK, "")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("kind", "heads"), [("Llama", 2), ("Llama", 1), ("Llama", 4), ("Qwen2", 2)])
def test_a_loaded_prefix_gives_the_logits_of_a_run_split_at_the_same_token(cache, kind, heads, dtype):
    model = make(kind, dtype, num_key_value_heads=heads)
    space = space_of(cache, model)
    store(model, space)
    with_cache = prefill(model, PROMPT, space)
    split, split_cache = computed(model, DOCUMENT, QUESTION)
    assert (with_cache.loaded, with_cache.computed) == (DOCUMENT.shape[1], QUESTION.shape[1])
    assert with_cache.tiers == {"cpu": DOCUMENT.shape[1]}
    assert torch.equal(with_cache.logits, split)
    for ours, theirs in zip(with_cache.cache.layers, split_cache.layers, strict=True):
        assert torch.equal(ours.keys, theirs.keys)
        assert torch.equal(ours.values, theirs.values)


def test_a_loaded_prefix_gives_the_tokens_of_a_single_pass(cache):
    model = make()
    space = space_of(cache, model)
    store(model, space, PROMPT)
    whole, _ = computed(model, PROMPT)
    assert (prefill(model, PROMPT, space).logits - whole).abs().max() <= 1e-4
    plain = model.generate(PROMPT, attention_mask=torch.ones_like(PROMPT), **GREEDY)[0]
    answer = generate(model, PROMPT, space, **GREEDY)
    assert answer.sequence.tolist() == plain.tolist()
    assert answer.tokens.tolist() == plain[PROMPT.shape[1] :].tolist()
    assert answer.loaded > 0
    assert answer.loaded + answer.computed == PROMPT.shape[1]


def test_a_damaged_prefix_would_show(cache):
    model = make()
    space = space_of(cache, model)
    store(model, space)
    loaded = prefill(model, DOCUMENT, space, save=False).cache
    for layer in loaded.layers:
        layer.values.neg_()
    with torch.no_grad():
        damaged = model(input_ids=QUESTION, cache=loaded).logits[0, -1]
    assert (damaged - computed(model, PROMPT)[0]).abs().max() > 0.1


def test_the_last_token_is_always_computed(cache):
    model = make()
    space = space_of(cache, model)
    store(model, space)
    again = prefill(model, DOCUMENT, space)
    assert (again.loaded, again.computed) == (DOCUMENT.shape[1] - BLOCK, BLOCK)
    assert (again.saved.result().blocks, again.saved.result().present) == (0, 1)


@pytest.mark.parametrize("tokens", [1, BLOCK - 1, BLOCK, BLOCK + 1])
def test_short_prompts(cache, tokens):
    model = make()
    space = space_of(cache, model)
    first = prefill(model, PROMPT[0, :tokens], space)
    assert first.saved.result().blocks == tokens // BLOCK
    second = prefill(model, PROMPT[0, :tokens].tolist(), space)
    assert second.loaded == (tokens - 1) // BLOCK * BLOCK
    assert torch.allclose(first.logits, second.logits, atol=1e-4)


def test_the_answer_is_stored_for_the_next_turn(cache):
    model = make()
    space = space_of(cache, model)
    answer = generate(model, PROMPT, space, max_new_tokens=BLOCK * 2, do_sample=False)
    assert answer.saved.result().refused == ""
    held = (PROMPT.shape[1] + 2 * BLOCK - 1) // BLOCK * BLOCK
    turn = torch.cat([answer.sequence[None], QUESTION], dim=1)
    assert prefill(model, turn, space).loaded == held


def test_what_is_saved_does_not_change_while_generation_goes_on(cache, monkeypatch):
    model = make()
    space = space_of(cache, model)
    kept = []
    save = space.save
    monkeypatch.setattr(space, "save", lambda ids, kv, **more: (kept.append(kv), save(ids, kv, **more))[1])
    generate(model, PROMPT, space, **GREEDY)
    _, theirs = computed(model, PROMPT)
    whole = PROMPT.shape[1] // BLOCK * BLOCK
    for (keys, values), layer in zip(kept[0], theirs.layers, strict=True):
        assert torch.equal(keys, layer.keys[0].transpose(0, 1)[:whole])
        assert torch.equal(values, layer.values[0].transpose(0, 1)[:whole])


def test_only_what_was_verified_is_used(cache, monkeypatch):
    model = make()
    space = space_of(cache, model)
    store(model, space)

    def load_and_lose(hit, kv, **more):
        load(hit, kv, **more)
        hit._loaded[:] = BLOCK
        return 2 * BLOCK

    load = kvtier.Hit.load
    monkeypatch.setattr(kvtier.Hit, "load", load_and_lose)
    result = prefill(model, PROMPT, space)
    assert (result.loaded, result.computed) == (BLOCK, PROMPT.shape[1] - BLOCK)
    assert result.saved.result().refused == ""


def test_a_prefix_that_is_lost_while_it_is_read_is_computed(cache, monkeypatch):
    model = make()
    space = space_of(cache, model)
    store(model, space)
    load = kvtier.Hit.load

    def load_some(hit, kv, **more):
        load(hit, kv, **more)
        hit._loaded[:] = BLOCK
        return BLOCK

    monkeypatch.setattr(kvtier.Hit, "load", load_some)
    result = prefill(model, PROMPT, space)
    assert (result.loaded, result.computed) == (BLOCK, PROMPT.shape[1] - BLOCK)
    assert torch.allclose(result.logits, computed(model, PROMPT)[0], atol=1e-4)


def test_without_its_host_a_model_computes_everything(cache, monkeypatch):
    model = make()
    space = space_of(cache, model)
    store(model, space)

    def gone(*_args, **_kwargs):
        raise SessionUnavailable("gone")

    for call in ("match", "reserve"):
        monkeypatch.setattr(cache.session, call, gone)
    result = prefill(model, PROMPT, space)
    assert (result.loaded, result.computed, result.tiers) == (0, PROMPT.shape[1], {})
    assert torch.equal(result.logits, computed(model, PROMPT)[0])
    assert result.saved.result().refused == "SessionUnavailable"
    plain = model.generate(PROMPT, attention_mask=torch.ones_like(PROMPT), **GREEDY)[0]
    assert generate(model, PROMPT, space, **GREEDY).sequence.tolist() == plain.tolist()


def test_int8_is_close_and_has_its_own_blocks(cache):
    model = make()
    exact, coarse = space_of(cache, model), space_of(cache, model, plan="int8")
    store(model, exact)
    assert prefill(model, PROMPT, coarse, save=False).loaded == 0
    store(model, coarse)
    result = prefill(model, PROMPT, coarse, save=False)
    assert result.loaded == DOCUMENT.shape[1]
    difference = (result.logits - computed(model, PROMPT)[0]).abs().max()
    assert 0 < difference < 1


WINDOW = {"sliding_window": 32}
MLA = {"kv_lora_rank": 16, "q_lora_rank": None, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
UNSTORABLE = {
    "sliding window": ("Mistral", WINDOW, "sliding"),
    "some sliding layers": ("Gemma2", WINDOW, "sliding"),
    "a window that the configuration switches on": (
        "Qwen2",
        WINDOW | {"use_sliding_window": True, "max_window_layers": 1},
        "sliding",
    ),
    "latent attention": ("DeepseekV3", MLA | {"n_routed_experts": 4, "n_group": 1, "topk_group": 1}, "MLA"),
    "rope by length": (
        "Llama",
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
        "RoPE is 'dynamic'",
    ),
}


@pytest.mark.parametrize(("kind", "changes", "says"), UNSTORABLE.values(), ids=UNSTORABLE)
def test_a_model_whose_kv_cannot_be_stored_is_refused_before_anything_runs(cache, kind, changes, says):
    model = make(kind, **changes)
    model.forward = None
    spec = kvtier.KVSpec(3, 2, 16, "float32", block_tokens=BLOCK)
    space = cache.keyspace(spec, model="tiny", revision="0")
    for call in (prefill, generate):
        with pytest.raises(UnsupportedKV, match=says):
            call(model, PROMPT, space)
    with pytest.raises(UnsupportedKV, match=says):
        space_of(cache, model)


def test_layers_that_only_the_cache_knows_of_are_refused():
    model = make()
    model.config.attention_chunk_size = 32
    with pytest.raises(UnsupportedKV, match="DynamicSlidingWindowLayer"):
        spec_for(model)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"input_ids": torch.cat([PROMPT, PROMPT])}, "one sequence"),
        ({"input_ids": PROMPT[:, :0]}, "one sequence"),
        ({"input_ids": PROMPT, "attention_mask": torch.cat([PROMPT[:, :1] * 0, PROMPT[:, 1:] * 0 + 1], 1)}, "hides"),
        ({"input_ids": PROMPT, "attention_mask": torch.ones(1, 3)}, "hides"),
    ],
)
def test_anything_but_one_whole_sequence_is_refused(cache, arguments, says):
    model = make()
    space = space_of(cache, model)
    for call in (prefill, generate):
        with pytest.raises(UsageError, match=says):
            call(model, space=space, **arguments)


@pytest.mark.parametrize(
    "kwargs", [{"inputs_embeds": None}, {"position_ids": None}, {"cache_implementation": "static"}, {"num_beams": 2}]
)
def test_generate_refuses_what_would_change_the_kv(cache, kwargs):
    model = make()
    with pytest.raises(UsageError, match=next(iter(kwargs))):
        generate(model, PROMPT, space_of(cache, model), **kwargs)


def test_a_space_of_another_model_and_a_model_in_training_are_refused(cache):
    model = make()
    with pytest.raises(KVMismatch, match="made for"):
        prefill(make(num_key_value_heads=4), PROMPT, space_of(cache, model))
    with pytest.raises(UsageError, match="training mode"):
        prefill(model.train(), PROMPT, space_of(cache, model))


def test_a_loaded_adapter_must_be_named(cache):
    model = make()
    space = space_of(cache, model)
    model.peft_config = {"default": object()}
    with pytest.raises(ConfigError, match="adapter_digest"):
        space_of(cache, model)
    with pytest.raises(UsageError, match="adapter"):
        prefill(model, PROMPT, space)
    named = space_of(cache, model, adapter="tuned", adapter_digest="1234")
    assert prefill(model, PROMPT, named).saved.result().refused == ""


def test_what_changes_the_kv_changes_the_keys(cache):
    def key(attention="sdpa", **changes):
        model = make(**changes)
        model.config._attn_implementation = attention
        return space_of(cache, model).keyspace.root

    rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
    keys = [key(), key(rope_parameters=rope), key(rms_norm_eps=1e-3), key("sparse")]
    assert len(set(keys)) == len(keys)
    same = [key(), key(use_cache=False), key("eager"), key(name_or_path="elsewhere")]
    assert len(set(same)) == 1


def test_a_space_made_for_another_model_is_refused(cache):
    model = make(rope_theta=1e4)
    space = space_of(cache, model)
    prefill(model, PROMPT, space).saved.result()
    with pytest.raises(UsageError, match="space_for"):
        prefill(make(rope_theta=5e5), PROMPT, space)
    model.config.rope_parameters["rope_theta"] = 5e5
    with pytest.raises(UsageError, match="space_for"):
        prefill(model, PROMPT, space)


def test_another_class_of_the_same_configuration_has_another_keyspace(cache):
    class Scaled(transformers.LlamaForCausalLM):
        """May compute anything."""

    model = make()
    other = Scaled(model.config).eval()
    assert space_of(cache, model).keyspace.root != space_of(cache, other).keyspace.root


def test_quantised_weights_of_another_kind_have_another_keyspace(cache):
    roots = set()
    for dtype in ("int4", "fp8_e4m3"):
        model = make()
        model.config.quantization_config = {"weight": {"dtype": dtype}}
        roots.add(space_of(cache, model).keyspace.root)
    assert len(roots) == 2


def test_autocast_is_refused_before_anything_is_computed(cache):
    model = make()
    space = space_of(cache, model)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(UsageError, match="autocast"):
        prefill(model, PROMPT, space)


def test_kv_that_cannot_be_saved_costs_the_save_only(cache, monkeypatch):
    model = make()
    space = space_of(cache, model)
    monkeypatch.setattr(space, "save", lambda *_, **__: (_ for _ in ()).throw(KVMismatch("another dtype")))
    result = prefill(model, PROMPT, space)
    assert result.saved.result().refused == "kv_mismatch"
    assert torch.equal(result.logits, computed(model, PROMPT)[0])


def test_a_generation_config_that_bypasses_the_cache_is_refused(cache):
    for name, value in (("use_cache", False), ("prompt_lookup_num_tokens", 5), ("cache_implementation", "static")):
        model = make()
        setattr(model.generation_config, name, value)
        with pytest.raises(UsageError, match=name):
            generate(model, PROMPT, space_of(cache, model), **GREEDY)


def test_another_adapter_in_use_needs_another_space(cache):
    model = make()
    model.peft_config = {"a": {"r": 4}, "b": {"r": 8}}
    model.active_adapters = lambda: ["a"]
    space = space_of(cache, model, adapter="a", adapter_digest="1")
    prefill(model, PROMPT, space)
    model.active_adapters = lambda: ["b"]
    with pytest.raises(UsageError, match="space_for"):
        prefill(model, PROMPT, space)
    with pytest.raises(ConfigError, match="no adapter"):
        space_of(cache, make(), adapter="a", adapter_digest="1")


def off(layer):
    layer._disable_adapters = True


def other(layer):
    layer._active_adapter = ["b"]


def scaled(layer):
    layer.scaling["a"] = 3.0


@pytest.mark.parametrize("switch", [off, other, scaled], ids=lambda switch: switch.__name__)
def test_adapters_that_are_switched_in_place_need_another_space(cache, switch):
    """As PEFT's `with model.disable_adapter():` does, which says nothing of it in the configuration."""
    model = adapted(make())
    space = space_of(cache, model, adapter="a", adapter_digest="1")
    chat = KVTierCache(model, space)
    turn = chat.turn(PROMPT)
    for layer in model.model.layers:
        switch(layer.self_attn.v_proj)
    # In the middle of a turn nothing is saved, as nobody knows which of both it is of; afterwards it is refused.
    model.generate(**turn, **GREEDY)
    assert chat.saved().result().refused == "unknown_adapter"
    with pytest.raises(UsageError, match="adapter"):
        chat.turn(PROMPT)
    with pytest.raises(UsageError, match="adapter"):
        prefill(model, PROMPT, space)
    assert stored(space, PROMPT) == 0
    assert space_of(cache, model, adapter="a", adapter_digest="1").keyspace.root != space.keyspace.root


def test_frequencies_that_are_not_those_of_the_configuration_have_another_keyspace(cache):
    model, other = make(), make()
    other.model.rotary_emb.inv_freq *= 0.25
    assert space_of(cache, model).keyspace.root != space_of(cache, other).keyspace.root
