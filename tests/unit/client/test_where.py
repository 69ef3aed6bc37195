"""What a router asks, and what it needs to ask."""

from __future__ import annotations

import json

import numpy as np
import pytest

import kvtier
from kvtier import KVSpec
from kvtier.client.description import Description
from kvtier.errors import BadTokens, ConfigError

SPEC = KVSpec(3, 2, 8, "float32", block_tokens=4)


@pytest.fixture
def cache():
    with kvtier.open({"cpu": {"capacity": "4MiB"}}) as opened:
        yield opened


@pytest.fixture
def space(cache):
    space = cache.keyspace(SPEC, model="m", revision="1", tenant="secret salt")
    kv = np.random.default_rng(0).standard_normal((3, 2, 10, 2, 8), np.float32)
    assert space.save(range(10), kv).result(10.0).refused == ""
    return space


def test_where_says_how_many_tokens_are_where(space):
    assert space.where(range(12)) == [{"host": "local", "here": True, "blocks": 2, "tokens": 8, "tiers": {"cpu": 2}}]
    assert space.where([7, *range(11)]) == []
    assert space.where([]) == []


def test_a_cache_answers_for_all_its_keyspaces(cache, space):
    cache.keyspace(SPEC, model="other", revision="1")
    (place,) = cache.where(range(12))
    assert (place["model"], place["plan"], place["tokens"]) == ("m", space.keyspace.plan, 8)


def test_a_description_names_the_same_blocks_and_tells_no_salt(space, tmp_path):
    space.describe().write(tmp_path / "k.json")
    described = Description.read(tmp_path / "k.json")
    assert described == space.describe()
    assert described.addresses(range(12)) == list(space.chain(range(12)).addresses)
    assert (described.model, described.block_tokens) == ("m", 4)
    assert "secret" not in (tmp_path / "k.json").read_text()
    with pytest.raises(BadTokens):
        described.addresses([-1])


SHORT = {"model": "m", "revision": "1", "plan": "", "adapter": "", "rank": 0, "block_tokens": 4, "root": "00"}


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"root": 3}', json.dumps(SHORT)])
def test_what_describes_no_keyspace_is_refused(text, tmp_path):
    (tmp_path / "k.json").write_text(text)
    with pytest.raises(ConfigError, match=r"describe\(\)\.write"):
        Description.read(tmp_path / "k.json")
    with pytest.raises(ConfigError, match="cannot be read"):
        Description.read(tmp_path / "gone.json")


def test_an_index_that_does_not_answer_is_counted(cache, space, monkeypatch):
    space.where(range(4))
    assert cache.counters["where_index"] == 0
    index = cache.session._hierarchy.state.index
    monkeypatch.setattr(index, "others", lambda: True)
    monkeypatch.setattr(index, "match", lambda _keys: None)
    assert [place["host"] for place in space.where(range(4))] == ["local"]
    assert cache.counters["where_index"] == 1
