"""Pages that an engine names itself: what it stores under a name is what it gets."""

from __future__ import annotations

import numpy as np
import pytest

import kvtier
from kvtier.client.cache import Cache
from kvtier.client.rows import PAUSE, RUNS, RowMemory, Rows
from kvtier.errors import ConfigError, DeadlineExceeded, KVMismatch, UsageError
from tests.hierarchy_fixture import Host

NBYTES = 3 * 512
IDENTITY = {"model": "m", "revision": "1", "layout": "opaque:test 1"}


def pages_of(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, NBYTES), np.uint8)


def names_of(*numbers: int) -> list[bytes]:
    return [b"page %d" % n for n in numbers]


@pytest.fixture
def cache():
    with kvtier.open({"cpu": {"capacity": "4MiB"}}) as opened:
        yield opened


@pytest.fixture
def rows(cache):
    return Rows(cache, RowMemory.of(pages_of(1)).spec(16), **IDENTITY)


def stored(rows: Rows, names: list[bytes], pages: np.ndarray, where=None, **options):
    memory = RowMemory.of(pages)
    table = np.arange(len(names)) if where is None else where
    return rows.save(rows.chain(names), memory.view(rows.spec, table), **options).result(10.0)


def loaded(rows: Rows, names: list[bytes], count: int = 0, where=None) -> tuple[list[bool], np.ndarray]:
    out = np.zeros((count or len(names), NBYTES), np.uint8)
    table = np.arange(len(names)) if where is None else where
    found = rows.load(rows.chain(names), RowMemory.of(out).view(rows.spec, table), wait=0.0)
    return found.tolist(), out


def test_what_was_stored_under_a_name_comes_back_under_it(rows):
    pages = pages_of(6)
    assert stored(rows, names_of(1, 2, 3), pages, where=[4, 0, 2]).blocks == 3
    found, out = loaded(rows, names_of(1, 2, 3), count=6, where=[1, 5, 0])
    assert found == [True] * 3
    assert np.array_equal(out[[1, 5, 0]], pages[[4, 0, 2]])
    assert not out[2:5].any(), "rows that were not named stay as they are"


def test_a_row_is_found_wherever_it_stands_in_a_call(rows):
    pages = pages_of(3)
    stored(rows, names_of(1, 2, 3), pages)
    for names, expected in ((names_of(3), [2]), (names_of(2, 3), [1, 2]), (names_of(3, 1), [2, 0])):
        found, out = loaded(rows, names)
        assert all(found)
        assert np.array_equal(out, pages[expected])


def test_holes_are_stepped_over_so_many_times(rows):
    pages = pages_of(20)
    stored(rows, names_of(*range(20)), pages)
    wanted = [n if n % 2 else n + 100 for n in range(20)]
    found, out = loaded(rows, names_of(*wanted))
    # The first run meets the hole at 0; each one behind a hole finds one row and the next hole.
    there = [bool(n % 2) and n < 2 * (RUNS - 1) for n in range(20)]
    assert found == there
    assert np.array_equal(out[there], pages[there])


def test_leading_rows_are_counted(rows):
    stored(rows, names_of(1, 2), pages_of(2))
    for names, count in ((names_of(1, 2, 3), 2), (names_of(3, 1), 0), ([], 0)):
        with rows.match(rows.chain(names), wait=0.0) as hit:
            assert rows.held(hit) == count


def test_pieces_of_different_sizes_are_one_row(cache):
    keys, values = np.zeros((4, 512), np.uint8), np.zeros((4, 1024), np.uint8)
    keys[:], values[:] = pages_of(4)[:, :512], pages_of(4)[:, 512:]

    def memory(keys, values):
        begins = [array.ctypes.data for array in (keys, values)]
        return RowMemory.scattered(begins, [512, 1024], [512, 1024], 4, (keys, values))

    spec = memory(keys, values).spec(16)
    assert (spec.layers, spec.block_nbytes) == (3, NBYTES)
    rows = Rows(cache, spec, **IDENTITY)
    assert rows.save(rows.chain(names_of(1, 2)), memory(keys, values).view(spec, [3, 1])).result(10.0).blocks == 2
    got = np.zeros_like(keys), np.zeros_like(values)
    assert rows.load(rows.chain(names_of(2, 1)), memory(*got).view(spec, [0, 2]), wait=0.0).all()
    assert np.array_equal(got[0][[0, 2]], keys[[1, 3]])
    assert np.array_equal(got[1][[0, 2]], values[[1, 3]])


def test_other_models_layouts_and_ranks_have_their_own_rows(cache):
    spec = RowMemory.of(pages_of(1)).spec(16)
    rows = Rows(cache, spec, **IDENTITY)
    stored(rows, names_of(1), pages_of(1))
    assert loaded(rows, names_of(1))[0] == [True]
    for other in ({"model": "n"}, {"revision": "2"}, {"layout": "opaque:test 2"}, {"tp_size": 2}, {"tenant": "t"}):
        assert loaded(Rows(cache, spec, **IDENTITY | other), names_of(1))[0] == [False]
    stored(Rows(cache, spec, **IDENTITY, tp_size=2, rank=0), names_of(1), pages_of(1))
    assert loaded(Rows(cache, spec, **IDENTITY, tp_size=2, rank=1), names_of(1))[0] == [False]


def test_a_name_that_is_there_twice_is_stored_once(rows):
    pages = pages_of(3)
    assert stored(rows, names_of(1, 2, 1), pages).blocks == 2
    found, out = loaded(rows, names_of(1, 2))
    assert all(found)
    assert np.array_equal(out, pages[:2])


def test_rows_leave_after_those_that_follow_them(cache):
    """What an engine says of the row before a batch is believed, as within a batch."""
    with Host(blocks=64, nvme=None) as host, Cache(host.session()) as cache:
        rows = Rows(cache, RowMemory.of(pages_of(1)).spec(16), **IDENTITY)
        stored(rows, names_of(1, 2), pages_of(2))
        stored(rows, names_of(2, 3), pages_of(1), start=1, where=[0])
        table = host.hierarchy.state.table
        row = [table.rows[address] for address in rows.chain(names_of(1, 2, 3)).addresses]
        assert [table.parent_of(each) for each in row] == [None, row[0], row[1]]


def test_bytes_that_are_not_what_was_stored_are_no_hit(tmp_path):
    tables = {"cpu": {"capacity": "4MiB"}, "nvme": {"capacity": "8MiB", "path": str(tmp_path)}}
    with kvtier.open(tables) as cache:
        rows = Rows(cache, RowMemory.of(pages_of(1)).spec(16), **IDENTITY)
        stored(rows, names_of(1, 2), pages_of(2))
        chain = rows.chain(names_of(1, 2))
        assert rows._space.move(chain, "nvme") == 2
        data = max((path for path in tmp_path.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
        with data.open("r+b") as file:
            content = bytearray(file.read())
            at = content.find(pages_of(2)[1].tobytes()[:64])
            assert at > 0
            file.seek(at)
            file.write(bytes(64))
        out = np.zeros((2, NBYTES), np.uint8)
        found = rows.load(chain, RowMemory.of(out).view(rows.spec, [0, 1]), wait=5.0)
        assert found.tolist() == [True, False]
        assert np.array_equal(out[0], pages_of(2)[0])


def test_what_cannot_be_is_said(cache, rows):
    memory = RowMemory.of(pages_of(4))
    with pytest.raises(UsageError, match="rows"):
        memory.view(rows.spec, [4])
    with pytest.raises(UsageError, match="bytes of one row"):
        RowMemory.of(np.zeros((2, 4), np.float32))
    with pytest.raises(ConfigError, match="even"):
        RowMemory.of(np.zeros((2, 5), np.uint8)).spec(16)
    with pytest.raises(ConfigError, match="2 in common"):
        RowMemory.scattered([0, 0], [1 << 20, 6], [1 << 20, 6], 4, None)
    stored(rows, names_of(1, 2), pages_of(2))
    with pytest.raises(KVMismatch, match="share memory"):
        loaded(rows, names_of(1, 2), where=[0, 0])
    with pytest.raises(ConfigError, match="raw"):
        Rows(cache, rows.spec, plan="int8", **IDENTITY)


def test_a_host_that_is_late_is_not_asked_for_a_while():
    """Engines look up one request after the other: each would wait as long."""
    now = [100.0]
    with Host(blocks=64, nvme=None) as host, Cache(host.session()) as cache:
        rows = Rows(cache, RowMemory.of(pages_of(1)).spec(16), clock=lambda: now[0], **IDENTITY)
        stored(rows, names_of(1), pages_of(1))
        answer, asked = cache.session.match, []

        def late(*args, **options):
            asked.append(None)
            raise DeadlineExceeded("the host does not answer")

        cache.session.match = late
        assert loaded(rows, names_of(1))[0] == [False]
        assert loaded(rows, names_of(1))[0] == [False]
        assert stored(rows, names_of(2), pages_of(1)).refused == "paused"
        assert len(asked) == 1
        cache.session.match = answer
        now[0] += PAUSE
        assert loaded(rows, names_of(1))[0] == [True]
        assert stored(rows, names_of(2), pages_of(1)).blocks == 1


def test_an_engine_that_was_idle_since_the_host_was_late_asks_it_again():
    now = [100.0]
    with Host(blocks=64, nvme=None) as host, Cache(host.session()) as cache:
        rows = Rows(cache, RowMemory.of(pages_of(1)).spec(16), clock=lambda: now[0], **IDENTITY)
        stored(rows, names_of(1), pages_of(1))
        answers = {name: getattr(cache.session, name) for name in ("match", "reserve")}

        def late(*args, **options):
            raise DeadlineExceeded("the host does not answer")

        for name, call in (
            ("match", lambda: loaded(rows, names_of(1))),
            ("reserve", lambda: stored(rows, names_of(3), pages_of(1))),
        ):
            setattr(cache.session, name, late)
            call()
            setattr(cache.session, name, answers[name])
            now[0] += PAUSE
            assert loaded(rows, names_of(1))[0] == [True], name
