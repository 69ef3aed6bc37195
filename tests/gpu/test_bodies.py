"""Bodies and KV of the GPU's codec are those of the CPU's, and of the specification, bit for bit."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.codecs import reference
from kvtier.codecs.plan import NAMED
from kvtier.codecs.registry import codec_for
from kvtier.errors import ConfigError
from kvtier.spec import KVSpec
from kvtier.testing.kv import Layers, ones_like, random_kv, same_bits
from tests.codec_cases import Case, hard_kv, plans
from tests.gpu.kit import (
    DEVICE,
    GUARD,
    Paged,
    Whole,
    decode,
    decoded_on_cpu,
    encoded,
    encoded_on_cpu,
    k_then_v,
    room_for,
)

BFLOAT16, FLOAT16 = KVSpec(2, 2, 64, "bfloat16"), KVSpec(1, 1, 128, "float16")
LATENT = KVSpec(1, 1, 576, "bfloat16", block_tokens=20, mla=True)
CASES = [
    *[(plan, BFLOAT16) for plan in ("raw", "int8", "int4", "int3", "fp8", "k8v4", "layered", "int8/token/sym")],
    *[(plan, FLOAT16) for plan in ("int8", "int4", "int3", "fp8", "int8/token/sym")],
    ("int8/token/sym", LATENT),
    ("K=int8/channel:16/asym,V=raw", LATENT),
    ("int2/token/sym/hadamard/lloyd", KVSpec(1, 1, 192, "bfloat16", block_tokens=16, mla=True)),
    ("int4/token/sym/hadamard/lloyd", KVSpec(1, 2, 80, "float16", block_tokens=9)),
    ("int3/token/sym/hadamard/lloyd", KVSpec(1, 1, 96, "bfloat16", block_tokens=16)),
    ("int4/group:32/sym/hadamard", KVSpec(1, 1, 128, "bfloat16", block_tokens=16)),
    ("int4/group:8/asym/hadamard/clip", KVSpec(1, 1, 64, "bfloat16", block_tokens=8)),
    ("K=int3/token/sym/clip,V=int8/token/asym", KVSpec(1, 2, 80, "bfloat16", block_tokens=10)),
    ("K=int4/channel:7/sym/hadamard/clip,V=int2/channel:16/asym", KVSpec(1, 1, 80, "bfloat16", block_tokens=20)),
    ("K=int4/tensor/asym,V=e5m2/tensor/sym", KVSpec(1, 2, 80, "bfloat16", block_tokens=40)),
    ("K=e4m3/token/asym/hadamard,V=e5m2/group:16/asym", KVSpec(1, 1, 64, "float32", block_tokens=40)),
    ("sinks:3(K=int3/channel:5/asym,V=int2/group:10/sym)", KVSpec(2, 3, 30, "float16", block_tokens=10)),
    ("sinks:3(bf16)", KVSpec(1, 2, 33, "float16", block_tokens=10)),
    ("K=fp16,V=bf16", KVSpec(1, 1, 7, "float32", v_head_dim=80, block_tokens=5)),
    ("int8/token/sym", KVSpec(1, 1, 1, "float16", block_tokens=2)),
]


def block(layers: Layers, spec: KVSpec, first: int) -> Layers:
    return [[part[first : first + spec.block_tokens] for part in layer] for layer in layers]


@pytest.mark.parametrize(("plan", "spec"), CASES, ids=[f"{plan} {spec.dtype} {spec.head_dim}" for plan, spec in CASES])
def test_bodies_and_kv_are_the_cpus(plan: str, spec: KVSpec) -> None:
    tokens, positions = (3, 3 + spec.block_tokens), (1, 0)
    kv = hard_kv(spec, 2 * spec.block_tokens + 5, 1, 15.0)
    memory, stored = encoded(plan, spec, Whole(spec, kv).view(), tokens, positions)
    want, _ = encoded_on_cpu(plan, spec, kv, tokens, positions)
    assert stored.all()
    assert np.array_equal(memory, want)
    _, offsets = room_for(plan, spec, positions)
    body = reference.encode(spec, plan, 1, block(kv, spec, 3))
    assert memory[offsets[0] : offsets[0] + len(body)].tobytes() == body
    out = Whole(spec, ones_like(kv))
    decode(plan, spec, want, out.view(), tokens, positions)
    assert same_bits(out.contiguous(), decoded_on_cpu(plan, spec, want, kv, tokens, positions))


@pytest.mark.skipif(DEVICE == "cpu", reason="too much for the interpreter")
@pytest.mark.parametrize("plan", [plan for plan in NAMED if plan != "mixed"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_bodies_and_kv_of_a_real_size_are_the_cpus(plan: str, dtype: str) -> None:
    spec = KVSpec(16, 8, 128, dtype)
    tokens, positions = range(0, 8 * 64, 64), range(8)
    kv = random_kv(spec, 8 * 64)
    memory, stored = encoded(plan, spec, Paged(spec, kv, k_then_v).view(), tokens, positions)
    want, _ = encoded_on_cpu(plan, spec, kv, tokens, positions)
    assert stored.all()
    assert np.array_equal(memory, want)
    out = Paged(spec, ones_like(kv), k_then_v)
    decode(plan, spec, want, out.view(), tokens, positions)
    assert same_bits(out.contiguous(), decoded_on_cpu(plan, spec, want, kv, tokens, positions))


@st.composite
def small_cases(draw: Any) -> Case:
    """Few elements: the interpreter takes a millisecond for what a device does in a clock."""
    dim, v_dim = draw(st.sampled_from([1, 7, 32, 64, 80, 96])), draw(st.sampled_from([1, 16, 33, 128]))
    heads, tokens = draw(st.integers(1, 2)), draw(st.integers(1, 12))
    dtype = draw(st.sampled_from(["bfloat16", "float16", "float32"]))
    spec = KVSpec(1, heads, dim, dtype, v_head_dim=v_dim, block_tokens=tokens)
    start, top = draw(st.integers(0, 5)), 15.9 if dtype == "float16" else draw(st.sampled_from([15.9, 22.9, 127.9]))
    layers = hard_kv(spec, start + tokens + 1, draw(st.integers(0, 1 << 32)), top)
    return Case(spec, draw(plans(spec)), draw(st.sampled_from([0, 1])), layers, start, None)


@settings(max_examples=int(os.environ.get("KVTIER_GPU_EXAMPLES", "30")), derandomize=True)
@given(case=small_cases())
def test_any_plan_is_carried_out_as_the_specification_says_or_refused(case: Case) -> None:
    spec, at, where = case.spec, [case.start], [case.position]
    want = reference.encode(spec, case.plan, case.position, case.block(case.layers))
    try:
        with np.errstate(all="ignore"):
            memory, stored = encoded(case.plan, spec, Whole(spec, case.layers).view(), at, where)
    except ConfigError as exc:
        assert "no kernel" in str(exc)  # noqa: PT017
        return
    assert stored[0] == (want is not None)
    if want is None:
        return
    (offset,) = room_for(case.plan, spec, where)[1]
    assert memory[offset : offset + len(want)].tobytes() == want
    assert (np.delete(memory, np.arange(offset, offset + len(want))) == GUARD).all()
    out = Whole(spec, ones_like(case.layers))
    decode(case.plan, spec, memory, out.view(), at, where)
    layers = out.contiguous()
    assert same_bits(case.block(layers), reference.decode(spec, case.plan, case.position, want))
    for part in (part for layer in layers for part in layer):
        assert (np.delete(part, np.arange(case.start, case.start + spec.block_tokens), axis=0) == 1).all()


@pytest.mark.parametrize("plan", ["int8", "int3", "fp8", "sinks:2(int4/group:32/asym)", "fp16", "int8/tensor/asym"])
@pytest.mark.parametrize("bad", [0xFF80, 0x7FC0, 0x7F7F], ids=["-inf", "nan", "too large"])
def test_a_block_that_cannot_be_stored_is_refused_and_its_neighbours_are_not(plan: str, bad: int) -> None:
    spec = KVSpec(1, 1, 32, "bfloat16", block_tokens=64 if plan in NAMED else 8)
    tokens, positions = [spec.block_tokens * i for i in range(3)], (0, 1, 2)
    kv = hard_kv(spec, 3 * spec.block_tokens, 2, 10.0)
    kv[0][-1][spec.block_tokens + 5, 0, 7] = bad
    with np.errstate(all="ignore"):
        memory, stored = encoded(plan, spec, Whole(spec, kv).view(), tokens, positions)
    assert stored.tolist() == [True, False, True]
    want, on_cpu = encoded_on_cpu(plan, spec, kv, tokens, positions)
    assert stored.tolist() == on_cpu.tolist()
    _, offsets = room_for(plan, spec, positions)
    for which in (0, 2):
        body = slice(offsets[which], offsets[which] + codec_for(plan, spec).nbytes(which))
        assert np.array_equal(memory[body], want[body])


def test_exact_tokens_and_raw_hold_any_bits() -> None:
    spec = KVSpec(1, 2, 32, "bfloat16", block_tokens=8)
    kv = hard_kv(spec, 8, 3, 5.0)
    for part in kv[0]:
        part[:2] = np.random.default_rng(0).integers(0, 1 << 16, part[:2].shape, np.uint16)
        part[0, 0, :3] = 0x7F80, 0xFFC1, 0x7FFF
    for plan in ("sinks:2(int8/token/sym)", "raw"):
        memory, stored = encoded(plan, spec, Whole(spec, kv).view(), [0], [0])
        assert stored.all()
        out = Whole(spec, ones_like(kv))
        decode(plan, spec, memory, out.view(), [0], [0])
        assert same_bits([[part[:2] for part in out.contiguous()[0]]], [[part[:2] for part in kv[0]]])
