"""A model that keeps its KV in pages answers as with a DynamicCache, bit for bit, and holds once what is shared."""

from __future__ import annotations

import copy

import pytest
import torch

import kvtier
from kvtier.codecs.view import KVView
from kvtier.errors import ConfigError, KVMismatch, PoolFull, UnsupportedKV

transformers = pytest.importorskip("transformers")

from kvtier.connectors.transformers import PagedCache, pages_for, spec_for  # noqa: E402
from kvtier.connectors.transformers.forward import cache_argument  # noqa: E402
from tests.transformers_fixture import make, plain, space_of, words  # noqa: E402

PAGE = 16


@pytest.fixture(params=["grouped", "multi", "bfloat16", "eager"])
def model(request):
    """Llama with 4 heads over 2 KV heads, over 4, in another dtype, with the other attention."""
    made = make(
        num_key_value_heads=4 if request.param == "multi" else 2,
        dtype=torch.bfloat16 if request.param == "bfloat16" else torch.float32,
    )
    if request.param == "eager":
        made.set_attn_implementation("eager")
    return made


@pytest.fixture
def tiny():
    return make()


def pool(model, pages=64):
    return pages_for(model, memory=pages * PAGE * spec_for(model).token_nbytes + 1, page_tokens=PAGE)


@torch.no_grad()
def step(model, ids, cache, **more):
    return model(ids, **{cache_argument(model): cache}, **more).logits


def generate(model, ids, cache, **more):
    return model.generate(ids, **{cache_argument(model): cache}, do_sample=False, **more)


def pages_in_use(kv):
    return kv.held_nbytes // kv.page_nbytes


def test_logits_are_those_of_a_dynamic_cache(model):
    """Prompt, steps across pages, several tokens at once, a cut, and on; a second sequence grows in between."""
    kv = pool(model)
    paged, other, dense = PagedCache(kv), PagedCache(kv), transformers.DynamicCache(config=model.config)
    for number, tokens in enumerate([37, 1, 1, 30, 1, 16, 1, 5]):
        ids = words(number, tokens)[None]
        step(model, words(99, 7)[None], other)
        assert torch.equal(step(model, ids, paged), step(model, ids, dense))
        if number in {2, 5}:
            paged.crop(-9)
            dense.crop(-9)
        assert paged.get_seq_length() == dense.get_seq_length()


def test_generation_with_padded_prompts_is_the_same(model):
    ids = torch.stack([words(3, 50), words(4, 50), words(5, 50)])
    mask = torch.ones_like(ids)
    mask[0, :21] = mask[2, :1] = 0
    out = generate(model, ids, PagedCache(pool(model)), attention_mask=mask, max_new_tokens=40)
    assert out[:, 50:].tolist() == plain(model, ids, 40, mask)


def test_beams_are_forks(tiny):
    """Beam search branches off at nearly every step: it copies pages of the beams' ends, and no more."""
    kv, ids = pool(tiny), words(1, 70)[None]
    cache = PagedCache(kv)
    out = generate(tiny, ids, cache, num_beams=4, max_new_tokens=40)
    assert out.tolist() == generate(tiny, ids, None, num_beams=4, max_new_tokens=40).tolist()
    assert pages_in_use(kv) == len({page for row in cache.rows for page in row.pages})
    cache.close()
    assert pages_in_use(kv) == 0


def test_a_hundred_requests_hold_their_system_prompt_once(tiny):
    """16 whole pages of the prompt, and a page for each that the rest of the prompt and the answer go to."""
    kv = pool(tiny, pages=16 + 1 + 100)
    system = PagedCache(kv)
    prompt = words(0, 16 * PAGE + 5)[None]
    step(tiny, prompt, system)
    assert pages_in_use(kv) == 17
    requests = system.fork(100)
    assert pages_in_use(kv) == 17
    questions = torch.stack([words(i, 6) for i in range(100)])
    logits = step(tiny, questions, requests)
    assert pages_in_use(kv) == 16 + 1 + 100
    assert kv.held_nbytes == (16 + 101) * kv.spec.token_nbytes * PAGE
    alone = transformers.DynamicCache(config=tiny.config)
    step(tiny, prompt.expand(100, -1), alone)
    assert torch.equal(logits, step(tiny, questions, alone))
    del requests, system
    assert pages_in_use(kv) == 0


def test_forks_neither_see_nor_disturb_each_other(tiny):
    kv = pool(tiny)
    first, alone = PagedCache(kv), [transformers.DynamicCache(config=tiny.config) for _ in range(3)]
    prompt = words(0, 37)[None]
    step(tiny, prompt, first)
    caches = [first, first.fork(), copy.deepcopy(first)]
    for dense in alone:
        step(tiny, prompt, dense)
    for turn in range(20):
        for number in range(3):
            ids = words(100 * number + turn, 1 + turn % 3)[None]
            assert torch.equal(step(tiny, ids, caches[number]), step(tiny, ids, alone[number]))


def test_rows_are_repeated_and_chosen(tiny):
    kv, ids = pool(tiny), torch.stack([words(0, 20), words(1, 20)])
    paged, dense = PagedCache(kv), transformers.DynamicCache(config=tiny.config)
    step(tiny, ids, paged)
    step(tiny, ids, dense)
    for cache in (paged, dense):
        cache.batch_repeat_interleave(2)
        cache.batch_select_indices(torch.tensor([True, False, True, True]))
        cache.batch_select_indices(torch.tensor([2, 0]))
    more = torch.stack([words(2, 3), words(3, 3)])
    assert torch.equal(step(tiny, more, paged), step(tiny, more, dense))


def test_out_of_pages_refuses_the_step_and_changes_nothing(tiny):
    kv = pool(tiny, pages=6)
    other, cache = PagedCache(kv), PagedCache(kv)
    step(tiny, words(9, 2 * PAGE)[None], other)
    ids = words(0, 3 * PAGE + 10)[None]
    step(tiny, ids, cache)
    more, dense = words(1, 20)[None], transformers.DynamicCache(config=tiny.config)
    with pytest.raises(PoolFull, match="0 of 6 are free"):
        step(tiny, more, cache)
    assert cache.get_seq_length() == ids.shape[1]
    other.close()
    step(tiny, ids, dense)
    assert torch.equal(step(tiny, more, cache), step(tiny, more, dense))


def test_a_prefix_is_found_by_its_tokens(tiny):
    kv, prompt = pool(tiny), words(0, 50)
    first = PagedCache(kv)
    step(tiny, prompt[None], first)
    kv.tables.name(first.rows[0], prompt)
    other = torch.cat([prompt[:40], words(1, 30)])
    table = kv.tables.find(other[:-1])
    assert table.tokens == 2 * PAGE
    out = generate(tiny, other[None], PagedCache(kv, [table]), max_new_tokens=20)
    assert out[:, 70:].tolist() == plain(tiny, other[None], 20)
    assert first.rows[0].pages[:2] == table.pages[:2]


@pytest.mark.parametrize("plan", ["raw", "int8"])
def test_pages_are_saved_and_loaded_in_place(tiny, plan):
    """Into shuffled pages of another pool; what the plan rounds moves logits a little."""
    prompt = words(0, 80)
    with kvtier.open({"cpu": {"capacity": "16MiB"}}) as opened:
        space, kv = space_of(opened, tiny, plan=plan), pool(tiny)
        cache = PagedCache(kv)
        step(tiny, prompt[None, :79], cache)
        view = KVView.paged(kv.pools, cache.rows[0].pages, space.keyspace.spec, tokens=79)
        saved = space.save(prompt[:79], view, vouched=True).result()
        assert (saved.blocks, saved.refused) == (4, "")
        there = pool(tiny)
        tables = [there.tables.new() for _ in range(5)]
        there.tables.extend((table, PAGE) for table in tables)
        row = there.tables.new()
        for table in tables[::2]:
            there.tables.free(table)
        there.tables.extend([(row, 64)])
        assert list(row.pages) != sorted(row.pages)
        with space.match(prompt) as hit:
            assert hit.load(KVView.paged(there.pools, row.pages, space.keyspace.spec)) == 64
        loaded = step(tiny, prompt[None, 64:], PagedCache(there, [row]))[:, -1]
        exact = step(tiny, prompt[None, 79:], cache)[:, -1]
    error = (loaded - exact).abs().max() / exact.abs().max()
    assert error < (1e-5 if plan == "raw" else 0.05)
    assert plan == "raw" or error > 1e-5


def test_what_does_not_fit_is_refused(tiny):
    kv = pool(tiny)
    with pytest.raises(KVMismatch, match="the pool is of"):
        step(make(num_key_value_heads=4), words(0, 5)[None], PagedCache(kv))
    cache = PagedCache(kv)
    step(tiny, words(0, 5)[None], cache)
    with pytest.raises(KVMismatch, match="2 rows are written, and the batch has 1"):
        step(tiny, words(0, 5).expand(2, -1), cache)
    assert (cache.get_seq_length(), cache.rows[0].tokens) == (5, 5)
    with pytest.raises(ConfigError, match="hold no page"):
        pages_for(tiny, memory=100)
    with pytest.raises(UnsupportedKV):
        pages_for(make("Mistral", sliding_window=8), memory=1 << 20)
