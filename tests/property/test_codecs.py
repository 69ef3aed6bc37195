"""Every kernel against the numpy specification, bit for bit, over shapes, strides, dtypes and hard rows."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvtier.codecs import int8, raw, reference
from kvtier.codecs.int8 import Int8Codec
from kvtier.codecs.raw import RawCodec
from kvtier.codecs.view import KVView
from kvtier.spec import KVSpec
from kvtier.testing.codec import random_kv

DIMS = st.sampled_from([1, 2, 7, 16, 33, 64, 80, 128, 200, 2100])
ROUNDOFF = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 0.0}


@st.composite
def specs(draw: Any) -> KVSpec:
    dtype = draw(st.sampled_from(["bfloat16", "float16", "float32"]))
    layers, tokens = draw(st.integers(1, 3)), draw(st.integers(1, 6))
    if draw(st.booleans()):
        return KVSpec(layers, 1, draw(DIMS), dtype, block_tokens=tokens, mla=True)
    return KVSpec(layers, draw(st.integers(1, 3)), draw(DIMS), dtype, v_head_dim=draw(DIMS), block_tokens=tokens)


def dense(part: np.ndarray) -> np.ndarray:
    return part.copy()


def heads_first(part: np.ndarray) -> np.ndarray:
    """As transformers keeps it: `[1, heads, seq, dim]`, looked at as `[seq, heads, dim]`."""
    return part.transpose(1, 0, 2)[None].copy()[0].transpose(1, 0, 2)


def every_other_element(part: np.ndarray) -> np.ndarray:
    wide = np.repeat(part, 2, axis=2)
    return wide[:, :, ::2]


def backwards(part: np.ndarray) -> np.ndarray:
    return part[::-1, ::-1, ::-1].copy()[::-1, ::-1, ::-1]


def unaligned(part: np.ndarray) -> np.ndarray:
    room = np.zeros(part.nbytes + 64, np.uint8)
    start = -room.ctypes.data % 64 + 6
    out = room[start : start + part.nbytes].view(part.dtype).reshape(part.shape)
    out[:] = part
    return out


def paged(part: np.ndarray) -> np.ndarray:
    """Tokens further apart than their heads are long."""
    room = np.zeros((part.shape[0], part.shape[1] + 2, part.shape[2]), part.dtype)
    room[:, 1:-1] = part
    return room[:, 1:-1]


LAYOUTS = st.sampled_from([dense, heads_first, every_other_element, backwards, unaligned, paged])


@st.composite
def cases(draw: Any) -> tuple[KVSpec, list[list[np.ndarray]], int]:
    """A spec, KV whose rows have magnitudes from denormal to near the end of the dtype, and where the block begins."""
    spec, layout = draw(specs()), draw(LAYOUTS)
    seed, start = draw(st.integers(0, 2**32 - 1)), draw(st.integers(0, 3))
    generator = np.random.default_rng(seed)
    top = 15.9 if spec.dtype == "float16" else 22.9
    layers = []
    for layer in random_kv(spec, start + spec.block_tokens + draw(st.integers(0, 2)), seed):
        parts = []
        for part in layer:
            values = np.clip(reference.to_float32(spec.dtype, part), -1, 1)
            values *= np.exp2(generator.uniform(-45, top, (*part.shape[:2], 1))).astype(np.float32)
            kind = generator.integers(0, 5, part.shape[:2])
            values[kind == 0] = 0
            values[kind == 1] = values[kind == 1][:, :1]
            values[kind == 2] *= np.where(np.arange(part.shape[2]) == 0, 1, np.float32(1e-4))
            parts.append(layout(reference.from_float32(spec.dtype, values)))
        layers.append(parts)
    return spec, layers, start


def view_of(spec: KVSpec, layers: list[list[np.ndarray]]) -> KVView:
    return KVView.of([layer[0] if spec.mla else layer for layer in layers], spec)


def block(spec: KVSpec, layers: list[list[np.ndarray]], start: int) -> list[list[np.ndarray]]:
    return [[part[start : start + spec.block_tokens] for part in layer] for layer in layers]


@pytest.fixture(params=[0, 1 << 40], ids=["streaming", "cached"], scope="module", autouse=True)
def store(request: pytest.FixtureRequest) -> Any:
    with patch.object(raw, "STREAMING_NBYTES", request.param), patch.object(int8, "STREAMING_NBYTES", request.param):
        yield


@pytest.mark.parametrize("codec", [RawCodec(), Int8Codec()], ids=["raw", "int8"])
@given(case=cases())
def test_kernels_do_what_the_specification_says(codec: Any, case: Any) -> None:
    spec, layers, start = case
    every, offset = range(spec.layers), 13
    memory = np.full(codec.nbytes(spec, 0) + 2 * offset, 0xA5, np.uint8)
    at, where = np.array([start]), np.array([offset])
    assert codec.encode(spec, view_of(spec, layers), at, memory, where, every).all()
    parts = block(spec, layers, start)
    want = reference.encode_raw(parts) if codec.number == 1 else reference.encode_int8(spec.dtype, parts)
    assert memory[offset:-offset].tobytes() == want

    for layer in layers:
        for part in layer:
            part[:] = 1
    codec.decode(spec, memory, where, view_of(spec, layers), at, every)
    decode = reference.decode_raw if codec.number == 1 else reference.decode_int8
    for got, expected in zip(layers, decode(spec, want), strict=True):
        for a, b in zip(got, expected, strict=True):
            inside = a[start : start + spec.block_tokens]
            assert np.array_equal(np.ascontiguousarray(inside).view(np.uint8), np.ascontiguousarray(b).view(np.uint8))
            assert (a[:start] == 1).all()
            assert (a[start + spec.block_tokens :] == 1).all()


@given(case=cases())
def test_int8_stays_within_its_bound(case: Any) -> None:
    spec, layers, start = case
    codec, every = Int8Codec(), range(spec.layers)
    memory, at, where = np.empty(codec.nbytes(spec, 0), np.uint8), np.array([start]), np.array([0])
    codec.encode(spec, view_of(spec, layers), at, memory, where, every)
    before = [[reference.to_float32(spec.dtype, p).astype(np.float64) for p in y] for y in block(spec, layers, start)]
    codec.decode(spec, memory, where, view_of(spec, layers), at, every)
    after = [[reference.to_float32(spec.dtype, p).astype(np.float64) for p in y] for y in block(spec, layers, start)]
    for x, y in zip(before, after, strict=True):
        for one, other in zip(x, y, strict=True):
            largest = np.abs(one).max(axis=-1, keepdims=True)
            scale = largest / 127 * (1 + 2.0**-10) + 2.0**-24
            bound = (0.5 + 2.0**-15) * scale + 127 * ROUNDOFF[spec.dtype] * scale
            assert (np.abs(one - other) <= bound).all()
            assert (other[np.broadcast_to(largest == 0, other.shape)] == 0).all()


@given(spec=specs(), seed=st.integers(0, 2**32 - 1), kind=st.sampled_from(["nan", "-nan", "inf", "-inf", "too large"]))
def test_int8_says_no_to_the_block_and_only_to_that(spec: KVSpec, seed: int, kind: str) -> None:
    if kind == "too large" and spec.dtype == "float16":
        return
    generator = np.random.default_rng(seed)
    layers = random_kv(spec, 3 * spec.block_tokens, seed)
    part = layers[generator.integers(spec.layers)][generator.integers(len(spec.head_dims))]
    bad = np.float32(8.4e6) if kind == "too large" else np.float32(kind)
    token = spec.block_tokens + generator.integers(spec.block_tokens)
    place = token, generator.integers(part.shape[1]), generator.integers(part.shape[2])
    part[place] = (bad.view(np.uint32) >> 16) if spec.dtype == "bfloat16" else bad if part.dtype == np.float32 else 0
    if spec.dtype == "float16":
        part.view(np.float16)[place] = np.float16(bad)
    codec, starts = Int8Codec(), np.arange(3) * spec.block_tokens
    size = codec.nbytes(spec, 0)
    memory, offsets = np.zeros(3 * size, np.uint8), np.arange(3) * size
    stored = codec.encode(spec, view_of(spec, layers), starts, memory, offsets, range(spec.layers))
    assert stored.tolist() == [True, False, True]
    assert reference.encode_int8(spec.dtype, block(spec, layers, spec.block_tokens)) is None


@given(bits=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=64))
def test_raw_keeps_every_bit(bits: list[int]) -> None:
    values = np.array(bits, np.uint32).view(np.float32)[:, None, None]
    spec, codec = KVSpec(1, 1, 1, "float32", block_tokens=len(bits)), RawCodec()
    memory, none = np.empty(codec.nbytes(spec, 0), np.uint8), np.array([0])
    codec.encode(spec, KVView.of([(values, values)], spec), none, memory, none, range(1))
    out = np.zeros_like(values), np.zeros_like(values)
    codec.decode(spec, memory, none, KVView.of([out], spec), none, range(1))
    assert all(np.array_equal(part.view(np.uint32), values.view(np.uint32)) for part in out)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@given(scale=st.integers(0, 0x7BFF), sign=st.booleans())
def test_decoding_rounds_as_torch_rounds(dtype: str, scale: int, sign: bool) -> None:
    """All codes times one scale: torch's own conversion of the exact product is the oracle."""
    spec, codec = KVSpec(1, 1, 256, dtype, block_tokens=1, mla=True), Int8Codec()
    body = np.zeros(codec.nbytes(spec, 0), np.uint8)
    body[:256] = np.arange(256)
    body[256:258] = np.array([scale | (0x8000 if sign else 0)], np.uint16).view(np.uint8)
    out = torch.zeros(1, 1, 256, dtype=getattr(torch, dtype))
    codec.decode(spec, body, np.array([0]), KVView.of(out, spec), np.array([0]), range(1))
    codes = torch.arange(256, dtype=torch.uint8).view(torch.int8).to(torch.float32)
    factor = torch.from_numpy(body[256:258].copy().view(np.float16)).to(torch.float32)
    exact = (codes * factor).to(out.dtype)
    assert torch.equal(out[0, 0].view(torch.int16), exact.view(torch.int16))
