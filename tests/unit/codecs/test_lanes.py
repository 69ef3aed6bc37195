"""Rounding to and from 16 bits over every bit pattern; numpy's float16 and torch's bfloat16 are the oracles."""

import numpy as np
import pytest
import torch
from llvmlite import ir

from kvtier.codecs.cpu import lanes
from kvtier.codecs.cpu.intrinsics import HALF, WORD
from tests.unit.codecs.emitted import emitted


def converted(stored: np.ndarray, convert: object, item: object, out: np.ndarray) -> np.ndarray:
    return emitted(convert, item, stored, out, 16)


EVERY = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16)
NEAR = (EVERY.astype(np.uint32)[:, None] << 16) + np.array([0, 1, 0x0FFF, 0x1000, 0x1001, 0x7FFF, 0x8000, 0x8001], "u4")
FLOATS = NEAR.reshape(-1).view(np.float32)
FINITE = FLOATS[np.isfinite(FLOATS)]
FINITE = FINITE[: FINITE.size // 16 * 16].copy()


@pytest.fixture(params=[True, False], ids=["instructions", "integers"])
def half_instructions(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param and not lanes.HALF_INSTRUCTIONS:
        pytest.skip("this CPU has no float16 instructions")
    monkeypatch.setattr(lanes, "HALF_INSTRUCTIONS", request.param)


@pytest.mark.usefixtures("half_instructions")
def test_float16_is_widened_exactly() -> None:
    got = converted(EVERY, lanes._widen_fp16, HALF, np.zeros(EVERY.size, np.float32))
    want = EVERY.view(np.float16).astype(np.float32)
    numbers = ~np.isnan(want)
    assert np.array_equal(got.view(np.uint32)[numbers], want.view(np.uint32)[numbers])
    assert np.isnan(got[~numbers]).all()


@pytest.mark.usefixtures("half_instructions")
def test_float16_is_rounded_as_numpy_rounds_and_ends_at_its_largest() -> None:
    got = converted(FINITE, lanes._narrow_fp16, ir.FloatType(), np.zeros(FINITE.size, np.uint16))
    assert np.array_equal(got, np.clip(FINITE, -65504, 65504).astype(np.float16).view(np.uint16))


def test_bfloat16_is_rounded_as_torch_rounds() -> None:
    got = converted(FINITE, lanes._narrow_bf16, ir.FloatType(), np.zeros(FINITE.size, np.uint16))
    want = torch.from_numpy(FINITE).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    assert np.array_equal(got, want)


def test_bfloat16_is_widened_exactly() -> None:
    got = converted(EVERY, lanes._widen_bf16, HALF, np.zeros(EVERY.size, np.float32))
    assert np.array_equal(got.view(np.uint32) >> 16, EVERY)


@pytest.mark.parametrize("size", [4, 8, 16])
@pytest.mark.parametrize("features", [lanes.FEATURES, set()], ids=["as it is", "plain"])
def test_tables_are_looked_up_whatever_the_cpu_has(size: int, features: set, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "FEATURES", features)
    table = np.random.default_rng(size).standard_normal(size, np.float32)
    places = np.random.default_rng(0).integers(0, size, 320).astype(np.uint32)
    got = emitted(lambda b, v: lanes.look_up(b, table, v), WORD, places, np.zeros(320, np.float32), 32)
    assert np.array_equal(got, table[places])
