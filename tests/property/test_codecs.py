"""Every kernel against the numpy specification, bit for bit, over plans, shapes, strides, dtypes and hard values."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.codecs import reference
from kvtier.codecs.cpu import codec as cpu
from kvtier.codecs.layout import Field, Kind
from kvtier.codecs.registry import codec_for
from kvtier.testing.kv import ones_like, same_bits
from tests.codec_cases import SEEDS, Case, any_cases, common_cases, held

ALWAYS, NEVER = 0, 1 << 40
"""Bytes from which on a call writes past the cache."""
OFFSET = 13
FINITE = {Kind.E4M3: 0x7E, Kind.E5M2: 0x7B}
"""Of floats of 8 bits, the code of the largest; those above it are no numbers."""


def spoil(codec: Any) -> None:
    """Fill the rows that kernels work in: what they held before must not matter."""
    codec._shape.rows()
    codec._shape._local.rows.fill(np.nan)


def encoded(case: Case, streaming: int) -> bytes | None:
    """The body that the kernel makes; None if it refuses."""
    codec, at = codec_for(case.plan, case.spec), np.array([case.start])
    memory = np.full(codec.nbytes(case.position) + 2 * OFFSET, 0xA5, np.uint8)
    kv, every = held(case.spec, case.layers, case.how), range(case.spec.layers)
    spoil(codec)
    with patch.object(cpu, "STREAMING_NBYTES", streaming):
        stored = codec.encode(kv.view(), at, memory, np.array([OFFSET]), np.array([case.position]), every)
    assert (memory[:OFFSET] == 0xA5).all()
    assert (memory[-OFFSET:] == 0xA5).all()
    return memory[OFFSET:-OFFSET].tobytes() if stored[0] else None


def decoded(case: Case, body: bytes, streaming: int) -> list[list[np.ndarray]]:
    """Ones, with the block's tokens read from a body; `case.block` has those."""
    codec, memory = codec_for(case.plan, case.spec), np.frombuffer(bytes(OFFSET) + body, np.uint8)
    kv = held(case.spec, ones_like(case.layers), case.how)
    spoil(codec)
    with patch.object(cpu, "STREAMING_NBYTES", streaming):
        where = np.array([case.position])
        codec.decode(memory, np.array([OFFSET]), where, kv.view(), np.array([case.start]), range(case.spec.layers))
    return kv.contiguous()


def check(case: Case) -> None:
    """Both ways, past the cache and through it."""
    want = reference.encode(case.spec, case.plan, case.position, case.block(case.layers))
    assert encoded(case, ALWAYS) == want
    assert encoded(case, NEVER) == want
    if want is None:
        return
    assert len(want) == codec_for(case.plan, case.spec).nbytes(case.position)
    layers = reference.decode(case.spec, case.plan, case.position, want)
    for streaming in (ALWAYS, NEVER):
        got = decoded(case, want, streaming)
        assert same_bits(case.block(got), layers)
        for layer in got:
            for part in layer:
                assert (part[: case.start] == 1).all()
                assert (part[case.start + case.spec.block_tokens :] == 1).all()


@settings(max_examples=400)
@given(case=any_cases())
def test_kernels_do_what_the_specification_says(case: Case) -> None:
    check(case)


@settings(max_examples=150)
@given(case=common_cases())
def test_kernels_that_skip_the_row_do_too(case: Case) -> None:
    """They decode the commonest codes straight into whole cache lines."""
    check(case)


@settings(max_examples=150)
@given(case=st.one_of(any_cases(), common_cases()), seed=SEEDS)
def test_any_codes_decode_as_the_specification_says(case: Case, seed: int) -> None:
    """Also those that no encoder writes, under any scales that are finite."""
    codec = codec_for(case.plan, case.spec)
    body = np.random.default_rng(seed).integers(0, 256, codec.nbytes(case.position), np.uint8)
    for row in codec.layouts[case.position > 0].table.reshape(-1, len(Field)):
        if row[Field.KIND] == Kind.RAW:
            continue
        part = body[row[Field.OFFSET] : row[Field.OFFSET] + row[Field.END]]
        codes = part[row[Field.CODES] : row[Field.SCALES] or None]
        if row[Field.KIND] in (Kind.FP16, Kind.BF16):
            codes[1::2] &= 0xBF
        elif row[Field.KIND] in FINITE:
            codes[(codes & 0x7F) > FINITE[row[Field.KIND]]] &= 0xBF
        part[row[Field.SCALES] + 1 :: 2] &= 0xBF if row[Field.SCALES] else 0xFF
    layers = reference.decode(case.spec, case.plan, case.position, body.tobytes())
    assert same_bits(case.block(decoded(case, body.tobytes(), ALWAYS)), layers)
    assert same_bits(case.block(decoded(case, body.tobytes(), NEVER)), layers)
