"""What a flow shares with everybody, what with its own session, and what became of a context with nothing else."""

from __future__ import annotations

import os
from copy import deepcopy
from functools import partial

import numpy as np
import pytest
import torch

import kvtier
from kvtier.client.pools import Pools
from kvtier.errors import KVMismatch, UsageError

transformers = pytest.importorskip("transformers")

from kvtier.flow import Flow  # noqa: E402
from kvtier.flow.archive import Archive  # noqa: E402
from kvtier.flow.state import context_of, pack  # noqa: E402
from tests.transformers_fixture import BLOCK, make, space_of, stored, words  # noqa: E402

SYSTEM, QUESTION = words(0, 130), words(1, 90)
PROMPT = torch.cat([SYSTEM, QUESTION])
EDGE = len(SYSTEM) // BLOCK * BLOCK
GREEDY = {"max_new_tokens": 40, "do_sample": False}
PRUNED = "int4*snap_kv(0.5,window=8,whole=0);recent:16;every:10"
MASS = "int8*h2o(0.6,whole=0);recent:16;every:10"
BY_HEAD = (
    "int8*prune/1(mass*byhead:0.2(ratio:0.4),sinks:2,recent:8/0.0,every:1,whole:0,positions:kept);recent:0;every:15"
)
SPLIT = (
    "layers(0:int4*h2o(0.4,whole=0);1:K=raw,V=int8/token/sym*snap_kv(0.6,window=8,whole=0);2:raw);recent:0.1;every:10"
)
THRESHOLD = "int4*attention_threshold(0.002);recent:16;every:10"


@pytest.fixture
def host():
    with kvtier.open({"cpu": {"capacity": "64MiB"}}) as opened:
        yield opened


@pytest.fixture(scope="module")
def model():
    return make()


def pools(host, model, session: str) -> Pools:
    return Pools(partial(space_of, host, model), session)


def answered(flow: Flow, ids: torch.Tensor, **options) -> torch.Tensor:
    made = flow.generate(ids, **(GREEDY | options))
    for done in flow.saved:
        assert done.result(10.0).refused == ""
    return made[0]


def test_the_public_part_is_everybodys_and_the_rest_the_sessions(host, model):
    wanted = answered(Flow(model, PRUNED), PROMPT)
    first = Flow(model, PRUNED, space=pools(host, model, "alice"))
    assert torch.equal(answered(first, PROMPT, public=len(SYSTEM)), wanted)
    assert [done.result().blocks for done in first.saved] == [EDGE // BLOCK, (len(PROMPT) - EDGE) // BLOCK]
    loaded = []
    for session in ("alice", "bob"):
        flow = Flow(model, PRUNED, space=pools(host, model, session))
        assert torch.equal(answered(flow, PROMPT, public=len(SYSTEM)), wanted)
        loaded.append(flow.loaded)
    # All but the tokens whose attention is looked at.
    assert loaded == [EDGE + (len(PROMPT) - 8 - EDGE) // BLOCK * BLOCK, EDGE]
    assert stored(space_of(host, model), PROMPT) == EDGE


@pytest.mark.parametrize("recipe", ["int4", PRUNED, MASS])
def test_all_of_a_prompt_can_be_public(host, model, recipe):
    """Also the last tokens of it, which are computed in any case."""
    prompt = PROMPT[:EDGE]
    first = Flow(model, recipe, space=pools(host, model, "alice"))
    answered(first, prompt, public=EDGE)
    assert stored(space_of(host, model), prompt) == EDGE
    again = Flow(model, recipe, space=pools(host, model, "bob"))
    answered(again, prompt, public=EDGE)
    assert again.loaded == (0 if recipe == MASS else EDGE - BLOCK), "but for what is asked"
    assert [done.result().blocks for done in again.saved] in ([], [0])


def test_nothing_is_public_unless_it_is_said(host, model):
    flow = Flow(model, "int4", space=pools(host, model, "alice"))
    answered(flow, PROMPT)
    assert stored(space_of(host, model), PROMPT) == 0
    again = Flow(model, "int4", space=pools(host, model, "alice"))
    answered(again, PROMPT)
    assert again.loaded == (len(PROMPT) - 1) // BLOCK * BLOCK
    with pytest.raises(UsageError, match="public is 221"):
        flow.generate(PROMPT, public=len(PROMPT) + 1)


@pytest.mark.parametrize("recipe", ["raw", "int4", PRUNED, MASS, THRESHOLD, BY_HEAD, SPLIT])
def test_another_flow_goes_on_with_what_was_kept(host, model, recipe):
    """Token for token as the one that kept it, through later agings and prunings."""
    archive = Archive(host, space_of(host, model), "alice")
    flow, other = Flow(model, recipe), Flow(model, recipe)
    said = answered(flow, PROMPT)
    name, done = flow.keep(archive)
    assert (len(name), done.result(10.0).refused) == (32, "")
    assert other.resume(Archive(host, space_of(host, model), "alice"), name)
    assert other.report.stored == flow.report.stored
    asked = torch.cat([said, words(2, 30)])
    assert torch.equal(answered(other, asked), answered(flow, asked))
    assert (other.report.stored, other.report.pruner) == (flow.report.stored, flow.report.pruner)


def test_what_was_kept_answers_for_that_context_alone(host, model):
    """For no other recipe, session or context, nor for a part of it; and it is no prefix of anything."""
    archive, flow = Archive(host, space_of(host, model), "alice"), Flow(model, PRUNED)
    said = answered(flow, PROMPT)
    name, done = flow.keep(archive)
    done.result(10.0)
    assert not Flow(model, "int4").resume(archive, name)
    assert not Flow(model, PRUNED).resume(Archive(host, space_of(host, model), "bob"), name)
    assert not Flow(model, PRUNED).resume(archive, os.urandom(32))
    assert stored(space_of(host, model), said) == 0
    # The same tokens, computed in other turns, have become something else.
    other = Flow(model, PRUNED)
    answered(other, PROMPT, max_new_tokens=20)
    answered(other, said[:-1], max_new_tokens=1)
    assert torch.equal(other._ids, flow._ids)
    assert other.keep(archive)[0] != name


def test_a_turn_in_chunks_is_a_context_of_its_own(host, model):
    """Layers are pruned between chunks, so that something else is left; a prompt is exact however it is cut."""
    archive, names, left = Archive(host, space_of(host, model), "alice"), [], []
    for first, second in ((None, None), (70, None), (None, 30), (None, 40)):
        flow = Flow(model, PRUNED)
        said = answered(flow, PROMPT, prefill_chunk_size=first)
        answered(flow, torch.cat([said, words(2, 100)]), prefill_chunk_size=second, max_new_tokens=1)
        names.append(flow.keep(archive)[0])
        left.append(flow.cache.pruner.positions(1).tolist())
    assert names[0] == names[1]
    assert left[0] == left[1]
    assert len(set(names)) == 3
    assert left[2] != left[0]


def test_nothing_that_was_computed_on_what_was_kept_is_shared(host, model):
    archive, space = Archive(host, space_of(host, model), "alice"), space_of(host, model)
    flow = Flow(model, PRUNED, space=pools(host, model, "alice"))
    said = answered(flow, PROMPT, public=len(SYSTEM))
    name, done = flow.keep(archive)
    done.result(10.0)
    other = Flow(model, PRUNED, space=pools(host, model, "alice"))
    assert other.resume(archive, name)
    asked = torch.cat([said, words(2, 100)])
    answered(other, asked, public=len(asked))
    assert (other.loaded, other.saved) == (0, [])
    assert stored(space, asked) == EDGE
    own = pools(host, model, "alice").own(asked, EDGE)
    assert stored(own, asked[EDGE:]) == (len(PROMPT) - EDGE) // BLOCK * BLOCK


BROKEN = {
    "no cache": lambda state: state.pop("cache"),
    "no tokens": lambda state: state.pop("ids"),
    "other tokens": lambda state: state["ids"].add_(1),
    "other turns": lambda state: state["turns"].append(7),
    "another number": lambda state: state["cache"].update(tokens=258),
    "a layer less": lambda state: state["cache"]["stores"].pop(),
    "no store": lambda state: state["cache"]["stores"].__setitem__(0, 3),
    "another shape": lambda state: of_layer(state, "recent").update(keys=torch.zeros(3, 2, 5)),
    "another dtype": lambda state: of_layer(state, "exact").update(keys=of_layer(state, "exact")["keys"].half()),
    "more tokens than columns": lambda state: of_layer(state, "recent")["tokens"].add_(1),
    "an offset behind the end": lambda state: of_layer(state, "aged")["offsets"].fill_(2**63 - 1),
    "an offset before the beginning": lambda state: of_layer(state, "aged")["offsets"].sub_(1),
    "empty pieces": lambda state: of_layer(state, "aged")["counts"].zero_(),
    "huge pieces": lambda state: of_layer(state, "aged")["counts"].fill_(65),
    "no such head": lambda state: of_layer(state, "aged")["heads"].fill_(2),
    "less memory": lambda state: of_layer(state, "aged").update(memory=torch.zeros(3, dtype=torch.uint8)),
    "no pruner": lambda state: state["cache"].update(pruner=None),
    "a pruner of other layers": lambda state: state["cache"]["pruner"]["layers"].pop(),
    "another policy": lambda state: state["cache"]["pruner"]["layers"][0].update(whole=True),
    "another kind": lambda state: state["cache"]["pruner"]["layers"][0].update(length="3"),
    "other positions": lambda state: state["cache"]["pruner"]["layers"][0].update(positions=torch.zeros(2, 1).int()),
    "other queries": lambda state: state["cache"]["pruner"]["layers"][0].update(queries=torch.zeros(4, 8, 17)),
    "other names": lambda state: state["cache"]["pruner"]["layers"][0].update(more=1),
}


def of_layer(state, region):
    return state["cache"]["stores"][0][region]


@pytest.mark.parametrize("how", BROKEN)
def test_a_state_that_cannot_be_right_is_a_miss(host, model, how):
    """Counted, and nothing is changed by it; what is kept then takes its place."""
    archive, flow, other = Archive(host, space_of(host, model), "alice"), Flow(model, PRUNED), Flow(model, PRUNED)
    said = answered(flow, PROMPT)
    name = context_of(flow._ids, flow._turns)
    state = deepcopy({"ids": flow._ids, "turns": flow._turns, "cache": flow.cache.state()})
    BROKEN[how](state)
    archive.save(flow.recipe.text(flow.cache.spec, name), pack(state)).result(10.0)
    answered(other, words(5, 100))
    cache, ids = other.cache, other._ids
    assert not other.resume(archive, name)
    assert host.counters["archive_unreadable"] == 1
    assert other.cache is cache
    assert other._ids is ids
    assert flow.keep(archive)[1].result(10.0).blocks
    assert other.resume(archive, name)
    asked = torch.cat([said, words(2, 30)])
    assert torch.equal(answered(other, asked), answered(flow, asked))


def test_bytes_that_are_no_state_are_a_miss(host, model):
    archive, flow, name = Archive(host, space_of(host, model), "alice"), Flow(model, PRUNED), bytes(range(32))
    for count, bytes_ in enumerate((np.arange(100, dtype=np.uint8), pack([1]), pack({"cache": {}})), 1):
        archive.save(flow.recipe.text(flow.cache.spec, name), bytes_).result(10.0)
        assert not flow.resume(archive, name)
        assert host.counters["archive_unreadable"] == count
    answered(flow, PROMPT)


def test_only_what_was_answered_can_be_kept(host, model):
    archive, flow = Archive(host, space_of(host, model), "alice"), Flow(model, PRUNED)
    with pytest.raises(UsageError, match="no sequence yet"):
        flow.keep(archive)
    with pytest.raises(UsageError, match="the prompt is not over"):
        flow.cache.state()
    said = answered(flow, PROMPT)

    def stop(ids, scores):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        flow.generate(torch.cat([said, words(2, 30)]), logits_processor=[stop], **GREEDY)
    with pytest.raises(UsageError, match="its last turn failed"):
        flow.keep(archive)


def test_a_prompt_that_cannot_be_loaded_leaves_no_sequence(host, model, monkeypatch):
    flow = Flow(model, PRUNED, space=space_of(host, model))
    said = answered(flow, PROMPT)

    def broken(*_):
        raise RuntimeError("broken")

    monkeypatch.setattr("kvtier.flow.flow.load", broken)
    with pytest.raises(RuntimeError, match="broken"):
        flow.generate(words(5, 100))
    with pytest.raises(UsageError, match="its last turn failed"):
        flow.keep(Archive(host, space_of(host, model), "alice"))
    monkeypatch.undo()
    asked = torch.cat([said, words(2, 30)])
    assert torch.equal(answered(flow, asked), answered(Flow(model, PRUNED), asked))


def test_an_archive_is_of_one_shape_and_dtype(host, model):
    """What is recent is in 16 bits in a float32 model too, and its state looks like another's."""
    narrow = make(dtype=torch.bfloat16)
    archive, flow = Archive(host, space_of(host, narrow), "alice"), Flow(model, "int4")
    answered(flow, PROMPT)
    for use in (lambda: flow.keep(archive), lambda: flow.resume(archive, bytes(32))):
        with pytest.raises(KVMismatch, match="the space was made for"):
            use()
