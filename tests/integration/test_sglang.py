"""SGLang's released storage side with kvtier behind it: what one engine stores another one loads."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing

import pytest
import torch

from kvtier.errors import ConfigError, SessionError
from kvtier.hierarchy.cache import Hierarchy
from kvtier.index.local import LocalIndex, LocalStore
from kvtier.memory.arena import Arena
from tests.door_fixture import door_in_thread, folders
from tests.engines_vllm.host import ROOT, Host, eventually, running
from tests.remote_fixture import remote_door
from tests.sglang_released import MHA_LAYOUTS, MLA_LAYOUTS, PAGE, Engine, digest, pages_of, pool_of

PROMPT = list(range(7, 7 + 10 * PAGE))
KINDS = [("mha", layout) for layout in MHA_LAYOUTS] + [("mla", layout) for layout in MLA_LAYOUTS]
Start = Callable[..., Engine]


@pytest.fixture
def host() -> Iterator[Host]:
    with running(64 << 20) as host:
        yield host


@pytest.fixture
def start(host: Host) -> Iterator[Start]:
    engines: list[Engine] = []

    def start(kind: str = "mha", layout: str = "page_first", page: int = PAGE, **options: object) -> Engine:
        pool = options.pop("pool", None) or pool_of(kind, layout, page=page)
        engines.append(Engine(options.pop("socket", host.socket), pool, **options))
        return engines[-1]

    yield start
    for engine in engines:
        engine.close()


def stored(engine: Engine, tokens: list[int] = PROMPT, seed: int = 0) -> list[torch.Tensor]:
    pages = pages_of(engine.pool, len(tokens) // engine.pool.page_size, seed)
    assert engine.backup(tokens, pages) == len(tokens)
    return pages


def same(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> bool:
    return digest(found) == digest(wanted)


@pytest.mark.parametrize("v1", [1, 0])
@pytest.mark.parametrize(("kind", "layout"), KINDS)
def test_another_engine_loads_what_one_stored(start, kind, layout, v1):
    first = start(kind, layout, v1=v1)
    assert first.prefetch(PROMPT) == (0, [])
    pages = stored(first)
    second = start(kind, layout, v1=v1)
    other = list(range(5000, 5000 + 3 * PAGE))
    for tokens, hits in (([*PROMPT, *other], 10), ([*PROMPT[: 4 * PAGE], *other], 4), (other, 0), (PROMPT[:-1], 9)):
        hit, found = second.prefetch(tokens)
        assert hit == hits * PAGE
        assert same(found, pages[:hits])


def test_another_process_loads_it_too(start, host):
    pages = stored(start())
    command = [sys.executable, "-m", "tests.sglang_child", str(host.socket), "page_first", "12"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=120.0)
    assert json.loads(done.stdout) == {"hit": len(PROMPT), "sha256": digest(pages)}


def test_more_than_a_batch_of_sglangs_is_one_chain(start, host):
    tokens = list(range(60_000, 60_000 + 200 * 4))
    first = start(page=4)
    pages = stored(first, tokens)
    hit, found = start(page=4).prefetch(tokens)
    assert hit == len(tokens)
    assert same(found, pages)
    lookups = host.tell("status")["lookups"]
    assert lookups == {"full": 1}, "SGLang asks for all pages and loads 128 at a time, which is not counted again"


def test_what_is_on_nvme_is_a_hit(start, host):
    pages = stored(start())
    assert host.tell("demote") == 10
    hit, found = start().prefetch(PROMPT)
    assert hit == len(PROMPT)
    assert same(found, pages)


def test_bytes_that_rotted_on_nvme_are_a_miss(start, host):
    stored(start())
    assert host.tell("demote") == host.tell("rot") == 10
    _, found = start().prefetch(PROMPT)
    assert found == []
    assert start().prefetch(PROMPT) == (0, [])


def test_a_host_that_dies_is_a_miss_at_once_and_found_again(start, host):
    engine = start()
    pages = stored(engine)
    host.kill()
    began = time.monotonic()
    assert engine.prefetch(PROMPT) == (0, [])
    other = list(range(9000, 9000 + 2 * PAGE))
    assert engine.backup(other, pages_of(engine.pool, 2)) == 0
    names, slots = engine.names(PROMPT), torch.arange(10 * PAGE)
    assert engine.backend.batch_get_v1(names, slots) == [False] * 10
    assert time.monotonic() - began < 8.0
    host.start()
    eventually(lambda: engine.backup(PROMPT, pages), len(PROMPT))
    hit, found = start().prefetch(PROMPT)
    assert hit == len(PROMPT)
    assert same(found, pages)


def test_a_host_that_hangs_costs_a_moment_and_then_nothing(start, host):
    engine = start()
    pages = stored(engine)
    other = list(range(9000, 9000 + 2 * PAGE))
    os.kill(host._process.pid, signal.SIGSTOP)
    try:
        began = time.monotonic()
        for _ in range(20):
            assert engine.prefetch(PROMPT) == (0, [])
            assert engine.backup(other, pages[:2]) == 0
        assert time.monotonic() - began < 10.0, "of 40 calls each would wait for a second"
    finally:
        os.kill(host._process.pid, signal.SIGCONT)
    eventually(lambda: engine.prefetch(PROMPT)[0], len(PROMPT))


def test_an_engine_starts_without_a_host(start, host, tmp_path):
    engine = start(socket=tmp_path / "door.sock")
    assert engine.prefetch(PROMPT) == (0, [])
    assert engine.backup(PROMPT, pages_of(engine.pool, 10)) == 0
    with pytest.raises(SessionError, match="stays"):
        engine.backend.clear()
    (tmp_path / "door.sock").symlink_to(host.socket)
    eventually(lambda: engine.backup(PROMPT, pages_of(engine.pool, 10)), len(PROMPT))


def test_what_makes_other_kv_makes_other_pages(start):
    stored(start(), seed=1)
    assert start().prefetch(PROMPT)[0] == len(PROMPT)
    for other in (
        {"revision": "r2"},
        {"model_name": "mistral"},
        {"tenant": "t"},
        {"layout": "page_head"},
        {"layout": "layer_first"},
        {"v1": 0},
        {"tp": (0, 2)},
        {"tp": (1, 2)},
        {"pool": pool_of("mha", "page_first", dtype=torch.float16)},
        {"kind": "mla"},
    ):
        assert start(**other).prefetch(PROMPT) == (0, []), other


def test_ranks_have_their_own_pages_but_of_mla(start):
    first, second = start(tp=(0, 2)), start(tp=(1, 2))
    pages, others = stored(first, seed=1), stored(second, seed=2)
    assert same(start(tp=(0, 2)).prefetch(PROMPT)[1], pages)
    assert same(start(tp=(1, 2)).prefetch(PROMPT)[1], others)
    once = stored(start("mla", tp=(0, 2)))
    assert same(start("mla", tp=(1, 2)).prefetch(PROMPT)[1], once)


def test_holes_and_single_pages(start):
    engine = start(v1=0)
    pages = stored(engine)
    names = engine.names(PROMPT)
    backend, room = engine.backend, [engine.pool.get_dummy_flat_data_page() for _ in range(4)]
    found = backend.batch_get([names[3], "ab" * 32, names[0], names[9]], room)
    assert [page is not None for page in found] == [True, False, True, True]
    assert same([found[0], found[2], found[3]], [pages[3], pages[0], pages[9]])
    assert backend.exists(names[5])
    assert not backend.exists("ab" * 32)
    assert same([backend.get(names[5], room[0])], [pages[5]])
    assert backend.get("ab" * 32, room[0]) is None
    assert backend.set("cd" * 32, pages[1])
    assert same([backend.get("cd" * 32, room[0])], [pages[1]])


def test_a_pool_beside_the_kv_has_pages_of_its_own(start):
    """As of DeepSeek's indexer: a hit is what both have."""
    from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer

    engine, beside = start(), pool_of("mla", "page_first")
    pages = stored(engine)
    backend, names = engine.backend, engine.names(PROMPT)
    backend.register_mem_host_pool_v2(engine.pool, PoolName.KV)
    backend.register_mem_host_pool_v2(beside, PoolName.INDEXER)
    slots = beside.alloc(10 * PAGE)
    for i, page in enumerate(pages_of(beside, 10, seed=7)):
        beside.set_from_flat_data_page(int(slots[i * PAGE]), page)
    mine = PoolTransfer(PoolName.INDEXER, host_indices=slots[: 6 * PAGE], keys=names[:6])
    assert backend.batch_set_v2([mine]) == {PoolName.INDEXER: [True] * 6}
    found = backend.batch_exists_v2(names, [PoolTransfer(PoolName.INDEXER, keys=names)])
    assert (found.kv_hit_pages, found.extra_pool_hit_pages) == (6, {PoolName.KV: 10, PoolName.INDEXER: 6})
    into = PoolTransfer(PoolName.INDEXER, host_indices=beside.alloc(10 * PAGE), keys=names)
    assert backend.batch_get_v2([into])[PoolName.INDEXER] == [True] * 6 + [False] * 4
    at = into.host_indices[::PAGE].tolist()
    assert same([beside.get_data_page(i) for i in at[:6]], pages_of(beside, 10, seed=7)[:6])
    assert same(engine.prefetch(PROMPT)[1], pages), "the KV is as it was"
    last = PoolTransfer(PoolName.INDEXER, keys=names[-1:], hit_policy=PoolHitPolicy.TRAILING_PAGES)
    assert backend.batch_exists_v2(names, [last]).kv_hit_pages == 0
    with pytest.raises(ConfigError, match="full attention"):
        backend.register_mem_host_pool_v2(beside, PoolName.MAMBA)


def test_clear_drops_the_pages_of_this_keyspace(start):
    first, second = start(), start(revision="r2")
    stored(first)
    stored(second)
    assert first.backend.clear()
    assert first.prefetch(PROMPT) == (0, [])
    assert second.prefetch(PROMPT)[0] == len(PROMPT)


def test_a_page_is_known_to_follow_the_one_before_it(start):
    """Also where a batch of SGLang's ends: it says what comes before one."""
    with folders() as (socket, folder), closing(Arena.own(folder, 64 << 20)) as arena:
        store = LocalStore()
        index = LocalIndex(store, store.register("host"))
        with closing(Hierarchy(arena, {}, index)) as hierarchy, door_in_thread(hierarchy, socket):
            engine = start(page=4, socket=socket)
            stored(engine, list(range(60_000, 60_000 + 200 * 4)))
            table = hierarchy.state.table
            before = [table.parent_of(row) for row in table.rows.values()]
            assert before == [None, *list(table.rows.values())[:-1]]
            engine.close()


def test_an_engine_without_a_kvtier_of_its_own_uses_another_hosts(start, tmp_path):
    store = LocalStore()
    with (
        closing(Arena.private(64 << 20)) as arena,
        closing(Hierarchy(arena, {}, LocalIndex(store, store.register("host")))) as hierarchy,
        remote_door(hierarchy, tmp_path) as remote,
    ):
        token = remote.add("team-a")
        pages = stored(start(socket=remote.url, token=token))
        hit, found = start(socket=remote.url, token=token).prefetch(PROMPT)
        assert hit == len(PROMPT)
        assert same(found, pages)
        assert start(socket=remote.url, token=remote.add("team-b", tenant="b")).prefetch(PROMPT) == (0, [])


def test_sglang_is_told_how_much_was_moved(start):
    engine = start()
    stored(engine)
    engine.prefetch(PROMPT)
    stats = engine.backend.get_stats()
    assert (stats.backup_pgs, stats.prefetch_pgs) == ([10], [10])
    assert min(stats.backup_bandwidth + stats.prefetch_bandwidth) > 0
    assert engine.backend.get_stats().backup_pgs == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"revison": "1"}, "did you mean 'revision'"),
        ({"wait": -1}, "wait"),
        ({"model_name": ""}, "add model"),
        ({"pool": pool_of("mha", "page_first", dtype=torch.uint8)}, "kv_cache_dtype"),
    ],
)
def test_what_cannot_work_is_said_at_the_start(start, options, message):
    with pytest.raises(ConfigError, match=message):
        start(**options)


def test_fp8_pages_are_stored_when_their_kind_is_said(start):
    pool = pool_of("mha", "page_first", dtype=torch.uint8)
    stored(start(pool=pool, kv_cache_dtype="fp8_e4m3"))
    assert start(pool=pool, kv_cache_dtype="fp8_e4m3").prefetch(PROMPT)[0] == len(PROMPT)
    assert start(pool=pool, kv_cache_dtype="fp8_e5m2").prefetch(PROMPT) == (0, [])


def test_pages_that_are_none_are_misses(start):
    engine = start(v1=0)
    (name,), page = engine.names(PROMPT[:PAGE]), engine.pool.get_dummy_flat_data_page()
    for wrong in (None, b"bytes", page[:3], page.reshape(-1)[:-1]):
        assert not engine.backend.set(name, wrong)
        assert engine.backend.get(name, wrong) is None
    assert engine.backend.set(name, page)
    assert engine.backend.get(name, page) is page


def test_calls_that_cannot_be_right_are_misses(start):
    engine = start()
    stored(engine)
    names, backend = engine.names(PROMPT), engine.backend
    assert backend.batch_get_v1(names, torch.arange(3)) == [False] * 10
    assert backend.batch_get_v1(names[:1], torch.arange(1, 1 + PAGE)) == [False]
    assert backend.batch_get_v1(names[:1], torch.arange(10**6 * PAGE, 10**6 * PAGE + PAGE)) == [False]
    assert backend.batch_set_v1(names, torch.arange(3)) == [False] * 10
    for slots in (None, [None] * PAGE, torch.arange(0, 2 * PAGE, 2), torch.arange(PAGE).flip(0), torch.zeros(1, PAGE)):
        assert backend.batch_get_v1(names[:1], slots) == [False]
        assert backend.batch_set_v1(names[:1], slots) == [False]
    assert backend.get(names[0], engine.pool.get_dummy_flat_data_page()) is None, "this engine has zero copy"
    assert not backend.set(names[0], engine.pool.get_dummy_flat_data_page())
    assert backend.batch_get_v1([], torch.empty(0)) == []
    backend.close()
    assert backend.batch_exists(names) == 0
    assert backend.batch_get_v1(names, torch.arange(10 * PAGE)) == [False] * 10
    assert backend.batch_set_v1(names, torch.arange(10 * PAGE)) == [False] * 10
