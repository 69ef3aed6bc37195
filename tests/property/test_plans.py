"""Texts of plans: one for what is stored, and nothing but `ConfigError` for what is none."""

from __future__ import annotations

import string
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.block import BlockHeader, verify_payload
from kvtier.codecs.layout import Field, layout
from kvtier.codecs.plan import NAMED, LayerPlan, canonical, canonical_plan, parse_plan, resolve
from kvtier.codecs.registry import codec_for, codec_of
from kvtier.codecs.scheme import GRANULARITIES, OPTIONS, PRECISIONS
from kvtier.errors import ConfigError, CorruptPayload, UnknownCodec
from kvtier.spec import KVSpec
from kvtier.testing.kv import random_kv
from tests.codec_cases import body_of, plans, specs

LETTERS = "KV=,:;/()-0123456789 " + string.ascii_lowercase
WORDS = [*NAMED, *PRECISIONS, *GRANULARITIES, *OPTIONS, "sym", "asym", "layers", "sinks", "recent", *"KV=,:;/()-", "64"]
garbage = st.one_of(
    st.text(max_size=60),
    st.text(LETTERS, max_size=60),
    st.lists(st.sampled_from(WORDS), max_size=30).map("".join),
)


@st.composite
def nearly_plans(draw: Any) -> str:
    """A plan with something lost, repeated or put in."""
    spec = draw(specs())
    text = draw(st.one_of(plans(spec), st.sampled_from(list(NAMED.values()))))
    for _ in range(draw(st.integers(1, 3))):
        at, stop = sorted((draw(st.integers(0, len(text))), draw(st.integers(0, len(text)))))
        text = text[:at] + draw(st.sampled_from(["", text[at:stop] * 2, draw(garbage)])) + text[stop:]
    return text


@st.composite
def specs_and_plans(draw: Any) -> tuple[KVSpec, str]:
    spec = draw(specs())
    return spec, draw(plans(spec))


def stored_as(layers: tuple[LayerPlan, ...], spec: KVSpec) -> bytes:
    """Everything that a kernel is told: what is equal here, is stored as equal bytes."""
    tables = np.stack([layout(layers, spec, first=first).table for first in (True, False)])
    tables[..., Field.ROTATION] *= tables[..., Field.ROTATION] > 1
    return tables.tobytes()


@given(case=specs_and_plans())
def test_the_canonical_text_is_a_plan_of_its_own(case: tuple[KVSpec, str]) -> None:
    spec, text = case
    layers = resolve(parse_plan(text), spec)
    whole = canonical(layers)
    assert stored_as(resolve(parse_plan(whole), spec), spec) == stored_as(layers, spec)
    assert canonical_plan(whole, spec) == whole
    assert whole == "raw" or whole not in NAMED
    assert codec_for(text, spec) is codec_for(whole, spec)
    assert codec_for(text, spec).plan == whole


FEW = [
    *("raw", "bf16", "fp16", "int8/token/sym", "int8/group:7/sym", "int8/group:64/sym", "int8/token/sym/hadamard"),
    *("int8/channel:64/sym", "int8/channel:8/sym", "int8/channel:8/sym/hadamard", "K=int8/token/sym,V=raw"),
    *("sinks:1(int8/token/sym)", "sinks:1(raw)", "sinks:1(K=int8/group:9/sym/hadamard,V=bf16)", "sinks:2(fp16)"),
]


@st.composite
def few_plans(draw: Any) -> str:
    one, other = draw(st.sampled_from(FEW)), draw(st.sampled_from(FEW))
    return draw(
        st.sampled_from([one, f"layers(0-1/2:{one};1/2-1:{other})", f"layers(1:{other};0:{one})", f"layers(0-1:{one})"])
    )


@settings(max_examples=500)
@given(
    one=few_plans(),
    other=few_plans(),
    dims=st.tuples(*[st.sampled_from([7, 64])] * 2),
    dtype=st.sampled_from(["bfloat16", "float32"]),
)
def test_two_plans_have_one_text_when_they_store_the_same_and_only_then(
    one: str, other: str, dims: tuple[int, int], dtype: str
) -> None:
    spec = KVSpec(2, 1, dims[0], dtype, v_head_dim=dims[1], block_tokens=8)
    alike = [resolve(parse_plan(text), spec) for text in (one, other)]
    assert (canonical(alike[0]) == canonical(alike[1])) == (stored_as(alike[0], spec) == stored_as(alike[1], spec))


@settings(max_examples=300)
@given(text=st.one_of(garbage, nearly_plans()), spec=specs())
def test_any_text_is_a_plan_or_a_configuration_error(text: str, spec: KVSpec) -> None:
    with suppress(ConfigError):
        assert canonical_plan(canonical_plan(text, spec), spec) == canonical_plan(text, spec)


def header_of(spec: KVSpec, plan: str, body: bytes) -> BlockHeader:
    return BlockHeader(
        key=bytes(range(32)),
        rank=0,
        position=0,
        tokens=spec.block_tokens,
        codec=codec_for(plan, spec).number,
        plan=codec_for(plan, spec).plan,
        spec_digest=spec.digest,
        body_nbytes=len(body),
        checksum=xxhash.xxh3_64_intdigest(body),
    )


@given(case=specs_and_plans())
def test_a_header_and_the_spec_are_all_that_a_reader_needs(case: tuple[KVSpec, str]) -> None:
    spec, plan = case
    codec = codec_for(plan, spec)
    assert codec_of(header_of(spec, plan, bytes(codec.nbytes(0))), spec) is codec


@given(
    spec=specs(),
    codec=st.one_of(st.just(3), st.integers(0, 2**16 - 1)),
    plan=st.one_of(garbage, nearly_plans(), st.sampled_from(["sinks:1(" * 500, "layers(0:" * 500 + "raw" + ")" * 500])),
    digest=st.one_of(st.none(), st.binary(min_size=32, max_size=32)),
)
def test_any_header_names_a_codec_or_an_unknown_one(spec: KVSpec, codec: int, plan: str, digest: bytes | None) -> None:
    header = replace(header_of(spec, "raw", b""), codec=codec, plan=plan, spec_digest=digest or spec.digest)
    with suppress(UnknownCodec, CorruptPayload):
        found = codec_of(header, spec)
        assert codec == found.number
        assert found.spec.digest == header.spec_digest


PAYLOADS = {}


def payload_of(plan: str) -> bytes:
    if plan not in PAYLOADS:
        spec = KVSpec(2, 1, 16, "bfloat16", block_tokens=64)
        body = body_of(spec, plan, random_kv(spec, 64))
        PAYLOADS[plan] = header_of(spec, plan, body).pack() + body
    return PAYLOADS[plan]


@pytest.mark.parametrize("plan", [name for name in NAMED if name != "mixed"])
@given(data=st.data())
def test_payloads_that_were_cut_or_altered_are_corrupt(plan: str, data: Any) -> None:
    payload = payload_of(plan)
    assert verify_payload(payload).plan == codec_for(plan, KVSpec(2, 1, 16, "bfloat16", block_tokens=64)).plan
    bad = bytearray(payload)
    for _ in range(data.draw(st.integers(0, 3))):
        at = data.draw(st.one_of(st.integers(0, 200), st.integers(0, len(payload) - 1)))
        bad[at : at + data.draw(st.integers(0, 4))] = data.draw(st.binary(max_size=4))
    cut = bytes(bad[: data.draw(st.one_of(st.just(len(bad)), st.integers(0, len(bad))))])
    if cut[: len(payload)] == payload:
        assert verify_payload(cut) == verify_payload(payload)
        return
    with pytest.raises(CorruptPayload):
        verify_payload(cut)
