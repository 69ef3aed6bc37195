"""A conversation goes on where it, or another process, left off; what is stored belongs to its tokens."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch

import kvtier
from kvtier.errors import SessionUnavailable, UsageError

transformers = pytest.importorskip("transformers")

from kvtier.connectors.transformers import KVTierCache, prefill  # noqa: E402
from kvtier.connectors.transformers import cache as cache_module  # noqa: E402
from tests.transformers_fixture import BLOCK, make, plain, space_of, stored, words  # noqa: E402

ANSWER = 2 * BLOCK + 3


@pytest.fixture
def cache() -> Iterator[kvtier.Cache]:
    with kvtier.open({"cpu": {"capacity": "16MiB"}}) as opened:
        yield opened


@pytest.fixture(params=["Llama", "Qwen2"])
def model(request):
    return make(request.param)


def answer(model, chat, ids, tokens=ANSWER):
    """The next turn of a conversation: prompt and answer."""
    return model.generate(**chat.turn(ids), max_new_tokens=tokens, do_sample=False)[0]


def history(model, turns, cache=None, space=None):
    """A conversation of so many turns, each compared with the model alone; token ids and the last cache."""
    chat = KVTierCache(model, space)
    ids = words(0, 40)
    for number in range(turns):
        whole = answer(model, chat, ids)
        assert whole[len(ids) :].tolist() == plain(model, ids[None], ANSWER)[0]
        ids = torch.cat([whole, words(number + 1, 20)])
    return ids, chat


def test_each_turn_computes_only_what_is_new(cache, model):
    space = space_of(cache, model)
    chat, ids = KVTierCache(model, space), words(0, 40)
    whole = answer(model, chat, ids)
    for turn in range(1, 4):
        ids = torch.cat([whole, words(turn, 20)])
        whole = answer(model, chat, ids)
        assert whole[len(ids) :].tolist() == plain(model, ids[None], ANSWER)[0]
        # All but the last token of the answer before, which was chosen and not computed.
        assert (chat.kept, chat.loaded, chat.computed) == (len(ids) - 21, 0, 21)
    assert chat.saved().result().refused == ""
    assert stored(space, whole[:-1]) == (len(whole) - 1) // BLOCK * BLOCK


def test_another_process_goes_on_where_the_first_stopped(cache, model):
    space = space_of(cache, model)
    ids, chat = history(model, 2, space=space)
    chat.saved().result()
    held = (len(ids) - 21) // BLOCK * BLOCK
    other = KVTierCache(model, space)
    whole = answer(model, other, ids)
    assert (other.kept, other.loaded) == (0, held)
    assert other.starts[0].tiers == {"cpu": held}
    assert whole[len(ids) :].tolist() == plain(model, ids[None], ANSWER)[0]


def test_a_block_is_stored_as_soon_as_it_is_whole(cache, model):
    space = space_of(cache, model)
    chat, ids = KVTierCache(model, space), words(0, 40)
    found = []

    class Looks(transformers.StoppingCriteria):
        def __call__(self, input_ids, scores, **_):
            saved = chat._blocks.done()
            saved.result(30.0)
            found.append((input_ids.shape[1] - 1, stored(space, input_ids[0])))
            return torch.zeros(1, dtype=torch.bool)

    model.generate(**chat.turn(ids), max_new_tokens=ANSWER, do_sample=False, stopping_criteria=[Looks()])
    assert [count for _, count in found] == [held // BLOCK * BLOCK for held, _ in found]


def test_what_was_computed_before_an_answer_was_broken_off_is_stored(cache, model):
    space = space_of(cache, model)
    chat, ids = KVTierCache(model, space), words(0, 40)

    class Breaks(transformers.StoppingCriteria):
        def __call__(self, input_ids, scores, **_):
            if input_ids.shape[1] == 40 + BLOCK + 10:
                raise KeyboardInterrupt
            return torch.zeros(1, dtype=torch.bool)

    with pytest.raises(KeyboardInterrupt):
        model.generate(**chat.turn(ids), max_new_tokens=ANSWER, do_sample=False, stopping_criteria=[Breaks()])
    chat._blocks.done().result()
    again = KVTierCache(model, space)
    expected = plain(model, ids[None], ANSWER)[0]
    resumed = torch.cat([ids, torch.tensor(expected[: BLOCK + 9])])
    assert answer(model, again, resumed, 8)[len(resumed) :].tolist() == expected[BLOCK + 9 : BLOCK + 17]
    assert again.loaded == len(resumed) // BLOCK * BLOCK == 64


def test_a_forward_that_was_broken_off_is_forgotten(cache, model):
    space = space_of(cache, model)
    chat, ids = KVTierCache(model, space), words(0, 40)
    hook = model.model.layers[1].register_forward_hook(lambda *_: (_ for _ in ()).throw(MemoryError("broken off")))
    with pytest.raises(MemoryError):
        model.generate(**chat.turn(ids), max_new_tokens=4)
    hook.remove()
    assert answer(model, chat, ids)[len(ids) :].tolist() == plain(model, ids[None], ANSWER)[0]
    assert chat.kept == 0
    assert chat.saved().result().refused == ""


@pytest.mark.parametrize("at", [1, BLOCK - 1, BLOCK, 45, 60])
def test_an_edited_history_is_computed_from_where_it_was_edited(cache, model, at):
    space = space_of(cache, model)
    ids, chat = history(model, 2, space=space)
    edited = ids.clone()
    edited[at] = (edited[at] + 1) % 511 + 1
    assert answer(model, chat, edited)[len(edited) :].tolist() == plain(model, edited[None], ANSWER)[0]
    assert (chat.kept, chat.loaded) == (at, 0)
    chat.saved().result()
    # Both branches are stored, each under its own tokens.
    for branch in (ids, edited):
        other = KVTierCache(model, space)
        assert answer(model, other, branch)[len(branch) :].tolist() == plain(model, branch[None], ANSWER)[0]
        assert other.loaded >= (len(branch) - 21) // BLOCK * BLOCK


def test_an_answer_is_given_again(cache, model):
    space = space_of(cache, model)
    ids, chat = history(model, 1, space=space)
    first = answer(model, chat, ids)
    again = answer(model, chat, ids)
    assert again.tolist() == first.tolist()
    assert (chat.kept, chat.computed) == (len(ids) - 1, 1)


def test_going_back_to_an_earlier_branch_loads_what_was_let_go(cache, model):
    space = space_of(cache, model)
    ids, chat = history(model, 3, space=space)
    chat.saved().result()
    answer(model, chat, torch.cat([ids[:40], words(9, 20)]))
    assert chat.kept == 40
    back = answer(model, chat, ids)
    assert back[len(ids) :].tolist() == plain(model, ids[None], ANSWER)[0]
    assert chat.kept == 40
    assert chat.kept + chat.loaded == (len(ids) - 21) // BLOCK * BLOCK


def test_a_cropped_cache_saves_what_follows_under_the_right_tokens(cache, model):
    space = space_of(cache, model)
    chat, ids = KVTierCache(model, space), words(0, 40)
    answer(model, chat, ids)
    chat.crop(-(chat.get_seq_length() - 20))
    other = torch.cat([ids[:20], words(5, 30)])
    with torch.no_grad():
        model(input_ids=other[None, 20:], cache=chat)
    assert chat.saved().result().refused == ""
    assert stored(space, other) == 48
    _, theirs = None, transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids=other[None], cache=theirs)
    mine = prefill(model, torch.cat([other, words(6, 1)])[None], space).cache
    for ours, layer in zip(mine.layers, theirs.layers, strict=True):
        assert (ours.keys[:, :, :48] - layer.keys[:, :, :48]).abs().max() < 1e-5


def cleared(chat, model):
    chat.reset()


def grown_by_another(chat, model):
    for layer in chat.layers:
        layer.update(torch.ones(1, 2, 3, 16), torch.ones(1, 2, 3, 16))


def replaced(chat, model):
    for layer in chat.layers:
        layer.values = layer.values * 2


def written_to(chat, model, _tokens=0):
    for layer in chat.layers:
        layer.values.mul_(2)


def repeated(chat, model):
    chat.batch_repeat_interleave(2)


def selected(chat, model):
    chat.batch_select_indices(torch.tensor([0]))


def masked(chat, model, tokens=BLOCK):
    mask = torch.ones(1, chat.get_seq_length() + tokens, dtype=torch.long)
    mask[0, 3] = 0
    model(input_ids=words(7, tokens)[None], cache=chat, attention_mask=mask)


def shifted(chat, model, tokens=BLOCK):
    places = torch.arange(tokens)[None] + chat.get_seq_length() + 1
    model(input_ids=words(7, tokens)[None], cache=chat, position_ids=places)


def embedded(chat, model):
    model(inputs_embeds=model.get_input_embeddings()(words(7, BLOCK)[None]), cache=chat)


def in_training(chat, model):
    model.train()
    model(input_ids=words(7, BLOCK)[None], cache=chat)
    model.eval()


def under_autocast(chat, model):
    with torch.autocast("cpu", torch.bfloat16):
        model(input_ids=words(7, BLOCK)[None], cache=chat)


MEDDLING = [
    grown_by_another,
    replaced,
    written_to,
    repeated,
    selected,
    masked,
    shifted,
    embedded,
    in_training,
    under_autocast,
]


@torch.no_grad()
@pytest.mark.parametrize("meddle", MEDDLING, ids=lambda meddle: meddle.__name__)
def test_what_is_not_known_to_be_of_its_tokens_is_not_saved(cache, model, meddle, monkeypatch):
    space = space_of(cache, model)
    chat, ids = KVTierCache(model, space), words(0, 40)
    answer(model, chat, ids)
    chat.saved().result()
    monkeypatch.setattr(space, "save", lambda *_, **__: pytest.fail("saved"))
    meddle(chat, model)
    rows = chat.layers[0].keys.shape[0]
    model(input_ids=words(8, 3 * BLOCK).repeat(rows, 1), cache=chat)
    assert chat.saved().result().refused.startswith("unknown_")
    assert sum(count for why, count in cache.counters.items() if why.startswith("save_unknown_")) == 1
    monkeypatch.undo()
    # The next turn begins with what is stored.
    assert answer(model, chat, ids)[len(ids) :].tolist() == plain(model, ids[None], ANSWER)[0]
    assert (chat.kept, chat.loaded) == (0, 32)
    assert chat.saved().result().refused == ""


def test_a_cache_that_was_cleared_begins_anew(cache, model):
    space = space_of(cache, model)
    ids, chat = history(model, 1, space=space)
    chat.saved().result()
    chat.reset()
    assert chat.get_seq_length() == 0
    assert answer(model, chat, ids)[len(ids) :].tolist() == plain(model, ids[None], ANSWER)[0]
    assert (chat.kept, chat.loaded) == (0, (len(ids) - 21) // BLOCK * BLOCK)


def test_a_copy_goes_its_own_way(cache, model):
    space = space_of(cache, model)
    ids, chat = history(model, 1, space=space)
    other = copy.deepcopy(chat)
    branches = {one: torch.cat([ids, words(seed, 18)]) for one, seed in ((chat, 3), (other, 4))}
    for one, branch in branches.items():
        assert answer(model, one, branch)[len(branch) :].tolist() == plain(model, branch[None], ANSWER)[0]
        assert one.kept == len(ids) - 21
        one.saved().result()
    for branch in branches.values():
        assert stored(space, branch) == len(branch) // BLOCK * BLOCK


@torch.no_grad()
@pytest.mark.parametrize("meddle", [masked, shifted, written_to], ids=lambda meddle: meddle.__name__)
def test_a_copy_of_what_is_not_known_begins_with_what_is_stored(cache, model, meddle):
    space = space_of(cache, model)
    chat, ids = KVTierCache(model, space), words(0, 40)
    answer(model, chat, ids)
    assert chat.saved().result().refused == ""
    # Too little for a block: until the next turn nobody needs to know what it was.
    meddle(chat, model, 3)
    other = copy.deepcopy(chat)
    assert answer(model, other, ids)[len(ids) :].tolist() == plain(model, ids[None], ANSWER)[0]
    assert (other.kept, other.loaded) == (0, 32)


@torch.no_grad()
@pytest.mark.parametrize("meddle", [replaced, written_to], ids=lambda meddle: meddle.__name__)
def test_what_was_changed_before_it_is_offered_again_is_not_saved(cache, model, meddle, monkeypatch):
    space = space_of(cache, model)
    chat, ids = KVTierCache(model, space), words(0, 40)
    answer(model, chat, ids)
    chat.saved().result()
    chat.turn(ids)  # offers all of it again, for what was evicted meanwhile
    monkeypatch.setattr(space, "save", lambda *_, **__: pytest.fail("saved"))
    meddle(chat, model)
    assert chat.saved().result().refused == "unknown_changed"


def test_without_a_turn_it_is_a_cache_like_any_other_and_saves(cache, model):
    space = space_of(cache, model)
    chat, ids = KVTierCache(model, space), words(0, 40)
    whole = model.generate(ids[None], cache=chat, max_new_tokens=ANSWER, do_sample=False)[0]
    assert whole[len(ids) :].tolist() == plain(model, ids[None], ANSWER)[0]
    assert chat.saved().result().blocks == (len(whole) - 1) // BLOCK


def test_a_prompt_that_is_computed_in_chunks_gives_the_same_tokens(cache):
    model = make()
    space, ids = space_of(cache, model), words(0, 100)
    for loaded in (0, 96):
        chat = KVTierCache(model, space)
        out = model.generate(**chat.turn(ids), max_new_tokens=ANSWER, do_sample=False, prefill_chunk_size=24)[0]
        assert out[len(ids) :].tolist() == plain(model, ids[None], ANSWER)[0]
        assert (chat.loaded, chat.saved().result().refused) == (loaded, "")


def test_what_would_compute_a_prompt_behind_itself_is_refused(cache):
    model, draft = make(), make(num_hidden_layers=2)
    space, ids = space_of(cache, model), words(0, 100)
    chat = KVTierCache(model, space)
    answer(model, chat, ids)
    # transformers passes the whole prompt on top of what the cache has, and answers with other tokens.
    with pytest.raises(UsageError, match="assisted decoding"):
        model.generate(**chat.turn(ids), max_new_tokens=4, do_sample=False, assistant_model=draft)
    turn = chat.turn(ids)
    with pytest.raises(UsageError, match="1 are missing"):
        model(**turn)
    for more in ({"num_beams": 2}, {"num_return_sequences": 2, "do_sample": True}):
        with pytest.raises(UsageError, match="num_beams"):
            model.generate(**chat.turn(ids), max_new_tokens=4, **more)
    assert answer(model, chat, ids)[len(ids) :].tolist() == plain(model, ids[None], ANSWER)[0]


def test_without_its_host_a_conversation_goes_on_and_later_turns_are_stored(cache, model, monkeypatch):
    space = space_of(cache, model)
    ids, chat = history(model, 1, space=space)
    chat.saved().result()
    with monkeypatch.context() as broken:
        for call in ("match", "reserve"):
            broken.setattr(cache.session, call, gone)
        whole = answer(model, chat, ids)
        assert whole[len(ids) :].tolist() == plain(model, ids[None], ANSWER)[0]
        assert chat.saved().result().refused == "SessionUnavailable"
    ids = torch.cat([whole, words(3, 20)])
    assert answer(model, chat, ids)[len(ids) :].tolist() == plain(model, ids[None], ANSWER)[0]
    # What was refused was offered again: nothing is missing in the middle.
    assert chat.saved().result().refused == ""
    assert stored(space, ids) == len(ids) // BLOCK * BLOCK


def gone(*_args, **_kwargs):
    raise SessionUnavailable("gone")


def no_memory(*_):
    raise RuntimeError("no memory")


def test_what_could_not_be_saved_does_not_end_the_saving_of_a_conversation(cache, monkeypatch):
    model = make()
    with torch.no_grad():
        model.get_input_embeddings().weight[500] = torch.nan
    space = space_of(cache, model, plan="int8")
    chat, ids = KVTierCache(model, space), words(0, 3 * BLOCK) % 500
    answer(model, chat, ids, 1)
    answer(model, chat, torch.cat([ids, torch.tensor([500]), ids]), 3)
    assert chat.saved().result().refused == "bad_values"
    whole = answer(model, chat, torch.cat([ids, ids]), 3)
    assert chat.saved().result().refused == ""
    assert stored(space, whole[:-1]) == (len(whole) - 1) // BLOCK * BLOCK
    # Nor does a moment without memory.
    with monkeypatch.context() as short:
        short.setattr(cache_module, "rows_of", no_memory)
        whole = answer(model, chat, torch.cat([whole, ids]), 3)
        assert chat.saved().result().refused == "kv_mismatch"
    whole = answer(model, chat, torch.cat([whole, ids]), 3)
    assert chat.saved().result().refused == ""
    assert stored(space, whole[:-1]) == (len(whole) - 1) // BLOCK * BLOCK


def test_saving_can_be_left_out(cache, model):
    space = space_of(cache, model)
    chat, ids = KVTierCache(model, space, save=False), words(0, 40)
    answer(model, chat, ids)
    assert (chat.saved().result().blocks, stored(space, ids)) == (0, 0)


def test_a_turn_without_tokens_and_a_model_in_training_are_refused(cache, model):
    space = space_of(cache, model)
    chat = KVTierCache(model, space)
    with pytest.raises(UsageError, match="one sequence"):
        chat.turn([])
    model.train()
    with pytest.raises(UsageError, match="training mode"):
        chat.turn([1, 2])


def test_what_a_slow_host_must_still_save_is_bounded(cache, model, monkeypatch):
    import threading

    space, go_on = space_of(cache, model), threading.Event()
    reserve, held = cache.session.reserve, []

    def slow(*args, **kwargs):
        go_on.wait(30.0)
        return reserve(*args, **kwargs)

    monkeypatch.setattr(cache.session, "reserve", slow)
    chat, ids = KVTierCache(model, space), words(0, 40)
    whole = answer(model, chat, ids, 20 * BLOCK)
    held.append(chat._blocks._busy + len(chat._blocks._waiting))
    go_on.set()
    assert held[0] <= 10
    saved = chat.saved().result()
    assert (saved.blocks, saved.refused) == ((len(whole) - 1) // BLOCK, "")
