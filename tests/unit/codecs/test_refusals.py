"""What cannot be stored, and what only looks so."""

import numpy as np
import pytest

from kvtier.codecs import reference
from kvtier.codecs.plan import NAMED
from kvtier.codecs.registry import codec_for
from kvtier.spec import KVSpec
from kvtier.testing.kv import random_kv, same_bits, tokens_of, view_of
from tests.codec_cases import body_of, latent, layers_of

SCHEMES = [
    "int8/token/sym",
    "int8/tensor/asym",
    "int4/channel:2/asym",
    "int3/group:5/sym/clip",
    "int2/token/sym/hadamard/lloyd",
    "e4m3/channel:2/sym",
    "e5m2/token/asym/hadamard",
    "bf16",
    "fp16",
]


@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("place", [0, 31, 32, 63, 64, 79, 80])
def test_nan_and_inf_are_refused(scheme: str, value: float, place: int) -> None:
    """In whole units of 32 elements and behind the last."""
    values = np.ones((2, 81), np.float32)
    values[1, place] = value
    spec, layers = latent(values)
    assert body_of(spec, scheme, layers) is None


@pytest.mark.parametrize("most", [127, 7, 3, 1])
def test_magnitudes_that_no_float16_scale_reaches_are_refused(most: int) -> None:
    """65504 is the largest float16, and most steps reach `most` times that."""
    scheme = f"{ ({127: 'int8', 7: 'int4', 3: 'int3', 1: 'int2'}[most]) }/token/sym"
    largest = np.float32(most * 65504)
    spec, layers = latent([[largest]])
    assert body_of(spec, scheme, layers) is not None
    spec, layers = latent([[np.nextafter(largest, np.float32(np.inf))]])
    assert body_of(spec, scheme, layers) is None


def test_zero_points_are_not_below_the_least_float16() -> None:
    spec, layers = latent([[-65504.0, 1.0]])
    assert body_of(spec, "int8/token/asym", layers) is not None
    spec, layers = latent([[-65505.0, 1.0]])
    assert body_of(spec, "int8/token/asym", layers) is None


def test_fp16_holds_what_rounds_to_a_finite_float16() -> None:
    # 65520 lies in the middle between 65504 and 65536, which is infinite; ties go to even, and 65504 is odd.
    spec, layers = latent([[65519.0, -65519.0]])
    body = body_of(spec, "fp16", layers)
    assert layers_of(spec, "fp16", body)[0][0].tolist() == [[[65504.0, -65504.0]]]
    spec, layers = latent([[65520.0, 1.0]])
    assert body_of(spec, "fp16", layers) is None
    assert reference.encode(spec, "fp16", 0, layers) is None


def test_a_large_key_is_no_reason_to_refuse_the_value() -> None:
    spec = KVSpec(1, 1, 4, "float32", block_tokens=2)
    layers = [[np.full((2, 1, 4), 7e4, np.float32), np.ones((2, 1, 4), np.float32)]]
    assert body_of(spec, "K=int8/token/sym,V=fp16", layers) is not None
    layers[0][0][:] = 1e35
    assert body_of(spec, "K=bf16,V=int8/token/sym/hadamard", layers) is not None


@pytest.mark.parametrize("scheme", ["int8/token/sym", "int4/token/asym", "e4m3/tensor/sym", "e5m2/channel:2/asym"])
def test_sums_that_overflow_are_refused_wherever_inf_and_inf_cancel(scheme: str) -> None:
    """+-3e38 in the pattern of one row of the matrix: all but that row's sum become 0 or NaN, and NaN is no extreme."""
    for row in range(8):
        signs = [(-1) ** (i & row).bit_count() for i in range(8)]
        for zeros in range(256):
            values = [0 if zeros >> i & 1 else 3e38 * sign for i, sign in enumerate(signs)]
            spec, layers = latent([values, values])
            refused = zeros != 255
            assert (body_of(spec, f"{scheme}/hadamard", layers) is None) == refused


@pytest.mark.parametrize("plan", [name for name in NAMED if name not in ("raw", "layered", "mixed")])
def test_only_the_block_that_holds_it_is_refused(plan: str) -> None:
    spec = KVSpec(2, 2, 16, "bfloat16", block_tokens=64)
    codec, layers, numbers = codec_for(plan, spec), random_kv(spec, 3 * 64), np.arange(3)
    layers[0][1][64 + 63, 1, 15] = 0x7F80
    offsets = np.array([0, codec.nbytes(0), codec.nbytes(0) + codec.nbytes(1)])
    memory = np.zeros(offsets[2] + codec.nbytes(2), np.uint8)
    stored = codec.encode(view_of(spec, layers), 64 * numbers, memory, offsets, numbers, range(2))
    assert stored.tolist() == [True, False, True]
    for i in (0, 2):
        body = memory[offsets[i] : offsets[i] + codec.nbytes(i)].tobytes()
        assert body == body_of(spec, plan, tokens_of(layers, 64 * i, 64), i)


@pytest.mark.parametrize("bits", [0x7F80, 0x7FC0, 0xFFFF, 0xFF80])
def test_exact_tokens_hold_any_bits(bits: int) -> None:
    """In the first block of a sequence only: there, and nowhere else, they are exact."""
    spec, plan = KVSpec(2, 2, 16, "bfloat16", block_tokens=64), "sinks:3(K=int4/channel:16/asym,V=int4/token/asym)"
    layers = random_kv(spec, 64)
    layers[1][0][2, 1, 7] = bits
    body = body_of(spec, plan, layers, 0)
    out = layers_of(spec, plan, body, 0)
    assert same_bits([[part[:3] for part in y] for y in out], [[part[:3] for part in y] for y in layers])
    for position in (1, 2, 1000):
        assert body_of(spec, plan, layers, position) is None
