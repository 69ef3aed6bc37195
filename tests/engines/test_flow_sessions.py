"""What a flow shares with everybody, what with its own session, and what became of a context with nothing else."""

from __future__ import annotations

import os
from functools import partial

import pytest
import torch

import kvtier
from kvtier.client.pools import Pools
from kvtier.errors import UsageError

transformers = pytest.importorskip("transformers")

from kvtier.flow import Flow  # noqa: E402
from kvtier.flow.archive import Archive  # noqa: E402
from tests.transformers_fixture import BLOCK, make, space_of, stored, words  # noqa: E402

SYSTEM, QUESTION = words(0, 130), words(1, 90)
PROMPT = torch.cat([SYSTEM, QUESTION])
EDGE = len(SYSTEM) // BLOCK * BLOCK
GREEDY = {"max_new_tokens": 40, "do_sample": False}
PRUNED = "int4*snap_kv(0.5,window=8,whole=0);recent:16;every:10"
MASS = "int8*h2o(0.6,whole=0);recent:16;every:10"
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


def test_nothing_is_public_unless_it_is_said(host, model):
    flow = Flow(model, "int4", space=pools(host, model, "alice"))
    answered(flow, PROMPT)
    assert stored(space_of(host, model), PROMPT) == 0
    again = Flow(model, "int4", space=pools(host, model, "alice"))
    answered(again, PROMPT)
    assert again.loaded == (len(PROMPT) - 1) // BLOCK * BLOCK
    with pytest.raises(UsageError, match="public is 221"):
        flow.generate(PROMPT, public=len(PROMPT) + 1)


@pytest.mark.parametrize("recipe", ["raw", "int4", PRUNED, MASS, THRESHOLD])
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


def test_a_state_that_cannot_be_read_is_a_miss(host, model):
    import numpy as np

    archive, flow = Archive(host, space_of(host, model), "alice"), Flow(model, PRUNED)
    name = bytes(range(32))
    spec = flow.cache.spec
    archive.save(flow.recipe.text(spec, name), np.arange(100, dtype=np.uint8)).result(10.0)
    assert not flow.resume(archive, name)
    assert host.counters["archive_unreadable"] == 1
    answered(flow, PROMPT)


def test_a_sequence_that_has_not_begun_cannot_be_kept(host, model):
    with pytest.raises(UsageError, match="the prompt is not over"):
        Flow(model, PRUNED).keep(Archive(host, space_of(host, model), "alice"))
