"""States of flows, as rows of bytes."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

import kvtier
from kvtier import KVSpec
from kvtier.client.rows import RowMemory
from kvtier.errors import ConfigError
from kvtier.flow.archive import HEAD, MAGIC, ROW_NBYTES, Archive

SPEC = KVSpec(3, 2, 8, "float32", block_tokens=4)
CONTEXT = hashlib.sha256(b"all that was said").hexdigest()
RECIPE = f"flow/1(int4)@{CONTEXT}"


@pytest.fixture
def cache():
    with kvtier.open({"cpu": {"capacity": "16MiB"}}) as opened:
        yield opened


def space_of(cache, **parts):
    return cache.keyspace(SPEC, **{"model": "m", "revision": "1"} | parts)


def state_of(nbytes: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, nbytes, np.uint8)


@pytest.mark.parametrize("nbytes", [0, 1, ROW_NBYTES - HEAD.size, ROW_NBYTES - HEAD.size + 1, 5 * ROW_NBYTES])
def test_a_state_comes_back(cache, nbytes):
    archive, state = Archive(cache, space_of(cache), "secret"), state_of(nbytes)
    assert archive.save(RECIPE, state).result(10.0).refused == ""
    assert np.array_equal(archive.load(RECIPE), state)


def test_nobody_else_and_nothing_else_finds_it(cache):
    space = space_of(cache)
    Archive(cache, space, "secret").save(RECIPE, state_of(100)).result(10.0)
    others = [
        (space, "other secret", RECIPE),
        (space, "secret", RECIPE.replace("int4", "int8")),
        (space, "secret", RECIPE.replace(CONTEXT, hashlib.sha256(b"another").hexdigest())),
        (space_of(cache, revision="2"), "secret", RECIPE),
        (space_of(cache, plan="int8"), "secret", RECIPE),
        (space_of(cache, adapter="a", adapter_digest="d"), "secret", RECIPE),
        (cache.keyspace(KVSpec(3, 2, 8, "bfloat16", block_tokens=4), model="m", revision="1"), "secret", RECIPE),
    ]
    assert [Archive(cache, of, session).load(recipe) for of, session, recipe in others] == [None] * len(others)
    assert Archive(cache, space_of(cache), "secret").load(RECIPE) is not None


def test_what_is_not_there_as_a_whole_is_not_there(cache):
    archive = Archive(cache, space_of(cache), "secret")
    archive.save(RECIPE, state_of(3 * ROW_NBYTES)).result(10.0)
    kept = archive._rows(RECIPE)
    kept._space.evict(kept.chain([b"\x02\0\0\0"]))
    assert archive.load(RECIPE) is None
    assert archive.save(RECIPE, state_of(3 * ROW_NBYTES)).result(10.0).blocks == 1
    assert np.array_equal(archive.load(RECIPE), state_of(3 * ROW_NBYTES))


def test_a_state_of_two_halves_is_none(cache):
    """Rows are never written twice, so a state that differs must have another name; if one has not, it is a miss."""
    archive = Archive(cache, space_of(cache), "secret")
    archive.save(RECIPE, state_of(3 * ROW_NBYTES)).result(10.0)
    kept = archive._rows(RECIPE)
    kept._space.evict(kept.chain([b"\x02\0\0\0"]))
    archive.save(RECIPE, state_of(3 * ROW_NBYTES)[::-1].copy()).result(10.0)
    assert archive.load(RECIPE) is None
    assert cache.counters["archive_checksum"] == 1
    archive.save(RECIPE, state_of(2 * ROW_NBYTES)).result(10.0)
    assert np.array_equal(archive.load(RECIPE), state_of(2 * ROW_NBYTES)), "it made room for another"


def test_what_is_none_of_its_rows_is_counted_and_makes_room(cache):
    archive = Archive(cache, space_of(cache), "secret")
    kept = archive._rows(RECIPE)
    for head in (b"KVTFLOW0" + bytes(16), HEAD.pack(MAGIC, 1 << 60, 0)):
        rows = np.zeros((1, ROW_NBYTES), np.uint8)
        rows[0, : HEAD.size] = np.frombuffer(head, np.uint8)
        view = RowMemory.of(rows).view(kept.spec, np.arange(1))
        assert kept.save(kept.chain([bytes(4)]), view).result(10.0).blocks == 1
        assert archive.load(RECIPE) is None
    assert cache.counters["archive_unreadable"] == 2
    assert archive.save(RECIPE, state_of(9)).result(10.0).blocks == 1
    assert np.array_equal(archive.load(RECIPE), state_of(9))


def test_without_a_secret_nothing_is_private(cache):
    with pytest.raises(ConfigError, match="session is empty; give a secret"):
        Archive(cache, space_of(cache), "")
