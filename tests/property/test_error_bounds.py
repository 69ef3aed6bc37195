"""How far off an element may be: the bounds that `PlanCodec` states, worked out in float64 from groups' extremes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.codecs import reference
from kvtier.codecs.codebook import LEVELS
from kvtier.codecs.scheme import FLOATS, INTS, Scheme
from kvtier.spec import KVSpec
from kvtier.testing.kv import Layers
from tests.codec_cases import DTYPES, SEEDS, body_of, hard_kv, latent, layers_of, schemes, specs, there_and_back

ROUNDOFF = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 0.0}
FLOAT32 = 2.0**-24
UP = 1 + 2.0**-9
"""What rounding up to a float16 may add to a scale, and what the arithmetic does besides."""
LEAST = 2.0**-24
"""The least float16."""
RELATIVE, SMALLEST = {"e4m3": 2.0**-4, "e5m2": 2.0**-3}, {"e4m3": 2.0**-10, "e5m2": 2.0**-17}
LARGEST = {"e4m3": 448.0, "e5m2": 57344.0}
ROTATING = 2.0**-19
"""What rotating there and back adds, of a row's length."""

FLOAT16 = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float64)
FLOAT16 = np.unique(FLOAT16[np.isfinite(FLOAT16)])

Doubles = np.ndarray


def groups(scheme: Scheme, shape: tuple[int, ...]) -> np.ndarray:
    """For each element the number of the group that it shares a scale with."""
    token, head, channel = np.indices(shape)
    if scheme.granularity == "tensor":
        return 0 * token
    if scheme.granularity == "channel":
        token = token // scheme.group
    else:
        channel = channel // (scheme.group or shape[2])
    return np.ravel_multi_index((token, head, channel), shape)


def spread(reduce: Any, values: Doubles, group: np.ndarray) -> Doubles:
    """A reduction over each group, for each element."""
    out = np.full(group.max() + 1, 0.0 if reduce is np.add else np.nan)
    if reduce is not np.add:
        out[group.ravel()] = values.ravel()
    reduce.at(out, group.ravel(), values.ravel())
    return out[group]


def rotated(values: Doubles, size: int) -> Doubles:
    """By the Hadamard matrix that Sylvester's construction gives, along each run of `size` channels."""
    matrix = np.ones((1, 1))
    while len(matrix) < size:
        matrix = np.kron(np.array([[1, 1], [1, -1]]), matrix)
    return (values.reshape(-1, size) @ matrix / np.sqrt(size)).reshape(values.shape)


def lengths(values: Doubles, size: int) -> Doubles:
    return np.sqrt((values.reshape(-1, size) ** 2).sum(axis=1))


def below(values: Doubles) -> Doubles:
    """The greatest float16 that is not above each value."""
    return FLOAT16[np.searchsorted(FLOAT16, values, "right") - 1]


def bound_of(scheme: Scheme, values: Doubles, loose: Doubles) -> Doubles:
    """Of each element, before it is rounded to the KV's dtype; extremes are known up to `loose`."""
    group = groups(scheme, values.shape)
    a, b = spread(np.minimum, values - loose, group), spread(np.maximum, values + loose, group)
    if scheme.integer:
        steps = 2.0 ** (scheme.bits - 1) - 1 if scheme.symmetric else 2.0**scheme.bits - 1
        reach = np.maximum(abs(a), abs(b)) if scheme.symmetric else b - below(a)
        return (0.5 + 2.0**-14) * (reach / steps * UP + LEAST)
    middle = 0 * a if scheme.symmetric else (a + b) / 2
    off = 2.0**-11 * abs(middle) + LEAST
    reach = np.maximum(abs(a - middle), abs(b - middle)) + (0 if scheme.symmetric else off)
    scale = reach / LARGEST[scheme.precision] * UP + LEAST
    size = abs(values - middle) + loose + (0 if scheme.symmetric else off)
    return np.maximum(RELATIVE[scheme.precision] * UP * size, SMALLEST[scheme.precision] * UP * scale)


def doubles(spec: KVSpec, layers: Layers) -> list[Doubles]:
    return [reference.to_float32(spec.dtype, part).astype(np.float64) for layer in layers for part in layer]


def rounding(spec: KVSpec, after: Doubles) -> Doubles:
    """What the last rounding may add: to float32, then to the KV's dtype, whose steps end at the least float16."""
    return (ROUNDOFF[spec.dtype] + FLOAT32) * abs(after) + (LEAST / 2 if spec.dtype == "float16" else 0)


@st.composite
def blocks(draw: Any, dtypes: Any = DTYPES) -> tuple[KVSpec, Layers]:
    spec = draw(specs(dtypes))
    top = 15.9 if spec.dtype == "float16" else draw(st.sampled_from([3.0, 15.9, 22.9]))
    return spec, hard_kv(spec, spec.block_tokens, draw(SEEDS), top)


@settings(max_examples=300)
@given(block=blocks(), data=st.data())
def test_elements_are_no_further_off_than_their_groups_bound(block: tuple[KVSpec, Layers], data: Any) -> None:
    spec, layers = block
    text = data.draw(schemes(spec.block_tokens, (*INTS, *FLOATS)))
    text = text.replace("/hadamard", "").replace("/lloyd", "").replace("/clip", "")
    body = body_of(spec, text, layers, 1)
    if body is None:
        return
    for x, y in zip(doubles(spec, layers), doubles(spec, layers_of(spec, text, body, 1)), strict=True):
        assert (abs(x - y) <= bound_of(Scheme.parse(text), x, 0 * x) + rounding(spec, y)).all()


@settings(max_examples=50)
@given(
    seed=SEEDS,
    scheme=st.sampled_from(["int8/token/asym", "int4/token/asym", "int4/group:8/asym", "int3/tensor/asym"]),
    around=st.floats(0.5, 60000, width=16),
)
def test_groups_that_are_narrow_and_far_from_zero_are_off_by_float32s_own_rounding(
    seed: int, scheme: str, around: float
) -> None:
    """Their scale may be finer than float32 is there."""
    generator = np.random.default_rng(seed)
    values = around * (1 + generator.random((4, 34)) * 2.0 ** -generator.uniform(8, 22, (4, 1)))
    spec, layers = latent(values)
    (x,), (y,) = doubles(spec, layers), doubles(spec, there_and_back(spec, scheme, layers, 1))
    assert (abs(x - y) <= bound_of(Scheme.parse(scheme), x, 0 * x) + rounding(spec, y)).all()


@settings(max_examples=200)
@given(block=blocks(), data=st.data())
def test_rotated_rows_are_no_further_off_than_their_rotations_bound(block: tuple[KVSpec, Layers], data: Any) -> None:
    """Euclidean length, which rotating leaves alone."""
    spec, layers = block
    plain = data.draw(schemes(spec.block_tokens, (*INTS, *FLOATS)))
    plain = plain.replace("/hadamard", "").replace("/lloyd", "").replace("/clip", "")
    scheme, text = Scheme.parse(plain), f"{plain}/hadamard"
    body = body_of(spec, text, layers, 1)
    if body is None:
        return
    for x, y in zip(doubles(spec, layers), doubles(spec, layers_of(spec, text, body, 1)), strict=True):
        size = x.shape[2] & -x.shape[2]
        loose = np.repeat(ROTATING * lengths(x, size), size).reshape(x.shape)
        bound = bound_of(scheme, rotated(x, size), loose)
        off = lengths(bound, size) + ROTATING * lengths(x, size) + lengths(rounding(spec, y), size)
        assert (lengths(x - y, size) <= off).all()


@settings(max_examples=150)
@given(block=blocks(), bits=st.sampled_from([2, 3, 4]))
def test_levels_are_no_further_off_than_the_nearest_at_the_rows_own_size(
    block: tuple[KVSpec, Layers], bits: int
) -> None:
    spec, layers = block
    text = f"int{bits}/token/sym/hadamard/lloyd"
    body = body_of(spec, text, layers, 1)
    if body is None:
        return
    level = np.concatenate([-LEVELS[bits][::-1], LEVELS[bits]]).astype(np.float64)
    for x, y in zip(doubles(spec, layers), doubles(spec, layers_of(spec, text, body, 1)), strict=True):
        dim, turned = x.shape[2], rotated(x, x.shape[2] & -x.shape[2])
        size = lengths(turned, dim) / np.sqrt(dim)
        scaled = turned / np.repeat(size + (size == 0), dim).reshape(x.shape)
        nearest = level[np.abs(scaled[..., None] - level).argmin(axis=-1)]
        at_size = lengths(turned - nearest * np.repeat(size, dim).reshape(x.shape), dim)
        # With a the angle between the row and its levels, |x| sin(a) is the least that any scale can be off, so at most
        # `at_size`; with the row's own length it is 2 |x| sin(a / 2) = |x| sin(a) / cos(a / 2), and a is at most 90
        # degrees, as no level has another sign than its element. A float16 is next to that scale.
        rounded = 2.0**-11 * lengths(x, dim) + LEAST / 2 * lengths(nearest, dim)
        off = np.sqrt(2) * at_size + rounded + ROTATING * lengths(x, dim) + lengths(rounding(spec, y), dim)
        assert (lengths(x - y, dim) <= off * (1 + 2.0**-20) + 2.0**-40).all()
        off = rounded + ROTATING * lengths(x, dim) + lengths(rounding(spec, y), dim) + 2.0**-40
        ends = (abs(y) == 65504).reshape(-1, dim).any(axis=1) & (spec.dtype == "float16")
        assert (ends | (abs(lengths(x, dim) - lengths(y, dim)) <= off)).all(), "a row keeps its length"


@settings(max_examples=150)
@given(block=blocks(st.just("float32")), data=st.data())
def test_a_clipped_range_has_the_squared_error_of_the_whole_one_at_most(
    block: tuple[KVSpec, Layers], data: Any
) -> None:
    spec, layers = block
    plain = data.draw(schemes(spec.block_tokens, tuple(INTS)).filter(lambda s: "tensor" not in s and "lloyd" not in s))
    plain = plain.removesuffix("/clip")
    scheme = Scheme.parse(plain)
    if body_of(spec, plain, layers, 1) is None:
        assert body_of(spec, f"{plain}/clip", layers, 1) is None
        return
    whole, clipped = (doubles(spec, there_and_back(spec, text, layers, 1)) for text in (plain, f"{plain}/clip"))
    for x, y, z in zip(doubles(spec, layers), whole, clipped, strict=True):
        size = x.shape[2] & -x.shape[2] if scheme.hadamard else 1
        group = groups(scheme, x.shape)
        one, other = (spread(np.add, rotated(x - each, size) ** 2, group) for each in (z, y))
        noise = ROTATING * np.repeat(lengths(x, size), size).reshape(x.shape)
        noise = np.sqrt(spread(np.add, noise**2, group))
        assert (np.sqrt(one) <= np.sqrt(other) * (1 + 2.0**-12) + 2 * noise).all()


@given(block=blocks(), sixteen=st.sampled_from(["fp16", "bf16"]))
def test_16_bits_are_rounded_once_and_then_to_the_dtype(block: tuple[KVSpec, Layers], sixteen: str) -> None:
    spec, layers = block
    body = body_of(spec, sixteen, layers, 1)
    if body is None:
        assert sixteen == "fp16"
        assert max(abs(x).max() for x in doubles(spec, layers)) >= 65520
        return
    for x, y in zip(doubles(spec, layers), doubles(spec, layers_of(spec, sixteen, body, 1)), strict=True):
        once = 2.0**-11 * abs(x) + LEAST / 2 if sixteen == "fp16" else 2.0**-8 * abs(x)
        assert (abs(x - y) <= once + rounding(spec, y)).all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("precision", [*INTS, *FLOATS])
@pytest.mark.parametrize("rest", ["tensor/sym", "token/asym", "channel:3/sym", "channel:3/asym", "group:4/asym"])
def test_zeros_come_back_as_zeros(dtype: str, precision: str, rest: str) -> None:
    spec = KVSpec(1, 2, 10, dtype, block_tokens=5)
    layers = [[np.zeros((5, 2, 10), np.float32 if dtype == "float32" else np.uint16) for _ in range(2)]]
    layers[0][0][2:, :, 3:] = 0x8000 if dtype != "float32" else -0.0
    for part in there_and_back(spec, f"{precision}/{rest}", layers, 1)[0]:
        assert not part.any(), "and without a sign"


@settings(max_examples=100)
@given(data=st.data(), precision=st.sampled_from(list(INTS)), seed=SEEDS, exponent=st.integers(-10, 8))
def test_multiples_of_a_scale_come_back_as_they_were(data: Any, precision: str, seed: int, exponent: int) -> None:
    """Zero point + code * scale, where the group spans all the codes and every value is one of the dtype."""
    bits, scale = INTS[precision], 2.0**exponent
    symmetric = data.draw(st.booleans())
    generator = np.random.default_rng(seed)
    low, high = (1 - 2 ** (bits - 1), 2 ** (bits - 1) - 1) if symmetric else (0, 2**bits - 1)
    codes = generator.integers(low, high + 1, (6, 2, 34))
    # Both ends in every channel of three tokens, and in every 32 channels of a token.
    ends = np.where(np.arange(34) % 2, high, low)
    codes[[0, 3]], codes[[1, 4]] = ends, low + high - ends
    codes[[2, 5], :, :2] = codes[[2, 5], :, 32:] = ends[:2]
    dtype = data.draw(st.sampled_from(["bfloat16", "float16", "float32"]))
    zero = 0 if symmetric else -int(generator.integers(0, 2**bits))
    spec = KVSpec(1, 2, 34, dtype, block_tokens=6)
    part = reference.from_float32(dtype, ((codes + zero) * scale).astype(np.float32))
    rest = data.draw(st.sampled_from(["tensor", "token", "channel:3", "group:32"]))
    text = f"{precision}/{rest}/{'sym' if symmetric else 'asym'}"
    for out in there_and_back(spec, text, [[part, part]], 1)[0]:
        assert np.array_equal(out, part)


@settings(max_examples=50)
@given(
    seed=SEEDS,
    exponent=st.integers(-10, 7),
    rest=st.sampled_from(["tensor", "token", "channel:3", "group:32"]),
    zero=st.sampled_from([0, 0.5, -3, 1024]),
)
@pytest.mark.parametrize("precision", FLOATS)
def test_every_float_of_8_bits_times_a_scale_comes_back_as_it_was(
    precision: str, seed: int, exponent: int, rest: str, zero: float
) -> None:
    """torch says which they are."""
    kind = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}[precision]
    every = torch.arange(256, dtype=torch.uint8).view(kind).to(torch.float64).numpy()
    every = every[np.isfinite(every) & (abs(every) >= LARGEST[precision] * 2.0**-15)]
    values = np.random.default_rng(seed).choice(every, (6, 2, 34))
    # Both ends in every channel of three tokens, and in every 32 channels of a token.
    ends = LARGEST[precision] * np.where(np.arange(34) % 2, 1, -1)
    values[[0, 3]], values[[1, 4]] = ends, -ends
    values[[2, 5], :, :2] = values[[2, 5], :, 32:] = ends[:2]
    scale = 2.0**exponent / (LARGEST[precision] / 448)
    part = (zero + values * scale).astype(np.float32)
    for out in there_and_back(KVSpec(1, 2, 34, "float32", block_tokens=6), f"{precision}/{rest}/asym", [[part] * 2], 1)[
        0
    ]:
        assert np.array_equal(out, part)


@pytest.mark.parametrize("precision", [*INTS, *FLOATS])
@pytest.mark.parametrize("rest", ["tensor/asym", "token/asym", "channel:2/asym", "group:5/asym"])
@settings(max_examples=30)
@given(value=st.floats(-65504, 65504, width=16))
def test_a_group_of_one_float16_is_its_zero_point(precision: str, rest: str, value: float) -> None:
    spec, layers = latent(np.full((3, 12), value))
    assert np.array_equal(there_and_back(spec, f"{precision}/{rest}", layers, 1)[0][0], layers[0][0])


@settings(max_examples=100)
@given(block=blocks(st.just("float32")), data=st.data())
def test_what_was_stored_once_is_stored_again_without_loss(block: tuple[KVSpec, Layers], data: Any) -> None:
    """Of schemes without zero point, for float32: one that rounds its values again may move the extremes."""
    spec, layers = block
    text = data.draw(schemes(spec.block_tokens, (*INTS, *FLOATS)))
    scheme = Scheme.parse(text)
    if scheme.hadamard or scheme.clip or not scheme.symmetric:
        text = f"{scheme.precision}/token/sym"
    # Scales below the least normal float16 are so coarse that no code reaches the last one.
    least = LARGEST.get(scheme.precision, 127) * 2.0**-14
    layers = [[np.where(abs(part) < least, 0, part).astype(np.float32) for part in layer] for layer in layers]
    if body_of(spec, text, layers, 1) is None:
        return
    once = there_and_back(spec, text, layers, 1)
    twice = there_and_back(spec, text, once, 1)
    assert all(np.array_equal(a, b) for x, y in zip(once, twice, strict=True) for a, b in zip(x, y, strict=True))
