"""What sequences in pages share, what is copied, and what blocks of any plan find there."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from kvtier.codecs.registry import codec_for
from kvtier.codecs.view import KVView
from kvtier.errors import ConfigError, KVMismatch, KVTierError, PoolFull, UsageError
from kvtier.pages import Batch, PagedKV, PagePool, PageTables
from kvtier.spec import KVSpec
from kvtier.testing.kv import random_kv

SPEC = KVSpec(2, 3, 16, "float32", v_head_dim=8, block_tokens=12)
LATENT = KVSpec(2, 1, 24, "bfloat16", block_tokens=12, mla=True)


class Copies(list):
    """Copies that were asked for, as (from, to, tokens)."""

    def __call__(self, *copy):
        self.append(copy)


@pytest.fixture
def copies():
    return Copies()


@pytest.fixture
def tables(copies):
    return PageTables(8, 4, copies)


def grown(tables, tokens):
    table = tables.new()
    tables.extend([(table, tokens)])
    return table


def kv_of(spec, tokens, seed=0):
    dtype = getattr(torch, spec.dtype)
    parts = [
        [torch.from_numpy(p.view(np.int16 if spec.itemsize == 2 else np.float32)) for p in layer]
        for layer in random_kv(spec, tokens, seed)
    ]
    layers = [[part.view(dtype) for part in layer] for layer in parts]
    return [layer[0][:, 0] for layer in layers] if spec.mla else [tuple(layer) for layer in layers]


def found(tables, tokens, **root):
    """Pages with these tokens; nobody keeps them for being asked."""
    table = tables.find(tokens, **root)
    pages = table.pages
    tables.free(table)
    return pages


def test_a_page_is_taken_when_a_token_needs_it(tables):
    """4 tokens a page: the fifth begins the second page, whatever was allocated before."""
    table = tables.new()
    held = []
    for _ in range(9):
        tables.extend([(table, 1)])
        held.append(len(table.pages))
    assert held == [1, 1, 1, 1, 2, 2, 2, 2, 3]


def test_full_pages_are_shared_and_never_copied(tables, copies):
    first = grown(tables, 8)
    second = tables.fork(first)
    tables.extend([(first, 1), (second, 1)])
    assert copies == []
    assert first.pages[:2] == second.pages[:2]
    assert first.pages[2] != second.pages[2]


def test_who_writes_first_into_a_shared_page_copies_its_tokens_and_the_last_one_does_not(tables, copies):
    first = grown(tables, 6)
    second, third = tables.fork(first), tables.fork(first, 5)
    last = first.pages[1]
    tables.extend([(third, 1)])
    assert copies == [(last, third.pages[1], 1)]
    tables.extend([(first, 1), (second, 1)])
    assert copies[1:] == [(last, first.pages[1], 2)]
    assert second.pages[1] == last


def test_a_fork_that_is_shorter_writes_over_nothing_of_the_longer_one(tables, copies):
    first = grown(tables, 7)
    second = tables.fork(first, 2)
    assert second.pages == first.pages[:1]
    tables.extend([(second, 1)])
    assert copies == [(first.pages[0], second.pages[0], 2)]


def test_out_of_pages_is_a_retryable_refusal_of_the_whole(tables, copies):
    """8 pages, 5 are held by both: each wants 2 more, and one of them a copy of the last."""
    first = grown(tables, 18)
    second = tables.fork(first)
    tables.free(tables.fork(second))
    before = [first.pages, second.pages, tables.free_pages]
    with pytest.raises(PoolFull, match="5 pages are needed, and 3 of 8 are free") as caught:
        tables.extend([(first, 7), (second, 7)])
    assert caught.value.retryable
    assert isinstance(caught.value, KVTierError)
    assert [first.pages, second.pages, tables.free_pages] == before
    assert copies == []


def test_a_copy_that_fails_leaves_everything_as_it_was():
    def failing(*_):
        raise RuntimeError("no memory")

    tables = PageTables(4, 4, failing)
    first = grown(tables, 6)
    second = tables.fork(first)
    with pytest.raises(RuntimeError, match="no memory"):
        tables.extend([(second, 5)])
    assert (second.tokens, second.pages, tables.free_pages) == (6, first.pages, 2)


def test_fresh_pages_follow_each_other_and_are_read_in_place():
    kv = PagedKV(SPEC, 8, page_tokens=4)
    batch = Batch(kv)
    batch.start(1)
    batch.extend(10)
    keys, values = batch.read(1, 10)
    kv.pools[1][0][batch.rows[0].pages[2], 1, 2, 3] = 7.0
    assert keys[0, 2, 9, 3] == 7.0
    assert keys.shape == (1, 3, 10, 16)
    assert values.shape == (1, 3, 10, 8)


def test_a_batch_that_writes_the_same_tokens_again_writes_them_to_its_new_pages():
    """Cut to nothing, its pages go to others; what it writes then must not go there."""
    kv = PagedKV(SPEC, 8, page_tokens=4)
    ones = [torch.ones(1, 3, 4, dim) for dim in SPEC.head_dims]
    batch, other = Batch(kv), Batch(kv)
    for one in (batch, other):
        one.start(1)
    for one, value in ((batch, 1), (other, 2), (batch, 3)):
        one.extend(4)
        one.write(0, 0, [value * part for part in ones])
        if value == 1:
            one.cut(0)
    assert other.read(0, 4)[0].unique() == 2
    assert batch.read(0, 4)[0].unique() == 3


def test_names_are_of_tokens_and_all_before_them_and_of_the_root(tables):
    table = grown(tables, 11)
    tables.name(table, range(11))
    assert found(tables, range(11)) == table.pages[:2]
    assert found(tables, [*range(4), 9, 9, 9, 9]) == table.pages[:1]
    assert found(tables, [9, 9, 9, 9, *range(4, 8)]) == ()
    assert found(tables, range(11), root=b"1" * 32) == ()
    with pytest.raises(UsageError, match="was named for other tokens"):
        tables.name(table, range(1, 12))
    with pytest.raises(UsageError, match="a root of 3 bytes"):
        tables.find(range(4), root=b"abc")


def test_a_name_goes_with_the_last_sequence_and_when_its_page_is_written_again(tables):
    first = grown(tables, 8)
    tables.name(first, range(8))
    second = tables.find(range(8))
    tables.free(first)
    assert len(found(tables, range(8))) == 2
    tables.cut(second, 6)
    tables.extend([(second, 2)])
    assert len(found(tables, range(8))) == 1
    tables.name(second, [0, 1, 2, 3, 4, 5, 60, 70])
    assert len(found(tables, [0, 1, 2, 3, 4, 5, 60, 70])) == 2
    tables.free(second)
    assert len(found(tables, range(8))) == 0
    assert tables.free_pages == 8


def test_of_two_sequences_with_the_same_tokens_one_is_found(tables):
    first, second = grown(tables, 8), grown(tables, 8)
    tables.name(first, range(8))
    tables.name(second, range(8))
    assert found(tables, range(8)) == first.pages
    tables.free(first)
    tables.name(second, range(8))
    assert found(tables, range(8)) == second.pages


@pytest.mark.parametrize("spec", [SPEC, LATENT], ids=["grouped", "latent"])
@pytest.mark.parametrize("plan", ["raw", "int8", "int4"])
def test_codecs_read_and_write_pages_in_place(spec, plan):
    """Bodies are those of the same KV in contiguous memory, and decode to the same in another sequence's pages."""
    kv, codec = PagedKV(spec, 20, page_tokens=4), codec_for(plan, spec)
    shuffled = [grown(kv.tables, 4) for _ in range(7)]
    for table in shuffled[::2]:
        kv.tables.free(table)
    table, given = kv.tables.new(), kv_of(spec, 29)
    kv.append(table, given)
    offsets, positions = np.array([0, codec.nbytes(0)]), np.arange(2)
    bodies = [np.zeros(codec.nbytes(0) + codec.nbytes(1), np.uint8) for _ in range(2)]
    for view, body in zip(
        (KVView.paged(kv.pools, table.pages, spec, tokens=29), KVView.of(given, spec)), bodies, strict=True
    ):
        assert codec.encode(view, np.array([0, 12]), body, offsets, positions, range(2)).all()
    assert np.array_equal(*bodies)
    plain = [[torch.zeros_like(part) for part in ([layer] if spec.mla else layer)] for layer in kv_of(spec, 24)]
    into = KVView.of([layer[0] if spec.mla else layer for layer in plain], spec)
    codec.decode(bodies[0], offsets, positions, into, np.array([0, 12]), range(2))
    other = grown(kv.tables, 24)
    codec.decode(bodies[0], offsets, positions, KVView.paged(kv.pools, other.pages, spec), np.array([0, 12]), range(2))
    for layer, wanted in zip(kv.gather(other), plain, strict=True):
        for part, expected in zip(layer, wanted, strict=True):
            assert torch.equal(part.reshape(-1), expected.reshape(-1))
    for layer, wanted in zip(kv.gather(table), given, strict=True):
        assert torch.equal(layer[0].reshape(-1), (wanted if spec.mla else wanted[0]).reshape(-1))


def test_a_pool_made_in_inference_mode_is_written_outside_of_it():
    with torch.inference_mode():
        kv = PagedKV(SPEC, 4)
    table = kv.tables.new()
    kv.append(table, kv_of(SPEC, 5))
    assert table.tokens == 5


def test_one_tensor_of_all_layers_is_appended_too():
    spec = KVSpec(2, 3, 4, "float16")
    kv, whole = PagedKV(spec, 4), torch.randn(2, 2, 21, 3, 4).half()
    table = kv.tables.new()
    kv.append(table, whole[:, :, :9])
    kv.append(table, whole[:, :, 9:])
    assert torch.equal(torch.stack([torch.stack(layer) for layer in kv.gather(table)]), whole)


@pytest.mark.parametrize(
    "wrong",
    [
        kv_of(KVSpec(2, 3, 16, "bfloat16", v_head_dim=8), 5),
        kv_of(KVSpec(2, 2, 16, "float32", v_head_dim=8), 5),
        kv_of(KVSpec(3, 3, 16, "float32", v_head_dim=8), 5),
        [(torch.zeros(5, 3, 16), torch.zeros(4, 3, 8))] * 2,
        [(torch.zeros(5, 3, 16),)] * 2,
    ],
)
def test_kv_of_another_shape_is_refused(wrong):
    kv = PagedKV(SPEC, 4)
    table = kv.tables.new()
    with pytest.raises(KVMismatch):
        kv.append(table, wrong)
    assert (table.tokens, kv.held_nbytes) == (0, 0)


def test_threads_fork_and_grow_one_sequence_at_a_time_each():
    """All share a partial page at first; each finds what it wrote, and at the end only the first's pages are held."""
    kv = PagedKV(SPEC, 64, page_tokens=4)
    base, given = kv.tables.new(), kv_of(SPEC, 6)
    kv.append(base, given)

    def work(thread):
        for turn in range(40):
            more = kv_of(SPEC, 1 + turn % 9, seed=100 * thread + turn)
            table = kv.tables.fork(base)
            kv.append(table, more)
            for layer, before, after in zip(kv.gather(table), given, more, strict=True):
                for part, *wanted in zip(layer, before, after, strict=True):
                    assert torch.equal(part, torch.cat(wanted))
            kv.tables.free(table)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(4)))
    assert kv.tables.free_pages == 62


def test_pools_and_pages_of_nothing_are_refused():
    with pytest.raises(ConfigError, match="0 pages"):
        PagePool(0)
    with pytest.raises(ConfigError, match="0 tokens"):
        PagedKV(SPEC, 4, page_tokens=0)
    kv = PagedKV(SPEC, 4)
    with pytest.raises(UsageError, match="pad or cut"):
        Batch(kv, [grown(kv.tables, 1), grown(kv.tables, 2)])
    with pytest.raises(UsageError, match="there is no row 1"):
        Batch(kv, [grown(kv.tables, 1)]).select([0, 1])
    with pytest.raises(UsageError, match="not all"):
        kv.places([grown(kv.tables, 3)], 0, 4)
