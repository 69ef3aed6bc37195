"""vLLM's paged pools on a device: the blocks and the pages are those of the CPU's view of the same pools."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import kvtier
from kvtier.client.save import Saved
from kvtier.codecs.gpu import DeviceView
from kvtier.connectors.vllm.pages import Pages
from kvtier.spec import KVSpec
from tests.gpu.kit import DEVICE

COUNT, PAGE = 12, 16
SPEC = KVSpec(2, 2, 64, "bfloat16", block_tokens=32)
UNEQUAL = KVSpec(2, 2, 64, "float16", v_head_dim=32, block_tokens=32)
LATENT = KVSpec(2, 1, 64, "bfloat16", block_tokens=32, mla=True)
ROW = [7, 0, 10, 3]
TOKENS = len(ROW) * PAGE
PLACE = "cpu" if DEVICE == "cpu" else "cuda:0"
PATIENCE = 60.0
SPECS = pytest.mark.parametrize("spec", [SPEC, UNEQUAL, LATENT], ids=["equal", "unequal", "latent"])
ORDERS = pytest.mark.parametrize("order", ["LBHNC", "LBNHC", "BLHNC", "BLNHC"])


def pools_in(order: str, spec: KVSpec, seed: int, device: str = PLACE) -> list[torch.Tensor]:
    sizes = {"L": spec.layers, "B": COUNT, "H": spec.kv_heads, "N": PAGE, "C": sum(spec.head_dims)}
    shape = [sizes[axis] for axis in order]
    room = torch.empty(shape, dtype=getattr(torch, spec.dtype), device=device)
    room = room.permute([order.index(axis) for axis in "LBHNC"])
    room.copy_(torch.randn([sizes[axis] for axis in "LBHNC"], generator=torch.Generator().manual_seed(seed)))
    return list(room)


def view_of(pages: Pages, row: list[int]) -> DeviceView:
    """In the interpreter the pools are in CPU memory, and would be left to the CPU's codec."""
    seen = pages.view(row)
    return seen if isinstance(seen, DeviceView) else DeviceView.paged(pages.parts, row, pages.spec)


@SPECS
@ORDERS
@pytest.mark.parametrize("plan", ["raw", "int8"])
def test_the_cpu_loads_what_the_device_saved_and_the_other_way_round(order, spec, plan):
    pools, there = pools_in(order, spec, 1), [pool.cpu() for pool in pools_in(order, spec, 1)]
    loaded = {}
    for name, source in (("device", view_of(Pages(pools, spec, opaque=False), ROW)), ("cpu", None)):
        with kvtier.open({"cpu": {"capacity": "4MiB"}}) as cache:
            space = cache.keyspace(spec, model="m", revision="1", plan=plan)
            kv = source or Pages(there, spec, opaque=False).view(ROW)
            assert space.save(range(TOKENS), kv).result(PATIENCE) == Saved(2, 0)
            for target in ("device", "cpu"):
                others = pools_in(order, spec, 2, PLACE if target == "device" else "cpu")
                pages = Pages(others, spec, opaque=False)
                into = view_of(pages, ROW[2:]) if target == "device" else pages.view(ROW[2:])
                with space.match(range(TOKENS)) as hit:
                    assert hit.load(into, origin=32, verify=True) == TOKENS
                loaded[name, target] = torch.stack([pool.cpu() for pool in others])
    first = loaded.pop(("cpu", "cpu"))
    assert all(torch.equal(first, other) for other in loaded.values())
    before = torch.stack(pools_in(order, spec, 2, "cpu"))
    touched = (first != before).flatten(2).any(-1).any(0)
    assert np.flatnonzero(touched.numpy()).tolist() == sorted(ROW[2:])


@ORDERS
def test_scratch_pages_are_copied_on_the_device(order):
    pools, others = pools_in(order, SPEC, 1), pools_in(order, SPEC, 2)
    pages, mine = Pages(pools, SPEC, opaque=False), Pages(others, SPEC, opaque=False)
    scratch = pages.scratch(4)
    scratch.copy(pages, ROW, [0, 1, 2, 3])
    mine.copy(scratch, [1, 3], [5, 2])
    mine.fence()()
    for pool, other, was in zip(pools, others, pools_in(order, SPEC, 2), strict=True):
        assert torch.equal(other[[5, 2]], pool[[ROW[1], ROW[3]]])
        rest = [page for page in range(COUNT) if page not in (5, 2)]
        assert torch.equal(other[rest], was[rest])


@pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter has no streams")
def test_a_fence_waits_for_what_was_queued_before_it_and_for_nothing_else():
    pages = Pages(pools_in("LBNHC", SPEC, 1), SPEC, opaque=False)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(1_000_000_000)
        behind = pages.fence()
    before = torch.cuda.Event()
    before.record(side)
    pages.view(ROW)
    pages.fence()()
    assert not before.query(), "neither another stream nor a view was waited for"
    behind()
    assert before.query()
