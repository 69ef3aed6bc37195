"""Where KV and bodies may be: strides, pages, layers; and what is refused before anything is touched."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from kvtier.codecs.gpu import DeviceView, GpuCodec
from kvtier.codecs.registry import codec_for
from kvtier.errors import ConfigError, KVMismatch, UsageError
from kvtier.spec import KVSpec
from kvtier.testing.kv import ones_like, random_kv, same_bits
from tests.gpu import kit
from tests.gpu.kit import DEVICE, Paged, Whole, decode, decoded_on_cpu, encoded, encoded_on_cpu, on_device, room_for

SPEC = KVSpec(1, 2, 64, "bfloat16", block_tokens=32)
UNEQUAL = KVSpec(1, 2, 64, "float16", v_head_dim=32, block_tokens=32)
LATENT = KVSpec(1, 1, 64, "bfloat16", block_tokens=32, mla=True)
PLAN = "sinks:1(K=int4/channel:16/asym,V=int4/token/sym/hadamard/lloyd)"
START = 5
"""The first block's first token: no page begins there."""


@pytest.mark.parametrize(
    ("how", "spec"),
    [
        (kit.k_then_v, SPEC),
        (kit.k_beside_v, SPEC),
        (kit.k_then_v_by_head, SPEC),
        (kit.k_beside_v_by_head, SPEC),
        (kit.joined, UNEQUAL),
        (kit.latents, LATENT),
    ],
    ids=lambda each: getattr(each, "__name__", None),
)
def test_pages_are_read_and_written_where_they_are(how: kit.Pool, spec: KVSpec) -> None:
    kv = random_kv(spec, START + 2 * spec.block_tokens + 3)
    tokens, positions = (START, START + spec.block_tokens), (0, 1)
    memory, _ = encoded(PLAN, spec, Paged(spec, kv, how).view(), tokens, positions)
    want, _ = encoded_on_cpu(PLAN, spec, kv, tokens, positions)
    assert np.array_equal(memory, want)
    out = Paged(spec, ones_like(kv), how)
    decode(PLAN, spec, memory, out.view(), tokens, positions)
    assert same_bits(out.contiguous(), decoded_on_cpu(PLAN, spec, want, kv, tokens, positions))
    assert all((part == 2).all() for part in out.rest())


@pytest.mark.parametrize("how", [kit.heads_first, kit.every_other_element, kit.odd], ids=lambda each: each.__name__)
def test_tensors_may_have_any_strides(how: Any) -> None:
    kv = random_kv(SPEC, 40)
    memory, _ = encoded(PLAN, SPEC, Whole(SPEC, kv, how).view(), [3], [0])
    want, _ = encoded_on_cpu(PLAN, SPEC, kv, [3], [0])
    assert np.array_equal(memory, want)
    out = Whole(SPEC, ones_like(kv), how)
    decode(PLAN, SPEC, memory, out.view(), [3], [0])
    assert same_bits(out.contiguous(), decoded_on_cpu(PLAN, SPEC, want, kv, [3], [0]))


def test_layers_are_encoded_and_decoded_alone() -> None:
    spec = KVSpec(4, 1, 32, "bfloat16", block_tokens=16)
    plan = "layers(0-1:sinks:1(int8/channel:16/asym);2:raw;3:int8/channel:16/asym)"
    kv = random_kv(spec, 16)
    memory, _ = encoded(plan, spec, Whole(spec, kv).view(), [0], [0], range(1, 3))
    want, _ = encoded_on_cpu(plan, spec, kv, [0], [0], range(1, 3))
    assert np.array_equal(memory, want)
    whole, _ = encoded_on_cpu(plan, spec, kv, [0], [0])
    out = Whole(spec, ones_like(kv))
    decode(plan, spec, whole, out.view(), [0], [0], range(1, 3))
    layers, all_of_them = out.contiguous(), decoded_on_cpu(plan, spec, whole, kv, [0], [0])
    assert same_bits(layers[1:3], all_of_them[1:3])
    assert same_bits([layers[0], layers[3]], ones_like([kv[0], kv[3]]))


def test_whatever_bytes_a_body_has_nothing_else_is_written() -> None:
    spec = KVSpec(1, 1, 48, "float16", block_tokens=8)
    for plan in ("int3/group:32/asym", "int4/token/sym/hadamard/lloyd", "e4m3/channel:4/asym", "fp16"):
        kv = random_kv(spec, 24)
        memory, _ = room_for(plan, spec, [1])
        garbage = np.random.default_rng(0).integers(0, 256, memory.shape, np.uint8)
        out = Whole(spec, ones_like(kv))
        with np.errstate(all="ignore"):
            decode(plan, spec, garbage, out.view(), [8], [1])
        for part in out.contiguous()[0]:
            assert (part[:8] == 1).all()
            assert (part[16:] == 1).all()


def test_what_one_tensor_holds_is_what_its_layers_hold() -> None:
    kv = torch.zeros(2, 2, 40, 3, 8, device=DEVICE)
    spec = KVSpec(2, 3, 8, "float32")
    whole, layers = DeviceView.of(kv, spec), DeviceView.of([(layer[0], layer[1]) for layer in kv], spec)
    assert torch.equal(whole.table, layers.table)
    assert DeviceView.of(whole, spec) is whole


@pytest.mark.parametrize(
    ("kv", "says"),
    [
        (torch.zeros(1, 2, 40, 2, 64), "float32"),
        (torch.zeros(1, 2, 40, 3, 64, dtype=torch.bfloat16), "shape"),
        (torch.zeros(2, 2, 40, 2, 64, dtype=torch.bfloat16), "1 layers"),
        ([(torch.zeros(40, 2, 64, dtype=torch.bfloat16),)], "1 parts"),
        ([(np.zeros((40, 2, 64), np.uint16),) * 2], "no torch tensor"),
        (None, "no KV"),
        ([3], "1 parts"),
    ],
)
def test_what_is_no_kv_of_the_spec_is_refused(kv: Any, says: str) -> None:
    with pytest.raises(KVMismatch, match=says):
        DeviceView.of(kv, SPEC)


def test_pages_that_the_pool_has_not_are_refused() -> None:
    pools = [tuple(torch.zeros(2, 3, 16, 2, 64, dtype=torch.bfloat16, device=DEVICE))]
    for pages in ([0, 3], [-1]):
        with pytest.raises(KVMismatch, match="is not one of the pool's 3"):
            DeviceView.paged(pools, pages, SPEC)
    with pytest.raises(KVMismatch, match="do not hold 33 tokens"):
        DeviceView.paged(pools, [0, 1], SPEC, tokens=33)


def test_pages_are_integers_and_each_is_loaded_into_once() -> None:
    pools = [[torch.zeros(3, 16, 2, 64, dtype=torch.bfloat16, device=DEVICE) for _ in "kv"]]
    for pages in ([0.0, 1.0], [True, False]):
        with pytest.raises(KVMismatch, match="pass integers"):
            DeviceView.paged(pools, pages, SPEC)
    assert DeviceView.paged(pools, [1, 0], SPEC).writable
    with pytest.raises(KVMismatch, match="share memory"):
        DeviceView.paged(pools, [1, 1], SPEC).require_writable()


def test_nothing_is_touched_outside_of_memory_or_kv() -> None:
    codec, kv = GpuCodec("int8/token/sym", SPEC, DEVICE), Whole(SPEC, random_kv(SPEC, 32))
    memory, every = on_device(np.full(codec.nbytes(0) + 32, 7, np.uint8)), range(1)
    for token, offset, layers in [(0, -16, every), (0, 48, every), (1, 0, every), (-1, 0, every), (0, 0, range(2))]:
        at, here, first = np.array([token]), np.array([offset]), np.array([0])
        with pytest.raises(UsageError):
            codec.encode(kv.view(), at, memory, here, first, layers)
        with pytest.raises(UsageError):
            codec.decode(memory, here, first, kv.view(), at, layers)
    with pytest.raises(UsageError, match="multiples of 16"):
        codec.encode(kv.view(), np.array([0]), memory, np.array([8]), np.array([0]), every)
    assert (memory == 7).all()


def test_elements_that_share_memory_are_no_target() -> None:
    part = torch.zeros(1, 2, 64, dtype=torch.bfloat16, device=DEVICE).expand(32, 2, 64)
    codec = GpuCodec("raw", SPEC, DEVICE)
    none = np.array([], np.int64)
    with pytest.raises(KVMismatch, match="share memory"):
        codec.decode(on_device(np.zeros(0, np.uint8)), none, none, DeviceView.of([(part, part)], SPEC), none, range(1))


def test_no_blocks_is_no_work() -> None:
    codec, none = GpuCodec("int4", KVSpec(1, 2, 64, "bfloat16"), DEVICE), np.array([], np.int64)
    view = Whole(codec.spec, random_kv(codec.spec, 0)).view()
    memory = on_device(np.zeros(0, np.uint8))
    assert codec.encode(view, none, memory, none, none, range(1)).shape == (0,)
    codec.decode(memory, none, none, view, none, range(1))


def test_it_answers_what_the_cpus_codec_answers() -> None:
    spec = KVSpec(3, 2, 64, "bfloat16")
    here, there = GpuCodec("layered", spec, DEVICE), codec_for("layered", spec)
    assert (here.number, here.plan, here.spec) == (there.number, there.plan, there.spec)
    for position in (0, 1):
        assert here.nbytes(position) == there.nbytes(position)
        assert np.array_equal(here.layers(position), there.layers(position))


def test_plans_without_a_kernel_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="no kernel"):
        GpuCodec("int4/group:48/sym/hadamard", KVSpec(1, 1, 128, "bfloat16"), DEVICE)
