"""Hard rows, with the expected numbers worked out by hand."""

import numpy as np
import pytest

from kvtier.codecs.int8 import Int8Codec
from kvtier.codecs.view import KVView
from kvtier.spec import KVSpec

codec = Int8Codec()
START = np.array([0])


def encoded(row: list[float], dtype: str = "float32") -> tuple[bool, list[int], float, list[float]]:
    """Whether one row is stored, its codes, its scale, and what decoding gives."""
    spec = KVSpec(1, 1, len(row), dtype, block_tokens=1, mla=True)
    kv = np.array([[row]], np.float16 if dtype == "float16" else np.float32)
    memory = np.empty(codec.nbytes(spec, 0), np.uint8)
    stored = codec.encode(spec, KVView.of(kv, spec), START, memory, START, range(1))
    out = np.zeros_like(kv)
    codec.decode(spec, memory, START, KVView.of(out, spec), START, range(1))
    n = len(row)
    codes, scale = memory[:n].view(np.int8).tolist(), float(memory[n : n + 2].copy().view(np.float16)[0])
    return bool(stored[0]), codes, scale, out[0, 0].tolist()


def test_layer_nbytes_is_codes_scales_and_padding() -> None:
    # 8 tokens x 2 heads: K 16 x (64 + 2), V 16 x (32 + 2), 1600 = 25 x 64
    assert codec.layer_nbytes(KVSpec(3, 2, 64, "bfloat16", v_head_dim=32, block_tokens=8), 0) == 1600
    # one code and one scale: 3 bytes, padded
    assert codec.layer_nbytes(KVSpec(1, 1, 1, "bfloat16", block_tokens=1, mla=True), 0) == 64


def test_a_row_whose_scale_is_a_float16() -> None:
    assert encoded([127.0, -127.0, 1.0, 0.5, 1.5, 0.0]) == (True, [127, -127, 1, 0, 2, 0], 1.0, [127, -127, 1, 0, 2, 0])


def test_a_scale_is_rounded_up_to_a_float16() -> None:
    # 128 / 127 = 1.00787...; float16 has steps of 1/1024 there: 1.0087890625 is the next above 1.0078125
    stored, codes, scale, _ = encoded([128.0])
    assert (stored, codes, scale) == (True, [127], 1.0087890625)


def test_zeros_come_back_as_zeros() -> None:
    assert encoded([0.0, -0.0, 0.0]) == (True, [0, 0, 0], 0.0, [0.0, 0.0, 0.0])


def test_a_constant_row_comes_back_within_half_a_scale() -> None:
    _, codes, scale, out = encoded([0.3] * 5)
    assert codes == [127] * 5
    assert all(abs(x - 0.3) <= scale / 2 for x in out)


def test_an_outlier_leaves_zeros_beside_it() -> None:
    assert encoded([12700.0, 49.0, 51.0]) == (True, [127, 0, 1], 100.0, [12700.0, 0.0, 100.0])


@pytest.mark.parametrize("value", [1e-45, 1e-30, 2.0**-26])
def test_values_below_the_smallest_scale_come_back_as_zero(value: float) -> None:
    stored, codes, scale, out = encoded([value, -value])
    assert (stored, codes, scale, out) == (True, [0, 0], 2.0**-24, [0.0, 0.0])


def test_small_rows_use_subnormal_scales() -> None:
    # 200 * 2**-24 / 127 = 1.57 * 2**-24, rounded up to 2 * 2**-24
    assert encoded([200 * 2.0**-24, 2.0**-23]) == (True, [100, 1], 2.0**-23, [200 * 2.0**-24, 2.0**-23])


def test_the_largest_float16_does_not_become_infinity() -> None:
    # 65504 / 127 = 515.78, rounded up to 516: 127 * 516 = 65532 would round to infinity; so 515.5
    stored, codes, scale, out = encoded([65504.0, -65504.0], "float16")
    assert (stored, codes, scale, out) == (True, [127, -127], 515.5, [65472.0, -65472.0])


def test_magnitudes_that_no_float16_scale_reaches_are_refused() -> None:
    assert encoded([127 * 65504.0])[0]
    assert not encoded([float(np.nextafter(np.float32(127 * 65504.0), np.float32(np.inf)))])[0]


@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("place", [0, 63, 64, 79, 80])
def test_nan_and_inf_are_refused(value: float, dtype: str, place: int) -> None:
    row = [1.0] * 81
    row[place] = value
    assert not encoded(row, dtype)[0]


def test_scales_that_are_not_numbers_decode_to_nan_and_do_not_raise() -> None:
    spec = KVSpec(1, 1, 16, "bfloat16", block_tokens=1, mla=True)
    for bits in (0x7C00, 0xFC00, 0x7FFF, 0xFFFF):
        body = np.zeros(codec.nbytes(spec, 0), np.uint8)
        body[:16] = np.arange(16)
        body[16:18] = np.array([bits], np.uint16).view(np.uint8)
        out = np.zeros((1, 1, 16), np.uint16)
        codec.decode(spec, body, START, KVView.of(out, spec), START, range(1))
        assert ((out & 0x7FFF) > 0x7F80).all()
