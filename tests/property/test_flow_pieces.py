"""Laws of pieces: what is dropped changes nothing of what stays."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.codecs.cpu.codec import PlanCodec
from kvtier.codecs.plan import NAMED
from kvtier.codecs.scheme import Scheme
from kvtier.codecs.view import KVView
from kvtier.errors import ConfigError, UnsupportedKV, UsageError
from kvtier.flow.pieces import PIECE, PieceCodec, Pieces
from kvtier.spec import KVSpec
from tests.codec_cases import schemes

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
HELD = ["bfloat16", "float16"]
SEEDS = st.integers(0, 2**16)


@st.composite
def codecs(draw):
    held = draw(st.sampled_from(HELD))
    texts = [draw(schemes()) for _ in range(2)]
    parsed = [Scheme.parse(text if "channel" not in text else _whole(text)) for text in texts]
    dims = draw(st.sampled_from([(64, 64), (64, 32), (24, 40), (7, 5), (128, 64)]))
    return PieceCodec(parsed, dims, held, draw(st.sampled_from([held, "float32"])))


def _whole(text):
    name, _, *rest = text.split("/")
    return "/".join([name, "channel:64", *rest])


def kv(heads, tokens, codec, seed):
    generator = torch.Generator().manual_seed(seed)
    dtype = DTYPES[codec.held.dtype]
    return [torch.randn(heads, tokens, dim, generator=generator).to(dtype) for dim in codec.held.head_dims]


def read(pieces, codec, heads):
    """What each head's pieces decode to, K and V `[tokens, dim]`."""
    width = max(1, int(pieces.tokens.max()))
    parts = [torch.full((heads * width, 1, dim), 7.0, dtype=DTYPES[codec.read.dtype]) for dim in codec.read.head_dims]
    pieces.read(KVView.of([tuple(parts)], codec.read), np.arange(heads) * width)
    return [
        [part.view(heads, width, -1)[head, : int(pieces.tokens[head])].clone() for part in parts]
        for head in range(heads)
    ]


@settings(max_examples=120, deadline=None)
@given(codecs(), st.integers(1, 3), st.integers(1, 3), SEEDS, st.data())
def test_what_stays_decodes_as_before(codec, heads, each, seed, data):
    """decode(drop(encode(x), keep)) == decode(encode(x))[keep], bit for bit, dropped once or often."""
    pieces = Pieces(codec, heads)
    parts = kv(heads, each * PIECE, codec, seed)
    pieces.add(parts, np.repeat(np.arange(heads), each), np.tile(np.arange(each) * PIECE, heads))
    rng = np.random.default_rng(seed)
    for share in data.draw(st.lists(st.sampled_from([1.0, 0.97, 0.5, 0.03, 0.0]), min_size=1, max_size=4)):
        before, tokens = read(pieces, codec, heads), pieces.tokens
        stays = rng.random(int(tokens.sum())) < share
        pieces.keep(stays)
        bounds = np.cumsum(tokens)[:-1]
        for head, (was, mask) in enumerate(zip(before, np.split(stays, bounds), strict=True)):
            assert int(pieces.tokens[head]) == mask.sum()
            for part, now in zip(was, read(pieces, codec, heads)[head], strict=True):
                assert torch.equal(part[torch.from_numpy(mask)], now)
        assert pieces.nbytes == int(codec.nbytes(pieces._counts).sum())


@pytest.mark.parametrize("held", HELD)
@pytest.mark.parametrize("plan", ["int8", "int4", "int3", "k8v4", "fp8"])
def test_a_piece_is_a_block_of_one_head(plan, held):
    """What the codec of blocks makes of the same tokens, in bytes and in values."""
    text = NAMED[plan]
    uniform = text.removeprefix("sinks:1(").removesuffix(")")
    spec = KVSpec(1, 1, 64, held, block_tokens=PIECE)
    blocks = PlanCodec(uniform, spec)
    key, value = uniform.split(",")
    codec = PieceCodec([Scheme.parse(key[2:]), Scheme.parse(value[2:])], (64, 64), held, held)
    parts = kv(1, PIECE, codec, 1)
    view = KVView.of([tuple(part.view(-1, 1, 64) for part in parts)], spec)
    body, zero = np.zeros(blocks.nbytes(1), np.uint8), np.zeros(1, np.int64)
    assert blocks.encode(view, zero, body, zero, np.ones(1, np.int64), range(1)).all()
    assert codec.encode(view, zero).tobytes() == body.tobytes()
    assert codec.nbytes(np.array([PIECE])).tolist() == [len(body)]


def test_read_in_float32_is_not_rounded_to_16_bits():
    scheme = Scheme.parse("int8/token/asym")
    narrow, wide = (PieceCodec([scheme, scheme], (64, 64), "bfloat16", read) for read in ("bfloat16", "float32"))
    parts = kv(2, PIECE, wide, 3)
    found = []
    for codec in (narrow, wide):
        pieces = Pieces(codec, 2)
        pieces.add(parts, np.arange(2), np.zeros(2, np.int64))
        found.append(read(pieces, codec, 2))
    for narrow_head, wide_head in zip(*found, strict=True):
        for a, b in zip(narrow_head, wide_head, strict=True):
            assert torch.equal(a, b.bfloat16())
            assert not torch.equal(a.float(), b)


@pytest.mark.parametrize("offset", [2**63 - 1, 2**63 - 5000, 1, -1])
def test_pieces_outside_of_their_memory_are_refused(offset):
    scheme = Scheme.parse("int4/token/asym")
    codec = PieceCodec([scheme, scheme], (64, 64), "bfloat16", "bfloat16")
    tokens = np.full(1, PIECE)
    view = KVView.of([tuple(part.view(-1, 1, 64) for part in kv(1, PIECE, codec, 0))], codec.read)
    memory = np.zeros(int(codec.nbytes(tokens)[0]), np.uint8)
    for offsets, begins in ((offset, 0), (0, offset)):
        with pytest.raises(UsageError, match="outside of"):
            codec.decode(memory, np.array([offsets]), tokens, view, np.array([begins]))


def test_what_cannot_be_encoded_is_refused_and_changes_nothing():
    scheme = Scheme.parse("int4/token/asym")
    codec = PieceCodec([scheme, scheme], (64, 64), "bfloat16", "bfloat16")
    pieces = Pieces(codec, 1)
    parts = kv(1, PIECE, codec, 0)
    parts[1][0, 3, 5] = torch.nan
    with pytest.raises(UnsupportedKV, match="NaN"):
        pieces.add(parts, np.zeros(1, np.int64), np.zeros(1, np.int64))
    assert pieces.nbytes == 0
    with pytest.raises(ConfigError, match="channel:64"):
        PieceCodec([Scheme.parse("int8/channel:16/asym"), scheme], (64, 64), "bfloat16", "bfloat16")
