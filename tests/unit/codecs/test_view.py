import ctypes

import numpy as np
import pytest
import torch

from kvtier.codecs.view import KVView
from kvtier.errors import KVMismatch
from kvtier.spec import KVSpec

SPEC = KVSpec(2, 3, 8, "float32", block_tokens=4)


def test_one_tensor_and_its_layers_are_the_same_view() -> None:
    kv = torch.zeros(2, 2, 10, 3, 8)
    whole, layers = KVView.of(kv, SPEC), KVView.of([(layer[0], layer[1]) for layer in kv], SPEC)
    assert np.array_equal(whole.addresses, layers.addresses)
    assert np.array_equal(whole.strides, layers.strides)
    assert (whole.tokens, whole.dtype, whole.writable) == (10, "float32", True)


def test_one_latent_tensor_and_its_layers_are_the_same_view() -> None:
    spec, kv = KVSpec(2, 1, 24, "float32", mla=True), np.zeros((2, 5, 48), np.float32)[:, :, ::2]
    whole, layers = KVView.of(kv, spec), KVView.of(list(kv), spec)
    assert np.array_equal(whole.addresses, layers.addresses)
    assert np.array_equal(whole.strides[..., [0, 2]], layers.strides[..., [0, 2]])


def test_strides_are_bytes_and_may_be_negative() -> None:
    part = np.zeros((5, 3, 8), np.float32)
    view = KVView.of([(part[::-1], part.transpose(0, 1, 2))] * 2, SPEC)
    assert view.strides[0].tolist() == [[-96, 32, 4, 0], [96, 32, 4, 0]]
    assert view.addresses[0, 0] - view.addresses[0, 1] == 4 * 96


def test_bits_of_16_bit_elements_are_accepted() -> None:
    spec = KVSpec(1, 1, 4, "bfloat16")
    assert KVView.of(np.zeros((1, 2, 6, 1, 4), np.uint16), spec).dtype == "bfloat16"


def test_tensors_that_require_grad_and_tensors_without_tokens_are_views_too() -> None:
    assert KVView.of(torch.zeros(2, 2, 7, 3, 8, requires_grad=True), SPEC).tokens == 7
    assert KVView.of(torch.zeros(2, 2, 0, 3, 8), SPEC).tokens == 0
    assert KVView.of(np.zeros((2, 2, 0, 3, 8), np.float32), SPEC).tokens == 0


def test_overlapping_tensors_are_views_too() -> None:
    assert KVView.of(torch.zeros(1, 1, 1, 3, 8).expand(2, 2, 9, 3, 8), SPEC).strides[0, 0, 0] == 0


def test_read_only_arrays_can_be_saved_and_not_loaded_into() -> None:
    kv = np.zeros((2, 2, 6, 3, 8), np.float32)
    kv.flags.writeable = False
    view = KVView.of(kv, SPEC)
    with pytest.raises(KVMismatch, match="read-only"):
        view.require_writable()


@pytest.mark.parametrize(
    ("kv", "says"),
    [
        (torch.zeros(2, 2, 6, 3), "pass \\[layers, 2, tokens"),
        (torch.zeros(2, 2, 6, 4, 8), "the spec says"),
        (torch.zeros(3, 2, 6, 3, 8), "the spec says"),
        (torch.zeros(2, 2, 6, 3, 8, dtype=torch.float64), "float64"),
        (torch.zeros(2, 2, 6, 3, 8, device="meta"), "meta"),
        (np.zeros((2, 2, 6, 3, 8), ">f4"), "the spec says float32"),
        ([(torch.zeros(6, 3, 8), torch.zeros(6, 3, 8))], "1 layers"),
        ([(torch.zeros(6, 3, 8),)] * 2, "1 parts"),
        ([(torch.zeros(6, 3, 8), torch.zeros(5, 3, 8))] * 2, "\\[5, 6\\] tokens"),
        ([(torch.zeros(6, 3, 8), torch.zeros(6, 3, 7))] * 2, "the spec says"),
    ],
)
def test_what_does_not_fit_is_refused(kv: object, says: str) -> None:
    with pytest.raises(KVMismatch, match=says):
        KVView.of(kv, SPEC)


def test_k_and_v_of_different_width_are_not_one_tensor() -> None:
    with pytest.raises(KVMismatch, match="one \\(k, v\\) pair"):
        KVView.of(torch.zeros(2, 2, 6, 3, 8), KVSpec(2, 3, 8, "float32", v_head_dim=4))


def test_memory_that_is_not_the_values_is_refused():
    spec = KVSpec(1, 1, 4, "float32")
    real = torch.zeros(1, 2, 64, 1, 4)
    for lazy in (torch.complex(real, real).conj().imag, real.to_sparse()):
        with pytest.raises(KVMismatch, match="resolve_neg"):
            KVView.of(lazy, spec)


def test_elements_that_share_memory_cannot_be_loaded_into():
    spec = KVSpec(1, 1, 4, "float32")
    view = KVView.of(torch.zeros(1, 1, 1, 1, 1).expand(1, 2, 64, 1, 4), spec)
    with pytest.raises(KVMismatch):
        view.require_writable()


@pytest.mark.parametrize("kv", [None, 5, object(), [None], [(None, None)]])
def test_what_is_no_kv_is_said_to_be_none(kv):
    with pytest.raises(KVMismatch):
        KVView.of(kv, KVSpec(1, 1, 4, "float32"))


def element(view: KVView, layer: int, part: int, place: tuple[int, int, int]) -> float:
    """What lies where a view says that an element is."""
    (token, head, channel), (by_token, by_head, by_element, by_page) = place, view.strides[layer, part].tolist()
    page, inside = divmod(token, view.page_tokens)
    at = int(view.addresses[layer, part]) + int(view.pages[page]) * by_page
    at += inside * by_token + head * by_head + channel * by_element
    return ctypes.c_float.from_address(at).value


def pools_of(form: str) -> tuple[list[object], torch.Tensor]:
    """Pools of 9 pages of 4 tokens, and the same as `[layers, 2, pages, tokens, heads, dim]`."""
    flat = torch.arange(2 * 2 * 9 * 4 * 3 * 8, dtype=torch.float32).reshape(2, 2, 9, 4, 3, 8)
    match form:
        case "pairs":
            return [(layer[0].clone(), layer[1].clone()) for layer in flat], flat
        case "k and v first":
            return list(flat), flat
        case "k and v in each page":
            pools = [layer.transpose(0, 1).contiguous() for layer in flat]
            return [(pool[:, 0], pool[:, 1]) for pool in pools], flat
        case "heads before tokens":
            pools = [layer.transpose(2, 3).contiguous() for layer in flat]
            return [pool.transpose(2, 3) for pool in pools], flat
        case "numpy":
            return [(layer[0].numpy(), layer[1].numpy()) for layer in flat], flat
    raise ValueError(form)


@pytest.mark.parametrize("form", ["pairs", "k and v first", "k and v in each page", "heads before tokens", "numpy"])
def test_pages_lie_where_the_engine_has_them(form: str) -> None:
    pools, flat = pools_of(form)
    table = [7, 0, 8, 3]
    view = KVView.paged(pools, table, SPEC)
    assert (view.tokens, view.page_tokens, view.writable) == (16, 4, True)
    for token, head, channel in [(0, 0, 0), (3, 2, 7), (4, 0, 1), (9, 1, 5), (15, 2, 7)]:
        for layer, part in [(0, 0), (0, 1), (1, 0), (1, 1)]:
            want = flat[layer, part, table[token // 4], token % 4, head, channel].item()
            assert element(view, layer, part, (token, head, channel)) == want


def test_pages_of_latents() -> None:
    spec, pool = KVSpec(2, 1, 24, "float32", mla=True), np.arange(2 * 5 * 4 * 24, dtype=np.float32)
    pool = pool.reshape(2, 5, 4, 24)
    view = KVView.paged(list(pool), torch.tensor([4, 1], dtype=torch.int32), spec, tokens=6)
    assert view.tokens == 6
    assert element(view, 1, 0, (5, 0, 23)) == pool[1, 1, 1, 23]
    assert view.strides[0, 0, [0, 2, 3]].tolist() == [24 * 4, 4, 4 * 24 * 4]


def test_a_block_table_that_changes_later_changes_nothing() -> None:
    table = np.array([1, 2])
    view = KVView.paged(pools_of("pairs")[0], table, SPEC)
    table[:] = 1 << 40
    assert view.pages.tolist() == [1, 2]


def test_pages_that_share_memory_cannot_be_loaded_into() -> None:
    page = torch.zeros(1, 4, 3, 8)
    view = KVView.paged([(page.expand(9, 4, 3, 8), page.expand(9, 4, 3, 8))] * 2, [0, 1], SPEC)
    with pytest.raises(KVMismatch):
        view.require_writable()


PAIR = (torch.zeros(9, 4, 3, 8), torch.zeros(9, 4, 3, 8))


@pytest.mark.parametrize(
    ("pools", "pages", "tokens", "says"),
    [
        ([PAIR, PAIR], [0, 9], None, "page 9 is not one of the pool's 9"),
        ([PAIR, PAIR], [3, -1], None, "page -1 is not one of the pool's 9"),
        ([PAIR, PAIR], [0, 1], 9, "2 pages of 4 tokens do not hold 9 tokens"),
        ([PAIR, PAIR], [0, 1], -1, "do not hold -1 tokens"),
        ([PAIR, PAIR], [[0, 1]], None, "one row of the block table"),
        ([PAIR], [0], None, "1 layers; the spec has 2"),
        ([PAIR, (torch.zeros(8, 4, 3, 8), torch.zeros(8, 4, 3, 8))], [0], None, "all must have the same"),
        ([PAIR, (torch.zeros(9, 5, 3, 8), torch.zeros(9, 5, 3, 8))], [0], None, "all must have the same"),
        ([PAIR, (torch.zeros(9, 4, 3, 9), torch.zeros(9, 4, 3, 9))], [0], None, "the spec says"),
        ([PAIR, (torch.zeros(9, 4), torch.zeros(9, 4))], [0], None, "pass \\[pages, page_tokens, kv_heads, dim\\]"),
        ([PAIR, (torch.zeros(0, 4, 3, 8),) * 2], [], None, "pass \\[pages, page_tokens, kv_heads, dim\\]"),
        ([PAIR, (PAIR[0],)], [0], None, "pass K and V"),
        ([PAIR, tuple(part.bfloat16() for part in PAIR)], [0], None, "bfloat16"),
        ([PAIR, tuple(part.to("meta") for part in PAIR)], [0], None, "meta"),
    ],
)
def test_pools_that_do_not_fit_are_refused(pools: object, pages: object, tokens: int | None, says: str) -> None:
    with pytest.raises(KVMismatch, match=says):
        KVView.paged(pools, pages, SPEC, tokens=tokens)


@pytest.mark.parametrize("pools", [None, 5, [None, None], [(None, None)] * 2, [torch.zeros(2)] * 2, "kv"])
def test_what_is_no_pool_is_said_to_be_none(pools):
    with pytest.raises(KVMismatch):
        KVView.paged(pools, [0], SPEC)


def test_what_is_no_block_table_is_said_to_be_none():
    pools = [(torch.zeros(3, 16, 3, 8), torch.zeros(3, 16, 3, 8))] * 2
    with pytest.raises(KVMismatch):
        KVView.paged(pools, ["first"], SPEC)


@pytest.mark.parametrize("table", [[0.0, 1.0], [True, False], ["0", "1"], [1j, 0]])
def test_block_tables_are_integers(table):
    pools = [(torch.zeros(3, 16, 3, 8), torch.zeros(3, 16, 3, 8))] * 2
    with pytest.raises(KVMismatch):
        KVView.paged(pools, table, SPEC)


def test_a_page_that_stands_twice_in_the_table_cannot_be_loaded_into():
    pools = [(torch.zeros(3, 16, 3, 8), torch.zeros(3, 16, 3, 8))] * 2
    assert KVView.paged(pools, [1, 0], SPEC).writable
    assert not KVView.paged(pools, [1, 1], SPEC).writable


@pytest.mark.parametrize("strides", [(0, 24, 1), (12, 8, 1), (24, 4, 1), (24, 8, 0)])
def test_tokens_heads_or_elements_that_overlap_cannot_be_loaded_into(strides):
    """Of 3 heads of 8 elements: tokens nearer than 24, heads nearer than 8."""
    buffer = torch.zeros(10_000)
    part = torch.as_strided(buffer, (6, 3, 8), strides)
    assert not KVView.of([(part, part)] * 2, SPEC).writable
    array = np.lib.stride_tricks.as_strided(buffer.numpy(), (6, 3, 8), [4 * s for s in strides], writeable=True)
    assert not KVView.of([(array, array)] * 2, SPEC).writable
    apart = torch.as_strided(buffer, (6, 3, 8), (8, 48, 1))
    assert KVView.of([(apart, apart)] * 2, SPEC).writable


def test_another_sequence_of_the_same_pools_is_another_view():
    pools = [(torch.zeros(9, 4, 3, 8), torch.zeros(9, 4, 3, 8))] * 2
    empty = KVView.paged(pools, [], SPEC)
    assert (empty.tokens, empty.writable) == (0, True)
    for pages, tokens in (([3, 1], None), ([8], 2), ([2, 2], None)):
        there, want = empty.at(pages, tokens=tokens), KVView.paged(pools, pages, SPEC, tokens=tokens)
        assert there.tokens == want.tokens
        assert there.writable == want.writable
        for name in ("addresses", "strides", "pages"):
            assert np.array_equal(getattr(there, name), getattr(want, name))
    with pytest.raises(KVMismatch, match="page 9 is not one of the pool's 9"):
        empty.at([9])
    with pytest.raises(KVMismatch, match="paged pool"):
        KVView.of([(torch.zeros(6, 3, 8),) * 2] * 2, SPEC).at([0])
