"""The bytes of bodies, written out by hand from `layout`; torch's 8-bit floats are the oracle for theirs."""

import struct

import numpy as np
import pytest
import torch

from kvtier.codecs.registry import codec_for
from kvtier.spec import KVSpec
from tests.codec_cases import body_of, latent, layers_of, there_and_back


def halves(*values: float) -> bytes:
    return struct.pack(f"<{len(values)}e", *values)


def test_bytes_of_a_body_are_codes_scales_zeros_and_padding() -> None:
    # 8 tokens, 2 heads. K, 64 wide: 8 x 128 codes, 16 scales of 2 bytes: 1056, padded to 1088.
    # V, 32 wide, 4 bits: 8 x 32 bytes, 16 scales and 16 zero points: 320, which is 5 x 64.
    spec = KVSpec(3, 2, 64, "bfloat16", v_head_dim=32, block_tokens=8)
    codec = codec_for("K=int8/token/sym,V=int4/token/asym", spec)
    assert codec.layers(1).tolist() == [0, 1408, 2816, 4224]
    # One code, filled up to 32, and one scale: 34 bytes, padded.
    assert codec_for("int8/token/sym", KVSpec(1, 1, 1, "bfloat16", block_tokens=1, mla=True)).nbytes(0) == 64
    # 33 elements are two units of 32: at 3 bits 24 bytes a token. 4 tokens, scales of two tokens a channel: 66.
    odd = KVSpec(1, 1, 33, "float16", block_tokens=4, mla=True)
    assert codec_for("int3/channel:2/sym", odd).nbytes(1) == 256  # 96 + 2 x 66 = 228
    # The first block: one token of 66 bytes as it is, then 3 x 24, then scales of two groups of tokens.
    assert codec_for("sinks:1(int3/channel:2/sym)", odd).nbytes(0) == 320  # 66 + 72 + 132 = 270
    # Raw is nothing but its elements.
    assert codec_for("raw", odd).nbytes(0) == 4 * 33 * 2


def test_int8_is_a_byte_an_element() -> None:
    """Code 128 is 0: the unit is filled up with it."""
    spec, layers = latent([[127.0, -127.0, 1.0, 0.0]])
    assert body_of(spec, "int8/token/sym", layers) == (
        bytes([255, 1, 129, 128]) + bytes([128] * 28) + halves(1.0) + bytes(30)
    )


def test_int8_with_a_zero_point_counts_from_the_least() -> None:
    # from -1 to 254 in 255 steps of 1; the unit is filled up with code 0
    spec, layers = latent([[-1.0, 254.0, 0.0, 7.0]])
    assert body_of(spec, "int8/token/asym", layers) == (
        bytes([0, 255, 1, 8]) + bytes(28) + halves(1.0, -1.0) + bytes(28)
    )


def test_int4_puts_an_element_and_the_16th_after_it_into_a_byte() -> None:
    # 16 elements 0 to 15, then 15 to 0: the zero point is 0, the scale 1, every code its value.
    spec, layers = latent([[*range(16), *reversed(range(16))]])
    assert body_of(spec, "int4/token/asym", layers) == (
        bytes(low | (15 - low) << 4 for low in range(16)) + halves(1.0, 0.0) + bytes(44)
    )


def test_int2_puts_every_eighth_element_into_a_byte() -> None:
    # e[0..7] = 0 1 2 3 0 1 2 3, e[8..15] = 1, e[16..23] = 2, e[24..31] = 3
    spec, layers = latent([[0, 1, 2, 3, 0, 1, 2, 3, *[1] * 8, *[2] * 8, *[3] * 8]])
    # 0b11_10_01_00 | e
    assert body_of(spec, "int2/token/asym", layers) == (
        bytes([0xE4, 0xE5, 0xE6, 0xE7] * 2) + halves(1.0, 0.0) + bytes(52)
    )


def test_int3_puts_the_upper_bits_behind_the_lower_two() -> None:
    # e[0..7] = 0 to 7, e[8..15] = 5, e[16..23] = 2, e[24..31] = 7
    spec, layers = latent([[*range(8), *[5] * 8, *[2] * 8, *[7] * 8]])
    # lower two bits: e & 3 | 1 << 2 | 2 << 4 | 3 << 6; upper: elements 4 to 7, 8 to 15 and 24 to 31
    assert body_of(spec, "int3/token/asym", layers) == (
        bytes([0xE4, 0xE5, 0xE6, 0xE7] * 2) + bytes([0xF0, 0xFF, 0x00, 0xFF]) + halves(1.0, 0.0) + bytes(48)
    )


def test_16_bits_are_the_elements() -> None:
    spec, layers = latent([[1.0, -2.0, 65504.0]])
    assert body_of(spec, "fp16", layers) == halves(1.0, -2.0, 65504.0) + bytes(58)
    assert body_of(spec, "bf16", layers) == bytes.fromhex("803f 00c0 8047") + bytes(58)


def test_levels_are_codes_on_both_sides_of_the_middle() -> None:
    # Rotating [8, 0, 0, 0] by the matrix of 4 over 2 gives [4, 4, 4, 4]: each its row's size, which is nearest to the
    # level 0.942 of 16: the tenth from below is 0.657, the twelfth 0.942. So code 11, and 8 (level 0.128) fills up.
    spec, layers = latent([[8.0, 0.0, 0.0, 0.0]])
    body = body_of(spec, "int4/token/sym/hadamard/lloyd", layers)
    assert body[:16] == bytes([0x8B] * 4 + [0x88] * 12)
    # 4 / 0.942340456 = 4.24475, of which the nearest float16 is 4.246
    assert struct.unpack("<e", body[16:18])[0] == float(np.float16(4 / 0.942340456))
    assert not any(body[18:])


@pytest.mark.parametrize("scheme", ["int8/channel:2/asym", "int8/group:2/asym"])
def test_scales_have_the_order_of_their_groups(scheme: str) -> None:
    # Three tokens of one head, three channels. Channel: tokens 0 and 1, then 2. Group: channels 0 and 1, then 2.
    spec, layers = latent([[0.0, 0.0, 0.0], [255.0, 510.0, 1020.0], [4.0, 5.0, 6.0]])
    body = body_of(spec, scheme, layers)
    behind = np.frombuffer(body[96 : 96 + 24], np.float16).tolist()
    if "channel" in scheme:
        assert behind == [1.0, 2.0, 4.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 4.0, 5.0, 6.0]
    else:
        # Tokens by two groups; a single value is its own zero point. 1 / 255 is 1028.02 steps of 2**-18.
        assert behind == [0.0, 0.0, 1.0, 0.0, 1029 * 2.0**-18, 0.0, 0.0, 0.0, 255.0, 1020.0, 4.0, 6.0]


def test_exact_tokens_come_first_and_only_in_the_first_block() -> None:
    spec, layers = latent([[3.0, 4.0], [127.0, 1.0]])
    plan = "sinks:1(int8/token/sym)"
    codes = bytes([255, 129]) + bytes([128] * 30) + halves(1.0)
    assert body_of(spec, plan, layers, 0) == struct.pack("<2f", 3.0, 4.0) + codes + bytes(22)
    # 4 / 127 is not a float16
    body = body_of(spec, plan, layers, 1)
    assert len(body) == 128
    assert body[:2] == bytes([128 + round(3 / 4 * 127), 255])


KINDS = {"e4m3": (torch.float8_e4m3fn, 448.0), "e5m2": (torch.float8_e5m2, 57344.0)}


@pytest.mark.parametrize("precision", KINDS)
def test_floats_of_8_bits_decode_as_torch_decodes_them(precision: str) -> None:
    """Every code of a finite number, under a scale of 1."""
    kind, _ = KINDS[precision]
    want = torch.arange(256, dtype=torch.uint8).view(kind).to(torch.float32).numpy()
    spec = KVSpec(1, 1, 256, "float32", block_tokens=1, mla=True)
    body = bytes(range(256)) + halves(1.0) + bytes(62)
    got = layers_of(spec, f"{precision}/token/sym", body)[0][0].ravel()
    finite = np.isfinite(want)
    assert finite.sum() == {"e4m3": 254, "e5m2": 248}[precision]
    assert np.array_equal(got[finite], want[finite])


@pytest.mark.parametrize("precision", KINDS)
def test_floats_of_8_bits_round_as_torch_rounds(precision: str) -> None:
    """What lies between two neighbours, in the middle and next to it, and below the least; under a scale of 1."""
    kind, most = KINDS[precision]
    every = torch.arange(256, dtype=torch.uint8).view(kind).to(torch.float32).numpy()
    every = np.unique(every[np.isfinite(every)])
    middle = (every[1:] + every[:-1]) / 2
    near = [np.nextafter(middle, np.float32(way)) for way in (-np.inf, np.inf)]
    values = np.concatenate([every, middle, *near, (every[1:] * 3 + every[:-1]) / 4, [1e-30, -1e-30, 1e-45]])
    values = np.concatenate([values, np.full(-len(values) % 32, most)]).astype(np.float32)
    spec, layers = latent([values])
    body = body_of(spec, f"{precision}/token/sym", layers)
    count = len(values)
    assert body[count : count + 2] == halves(1.0)
    want = torch.from_numpy(values).to(kind).view(torch.uint8).numpy()
    assert np.array_equal(np.frombuffer(body[:count], np.uint8), want)


@pytest.mark.parametrize("precision", KINDS)
def test_the_largest_float_of_8_bits_is_what_the_scale_reaches(precision: str) -> None:
    _, most = KINDS[precision]
    spec, layers = latent([[most * 2, -most * 2, most / 2]])
    assert there_and_back(spec, f"{precision}/token/sym", layers)[0][0].ravel().tolist() == [
        most * 2,
        -most * 2,
        most / 2,
    ]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("scale", [1.0, 0.37, 2.0**-24, 600.0, 65504.0, -3.3])
def test_decoding_rounds_as_torch_rounds(dtype: str, scale: float) -> None:
    """All codes times one scale: torch's own conversion of the exact product is the oracle; float16 ends at 65504."""
    spec = KVSpec(1, 1, 256, dtype, block_tokens=1, mla=True)
    out = layers_of(spec, "int8/token/sym", bytes(range(256)) + halves(scale) + bytes(62))[0][0]
    factor = torch.tensor(struct.unpack("<e", halves(scale))[0])
    exact = torch.arange(-128, 128, dtype=torch.float32) * factor
    if dtype == "float16":
        exact = exact.clamp(-65504, 65504)
    want = exact.to(getattr(torch, dtype)).view(torch.int16).numpy().view(np.uint16)
    nothing = exact.numpy() == 0
    assert np.array_equal(out.ravel()[~nothing], want[~nothing])
    assert (out.ravel()[nothing] == 0).all()


@pytest.mark.parametrize("scheme", ["int8/token/sym", "int4/tensor/asym", "e4m3/channel:1000/sym", "e5m2/group:8/asym"])
@pytest.mark.parametrize("bits", [0x7C00, 0xFC00, 0x7FFF, 0xFFFF])
def test_scales_that_are_no_numbers_do_not_raise(scheme: str, bits: int) -> None:
    spec = KVSpec(1, 1, 16, "bfloat16", block_tokens=1, mla=True)
    size = codec_for(scheme, spec).nbytes(0)
    body = np.full(size // 2, bits, np.uint16).tobytes()
    assert len(layers_of(spec, scheme, body)[0][0]) == 1
