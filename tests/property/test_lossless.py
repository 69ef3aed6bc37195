"""Any payload comes back or is left alone; any bytes unpack or are corrupt, and nothing else is touched."""

from __future__ import annotations

from contextlib import suppress
from unittest.mock import patch

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvtier.errors import CorruptPayload
from kvtier.lossless import frame
from kvtier.lossless.frame import HEADER, pack, unpack
from kvtier.lossless.method import Method

METHODS = st.sampled_from([Method.LZ4, Method.ZSTD])
PIECES = st.sampled_from([1, 7, 64, 1000, frame.PIECE])
GUARD = b"\xa5" * 64


@st.composite
def payloads(draw):
    """Elements whose high bits vary more or less, in stretches; of any number of bytes."""
    generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    parts = [
        generator.integers(0, 1 << draw(st.integers(0, 16)), draw(st.integers(0, 1500)), np.uint16)
        << draw(st.integers(0, 8))
        for _ in range(draw(st.integers(0, 4)))
    ]
    return b"".join(part.astype(np.uint16).tobytes() for part in parts) + draw(st.binary(max_size=3))


def guarded(nbytes: int) -> tuple[bytearray, memoryview]:
    """Memory with a guard on both sides, so that addresses are odd too."""
    memory = bytearray(GUARD[:-1] + bytes(nbytes) + GUARD)
    return memory, memoryview(memory)[len(GUARD) - 1 : len(GUARD) - 1 + nbytes]


def untouched(memory: bytearray) -> bool:
    return memory.startswith(GUARD[:-1]) and memory.endswith(GUARD)


@given(payloads(), METHODS, PIECES, st.integers(0, 100))
def test_smaller_and_the_same_or_nothing(payload, method, piece, less):
    with patch.object(frame, "PIECE", piece):
        memory, room = guarded(max(0, len(payload) + 50 - less))
        nbytes = pack(payload, method, room)
        assert untouched(memory)
        if nbytes is None:
            return
        assert nbytes < len(payload)
        assert nbytes <= len(room)
        back, into = guarded(len(payload))
        assert unpack(room[:nbytes], into) == len(payload)
        assert into == payload
        assert untouched(back)


@given(
    payloads(),
    METHODS,
    PIECES,
    st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(1, 255)), min_size=1, max_size=4),
    st.floats(0, 1),
    st.integers(-8, 8),
)
def test_altered_frames_are_corrupt_or_other_bytes(payload, method, piece, flips, kept, more):
    with patch.object(frame, "PIECE", piece):
        content = bytearray(len(payload))
        nbytes = pack(payload, method, memoryview(content))
        if nbytes is None:
            return
        for at, mask in flips:
            content[int(at * nbytes)] ^= mask
        memory, into = guarded(max(0, len(payload) + more))
        with suppress(CorruptPayload):
            assert 0 < unpack(content[: int(kept * nbytes) + 1], into) <= len(into)
        assert untouched(memory)


@given(st.binary(max_size=400), METHODS, st.integers(0, 600), st.integers(0, 400), PIECES, st.integers(0, 600))
def test_any_bytes_behind_a_header_are_corrupt_or_a_payload(content, method, nbytes, packed, piece, room):
    with patch.object(frame, "PIECE", piece):
        memory, into = guarded(room)
        header = HEADER.pack(frame.MAGIC, frame.VERSION, method, 0, nbytes, packed)
        for whole in (header + content, content):
            with suppress(CorruptPayload):
                assert unpack(whole, into) == nbytes <= room
        assert untouched(memory)
