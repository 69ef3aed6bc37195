"""Prompts of a batch, padded on the left, each begin with their own stored prefix."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import kvtier
from kvtier.errors import UsageError

pytest.importorskip("transformers")

from kvtier.connectors.transformers import KVTierCache, prefill
from kvtier.connectors.transformers.prefix import meeting
from tests.transformers_fixture import BLOCK, make, plain, space_of, stored, words

ANSWER = BLOCK + 5


@pytest.fixture
def cache() -> Iterator[kvtier.Cache]:
    with kvtier.open({"cpu": {"capacity": "32MiB"}}) as opened:
        yield opened


@pytest.fixture(params=["Llama", "Qwen2"])
def model(request):
    return make(request.param)


def batch(prompts):
    """Padded on the left, as a tokenizer does it: ids and mask."""
    width = max(map(len, prompts))
    ids = torch.stack([torch.cat([torch.zeros(width - len(one), dtype=torch.long), one]) for one in prompts])
    mask = torch.stack([torch.arange(width) >= width - len(one) for one in prompts]).long()
    return ids, mask


def answers(model, chat, ids, mask, tokens=ANSWER, **more):
    out = model.generate(**chat.turn(ids, mask), max_new_tokens=tokens, do_sample=False, **more)
    return out[:, ids.shape[1] :].tolist()


def store(model, space, *prompts):
    for one in prompts:
        assert prefill(model, one, space).saved.result().refused == ""


DOCUMENT = words(1, 6 * BLOCK)
SHARED = [torch.cat([DOCUMENT, words(seed, count)]) for seed, count in ((2, 21), (3, 5), (4, 14))]
VARIED = [
    torch.cat([DOCUMENT, words(5, 40)]),
    words(6, 9),
    torch.cat([DOCUMENT[: 3 * BLOCK], words(7, 60)]),
    words(8, 150),
]


@pytest.mark.parametrize("prompts", [SHARED, VARIED, VARIED[::-1], VARIED[:2], [VARIED[1]]], ids=range(5))
@pytest.mark.parametrize("known", [(), (0,), (0, 2), (0, 1, 2, 3)], ids=str)
def test_answers_are_those_of_the_same_batch_without_kvtier(cache, model, prompts, known):
    space = space_of(cache, model)
    store(model, space, *(prompts[at] for at in known if at < len(prompts)))
    ids, mask = batch(prompts)
    chat = KVTierCache(model, space)
    assert answers(model, chat, ids, mask) == plain(model, ids, ANSWER, mask)
    assert chat.loaded + chat.computed == sum(map(len, prompts))
    assert chat.saved().result().refused == ""
    # And each row's KV is that of its prompt alone.
    for prompt in prompts:
        alone = KVTierCache(model, space)
        assert answers(model, alone, prompt[None], None) == plain(model, prompt[None], ANSWER)
        assert alone.loaded == (len(prompt) - 1) // BLOCK * BLOCK


def test_each_row_has_its_own_hit(cache, model):
    space = space_of(cache, model)
    store(model, space, DOCUMENT)
    chat = KVTierCache(model, space)
    chat.turn(*batch(SHARED))
    # The longest prompt has no padding: where its document ends, the others meet it, with what they have.
    assert [start.loaded for start in chat.starts] == [96, 80, 89]
    assert [start.tokens for start in chat.starts] == [117, 101, 110]
    assert {tuple(start.tiers) for start in chat.starts} == {("cpu",)}


def test_a_row_that_is_not_stored_does_not_make_the_others_compute_what_they_have(cache, model):
    space = space_of(cache, model)
    long = [torch.cat([words(seed, 30 * BLOCK), words(seed + 50, 9)]) for seed in range(4)]
    store(model, space, *long[:3])
    chat = KVTierCache(model, space)
    ids, mask = batch(long)
    assert answers(model, chat, ids, mask) == plain(model, ids, ANSWER, mask)
    assert [start.loaded for start in chat.starts] == [30 * BLOCK] * 3 + [0]


@pytest.mark.parametrize(
    ("ends", "columns", "column"),
    [
        ((100,), 120, 100),  # one row: what it has
        ((100, 90, 95), 120, 90),  # two calls of 64 + 10 and 64 + 5 cost more than 3 x 10 columns
        ((1000, 1000, 0), 1020, 1000),  # 64 + 1000 alone, against 1020 columns of three rows
        ((1000, 1000, 1000, 999), 1020, 999),
        ((0, 0, 0), 50, 0),
        ((120, 120), 121, 120),
    ],
)
def test_rows_meet_where_least_is_computed(ends, columns, column):
    assert meeting(ends, columns) == column


def test_what_a_row_is_filled_up_with_after_its_end_is_not_stored(cache):
    model = make()
    space = space_of(cache, model)
    ids, mask = batch(SHARED)
    whole = plain(model, ids, 4 * BLOCK, mask)
    # A token that ends one row early and another late, or never.
    end = whole[1][3]
    lengths = [row.index(end) + 1 if end in row else len(row) for row in whole]
    assert min(lengths) <= 4
    assert max(lengths) > BLOCK
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = end, 0
    chat = KVTierCache(model, space)
    out = model.generate(**chat.turn(ids, mask), max_new_tokens=4 * BLOCK, do_sample=False)
    chat.saved().result()
    for row, (prompt, length) in enumerate(zip(SHARED, lengths, strict=True)):
        sequence = out[row, ids.shape[1] - len(prompt) :]
        real = len(prompt) + length
        assert stored(space, sequence) // BLOCK in (real // BLOCK, (real - 1) // BLOCK)


def test_padding_on_the_right_is_refused(cache):
    model = make()
    chat = KVTierCache(model, space_of(cache, model))
    ids, mask = batch(SHARED)
    for wrong in (mask.flip(1), mask * 0, mask[:, 1:]):
        with pytest.raises(UsageError, match="attention_mask"):
            chat.turn(ids, wrong)


def test_a_batch_that_is_larger_than_what_may_wait_is_saved_whole(cache):
    model = make()
    space = space_of(cache, model)
    prompts = [words(seed, 3 * BLOCK + seed % 5) for seed in range(40)]
    chat = KVTierCache(model, space)
    answers(model, chat, *batch(prompts), 4)
    saved = chat.saved().result()
    assert (saved.blocks, saved.refused) == (120, "")
    assert not cache.counters
