"""An engine's paged pools, whatever their order in memory; pages of which only the bytes are known."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

import kvtier
from kvtier.codecs.registry import codec_for
from kvtier.codecs.view import KVView
from kvtier.connectors.vllm.pages import Pages
from kvtier.errors import KVMismatch
from kvtier.spec import KVSpec

COUNT, PAGE = 11, 4
SPEC = KVSpec(2, 3, 8, "bfloat16", block_tokens=8)
UNEQUAL = KVSpec(2, 2, 8, "float16", v_head_dim=4, block_tokens=8)
LATENT = KVSpec(2, 1, 12, "float32", block_tokens=8, mla=True)
SPECS = pytest.mark.parametrize("spec", [SPEC, UNEQUAL, LATENT], ids=["equal", "unequal", "latent"])
ROW = [7, 0, 10, 3]
"""Pages of the sequence that tests store, out of order."""
OTHERS = [page for page in range(COUNT) if page not in ROW]
Order = Callable[[KVSpec, int], list[torch.Tensor]]


def _shape(spec: KVSpec) -> dict[str, int]:
    return {"L": spec.layers, "B": COUNT, "H": spec.kv_heads, "N": PAGE, "C": sum(spec.head_dims)}


def pools_in(order: str) -> Order:
    """Pools of all layers in one tensor whose axes lie in this order, filled with what a seed says."""

    def pools(spec: KVSpec, seed: int) -> list[torch.Tensor]:
        sizes, dtype = _shape(spec), getattr(torch, spec.dtype)
        room = torch.empty([sizes[axis] for axis in order], dtype=dtype).permute([order.index(a) for a in "LBHNC"])
        room.copy_(torch.randn([sizes[axis] for axis in "LBHNC"], generator=torch.Generator().manual_seed(seed)))
        return list(room)

    return pools


ORDERS = ["LBHNC", "LBNHC", "BLHNC", "BLNHC", "BHLNC", "LHBNC"]


def by_hand(pools: list[torch.Tensor], spec: KVSpec) -> KVView:
    """The sequence, taken apart token by token and head by head."""
    layers = []
    for pool in pools:
        tokens = [pool[page, :, place] for page in ROW for place in range(PAGE)]
        whole = torch.stack(tokens)  # [tokens, heads, C]
        k, v = whole[..., : spec.head_dim].clone(), whole[..., spec.head_dim :].clone()
        layers.append(k[:, 0] if spec.mla else (k, v))
    return KVView.of(layers, spec)


def bodies(view: KVView, plan: str) -> np.ndarray:
    codec = codec_for(plan, view.spec)
    nbytes = codec.nbytes(1)
    memory = np.zeros(2 * nbytes, np.uint8)
    places, blocks = np.array([0, nbytes]), np.array([1, 1])
    assert codec.encode(view, np.array([0, 8]), memory, places, blocks, range(view.spec.layers)).all()
    return memory


def decode(view: KVView, plan: str, memory: np.ndarray) -> None:
    codec = codec_for(plan, view.spec)
    places, blocks = np.array([0, codec.nbytes(1)]), np.array([1, 1])
    codec.decode(memory, places, blocks, view, np.array([0, 8]), range(view.spec.layers))


def bits(pool: torch.Tensor) -> torch.Tensor:
    return pool.view({2: torch.int16, 4: torch.int32}[pool.element_size()])


@SPECS
@pytest.mark.parametrize("plan", ["raw", "int8"])
@pytest.mark.parametrize("order", ORDERS)
def test_every_order_in_memory_gives_the_same_blocks(order, plan, spec):
    pools = pools_in(order)(spec, 1)
    pages = Pages(pools, spec, opaque=False)
    assert (pages.count, pages.page_tokens) == (COUNT, PAGE)
    view = pages.view(ROW)
    assert view.tokens == 16
    assert np.array_equal(bodies(view, plan), bodies(by_hand(pools, spec), plan))


@SPECS
@pytest.mark.parametrize("order", ORDERS)
def test_what_one_order_stored_another_loads_and_no_other_page_is_touched(order, spec):
    source = pools_in("LBNHC")(spec, 1)
    memory = bodies(Pages(source, spec, opaque=False).view(ROW), "raw")
    pools, before = pools_in(order)(spec, 2), pools_in(order)(spec, 2)
    decode(Pages(pools, spec, opaque=False).view(ROW), "raw", memory)
    for pool, was, want in zip(pools, before, source, strict=True):
        assert torch.equal(pool[ROW], want[ROW])
        assert torch.equal(pool[OTHERS], was[OTHERS])


def random_bytes(spec: KVSpec, seed: int, order: str = "LBHNC") -> list[torch.Tensor]:
    """Every pattern of bits occurs: NaNs of all kinds, infinities, denormals."""
    pools = pools_in(order)(spec, 0)
    generator = torch.Generator().manual_seed(seed)
    for pool in pools:
        page = bits(pool)
        page.copy_(torch.randint(-(1 << 15), 1 << 15, page.shape, generator=generator))
        if spec.itemsize == 4:
            page.bitwise_left_shift_(16).add_(torch.randint(0, 1 << 16, page.shape, generator=generator))
        special = {"bfloat16": 0x7F80, "float16": 0x7C00, "float32": 0x7F800000}[spec.dtype]
        page[:, :, 0] |= special  # an exponent of ones: infinite, or NaN with any payload, quiet or not
    assert torch.isnan(torch.stack([pool.float() for pool in pools])).any()
    return pools


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("order", ["LBHNC", "LBNHC", "BLHNC"])
def test_opaque_pages_come_back_bit_for_bit(order, dtype):
    """Through a save and a load: other pages of another engine, whose layers lie otherwise, have the same bytes."""
    for spec in (replace(each, dtype=dtype) for each in (SPEC, UNEQUAL, LATENT)):
        pools, others = random_bytes(spec, 1, order), random_bytes(spec, 2, order)
        was = [bits(pool).clone() for pool in others]
        with kvtier.open({"cpu": {"capacity": "4MiB"}}) as cache:
            space = cache.keyspace(spec, model="m", revision="1", layout="opaque")
            view = Pages(pools, spec, opaque=True).view(ROW)
            assert space.save(range(16), view).result(10.0).blocks == 2
            with space.match(range(16)) as hit:
                assert hit.load(Pages(others, spec, opaque=True).view(ROW[::-1]), verify=True) == 16
        for pool, other, before in zip(pools, others, was, strict=True):
            assert torch.equal(bits(other)[ROW[::-1]], bits(pool)[ROW])
            assert torch.equal(bits(other)[OTHERS], before[OTHERS])


def test_opaque_pages_are_their_bytes_and_nothing_is_regrouped():
    """A block's body is, layer by layer, the first halves of its pages, then the second halves."""
    pools = random_bytes(SPEC, 3)
    half = PAGE * 3 * 8
    want = b"".join(
        bits(pool).reshape(COUNT, -1)[ROW[at : at + 2], part * half : (part + 1) * half].numpy().tobytes()
        for at in (0, 2)
        for pool in pools
        for part in (0, 1)
    )
    assert bodies(Pages(pools, SPEC, opaque=True).view(ROW), "raw").tobytes() == want


@SPECS
@pytest.mark.parametrize("opaque", [False, True])
@pytest.mark.parametrize("order", ["LBHNC", "LBNHC"])
def test_scratch_pages_are_of_the_same_layout_and_copied_as_bits(order, opaque, spec):
    pools = random_bytes(spec, 1, order)
    pages = Pages(pools, spec, opaque=opaque)
    scratch = pages.scratch(4)
    assert (scratch.count, scratch.page_tokens) == (4, PAGE)
    memory = bodies(pages.view(ROW), "raw")
    decode(scratch.view([2, 0, 1, 3]), "raw", memory)
    for pool, there in zip(pools, scratch.pools, strict=True):
        assert torch.equal(bits(pool)[ROW], bits(there)[[2, 0, 1, 3]])
    others = random_bytes(spec, 2, order)
    was = [bits(pool).clone() for pool in others]
    Pages(others, spec, opaque=opaque).copy(scratch, [0, 3], [9, 1])
    for pool, other, before in zip(pools, others, was, strict=True):
        assert torch.equal(bits(other)[[9, 1]], bits(pool)[[ROW[1], ROW[3]]])
        rest = [page for page in range(COUNT) if page not in (9, 1)]
        assert torch.equal(bits(other)[rest], before[rest])


def test_nothing_is_queued_on_a_cpu():
    Pages(pools_in("LBHNC")(SPEC, 1), SPEC, opaque=True).fence()()


SPLIT = [torch.zeros(COUNT, 3, PAGE, 32, dtype=torch.bfloat16)[..., ::2] for _ in range(2)]


@pytest.mark.parametrize(
    ("pools", "spec", "says"),
    [
        (pools_in("LBHNC")(SPEC, 0)[:1], SPEC, "pass one pool a layer"),
        ([pool[..., :9] for pool in pools_in("LBHNC")(SPEC, 0)], SPEC, r"the spec says \[pages, 3, page_tokens, 16\]"),
        ([pool[:, :2] for pool in pools_in("LBHNC")(SPEC, 0)], SPEC, r"the spec says \[pages, 3, page_tokens, 16\]"),
        ([pool[0] for pool in pools_in("LBHNC")(SPEC, 0)], SPEC, r"the spec says \[pages, 3, page_tokens, 16\]"),
        ([pool[:0] for pool in pools_in("LBHNC")(SPEC, 0)], SPEC, r"the spec says \[pages, 3, page_tokens, 16\]"),
        ([bits(pool) for pool in pools_in("LBHNC")(SPEC, 0)], SPEC, "keep KV in the model's own dtype"),
        ([pool[:, :, :3] for pool in pools_in("LBHNC")(SPEC, 0)], SPEC, "make block_tokens a multiple"),
        ([pools_in("LBHNC")(SPEC, 0)[0], pools_in("LBHNC")(SPEC, 0)[1][:5]], SPEC, "all must have the same"),
        ([pools_in("LBHNC")(SPEC, 0)[0], pools_in("LBHNC")(SPEC, 0)[1].to("meta")], SPEC, "meta"),
    ],
)
def test_pools_that_are_not_the_specs_are_refused(pools, spec, says):
    with pytest.raises(KVMismatch, match=says):
        Pages(pools, spec, opaque=False)


@pytest.mark.parametrize("pools", [pools_in("LHBNC")(SPEC, 0), pools_in("BHLNC")(SPEC, 0), SPLIT])
def test_opaque_pages_must_be_in_one_piece(pools):
    with pytest.raises(KVMismatch, match="in one piece"):
        Pages(pools, SPEC, opaque=True)


def test_pages_that_are_not_there_are_refused():
    pages = Pages(pools_in("LBHNC")(SPEC, 0), SPEC, opaque=True)
    scratch = pages.scratch(2)
    with pytest.raises(KVMismatch, match="page 11 is not one of the pool's 11"):
        pages.view([11])
    with pytest.raises(KVMismatch, match="page -1 is not one of the pool's 11"):
        pages.copy(scratch, [0], [-1])
    with pytest.raises(KVMismatch, match="page 2 is not one of the pool's 2"):
        pages.copy(scratch, [2], [0])
    with pytest.raises(KVMismatch, match="one place a page"):
        pages.copy(scratch, [0, 1], [0])
    with pytest.raises(KVMismatch, match="one layout"):
        pages.copy(Pages(scratch.pools, SPEC, opaque=False), [0], [0])
