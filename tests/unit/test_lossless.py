"""Frames that are smaller than their payloads, and the choice among methods."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

from kvtier.block import BlockHeader
from kvtier.errors import CorruptPayload
from kvtier.lossless import frame
from kvtier.lossless.choice import Measured, Path, choose, measure
from kvtier.lossless.frame import HEADER, PIECE, is_frame, pack, suits, unpack
from kvtier.lossless.method import Method
from kvtier.testing.payloads import payload_of

PACKED = (Method.LZ4, Method.ZSTD)


def bf16(elements: int, seed: int = 0) -> bytes:
    """Normally distributed bfloat16."""
    values = np.random.default_rng(seed).standard_normal(elements, np.float32)
    return (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()


def noise(nbytes: int) -> bytes:
    return np.random.default_rng(0).bytes(nbytes)


def packed(payload: bytes, method: Method = Method.ZSTD) -> bytes:
    room = bytearray(len(payload))
    nbytes = pack(payload, method, memoryview(room))
    assert nbytes is not None
    return bytes(room[:nbytes])


@pytest.mark.parametrize("method", PACKED)
@pytest.mark.parametrize("elements", [400, 5000, PIECE - 1, PIECE, PIECE + 1, 3 * PIECE + 17])
def test_a_frame_gives_the_payload_back(method, elements):
    payload = bf16(elements)
    content = packed(payload, method)
    assert is_frame(content)
    assert not is_frame(payload)
    room = bytearray(b"\xa5" * (2 * elements + 100))
    assert unpack(content + b"what follows it", memoryview(room)) == len(payload)
    assert room == payload + b"\xa5" * 100


def test_the_high_plane_is_sign_and_exponent():
    """0.5, -1 and 3.25 are 2**-1, -2**0 and 1.625 * 2**1; exponents are stored plus 127, 1.625 has mantissa 1010000."""
    payload = (np.array([0.5, -1, 3.25], np.float32).view(np.uint32) >> 16).astype("<u2").view(np.uint8)
    payload.flags.writeable = False
    high, low, back = np.zeros(3, np.uint8), np.zeros(3, np.uint8), np.zeros(6, np.uint8)
    frame.split(payload, high, low)
    assert high.tolist() == [126 >> 1, 0b1000_0000 | 127 >> 1, 128 >> 1]
    assert low.tolist() == [0b0_0000000, 0b1_0000000, 0b0_1010000]
    frame.merge(high, low, back)
    assert back.tolist() == payload.tolist()


@pytest.mark.parametrize(("method", "part"), [(Method.LZ4, 0.95), (Method.ZSTD, 0.70)])
def test_it_is_as_small_as_the_entropy_lets_it_be(method, part):
    """Exponents of a normal distribution have 2.5 bits of entropy (-sum p log2 p over octaves), the other 8 bits are
    random: zstd needs (8 + 2.5) / 16 = 0.66 and a little."""
    octaves = np.diff([math.erf(2.0**power / math.sqrt(2)) for power in range(-30, 5)])
    entropy = -float(np.sum(octaves * np.log2(octaves, where=octaves > 0, out=np.zeros_like(octaves))))
    ratio = len(packed(bf16(PIECE), method)) / (2 * PIECE)
    assert (8 + entropy) / 16 <= ratio <= part


@pytest.mark.parametrize("method", PACKED)
def test_what_does_not_shrink_is_no_frame_and_nothing_is_written_behind_the_room(method):
    for payload in (noise(2), noise(100), noise(9001 * 2), noise(2 * PIECE + 200), payload_of(1, 5000), b""):
        room = bytearray(b"\xa5" * (len(payload) + 100))
        assert pack(payload, method, memoryview(room)[: len(payload)]) is None
        assert room[len(payload) :] == b"\xa5" * 100


def test_noise_is_given_up_after_its_first_piece(monkeypatch):
    tried = []

    class Codec:
        def compress(self, plane, *, asbytes):
            tried.append(len(plane))
            return bytes(plane)

    monkeypatch.setitem(frame._CODECS, Method.ZSTD, Codec())
    assert pack(noise(16 * PIECE), Method.ZSTD, memoryview(bytearray(16 * PIECE))) is None
    assert tried == [PIECE]


@pytest.mark.parametrize("method", PACKED)
def test_a_part_that_does_not_shrink_is_kept_as_it_is(method):
    payload = bf16(2 * PIECE) + noise(2 * PIECE)
    content, room = packed(payload, method), bytearray(len(payload))
    assert unpack(content, memoryview(room)) == len(payload)
    assert room == payload


@pytest.mark.parametrize("method", PACKED)
def test_the_room_is_the_limit(method):
    payload = bf16(5000)
    nbytes = len(packed(payload, method))
    for room in (nbytes, nbytes - 1, 6000, 5000, HEADER.size, 0):
        memory = bytearray(b"\xa5" * len(payload))
        said = pack(payload, method, memoryview(memory)[:room])
        assert said == (nbytes if room == nbytes else None)
        assert memory[room:] == b"\xa5" * (len(payload) - room)


def test_odd_payloads_and_the_method_that_stores_are_no_frames():
    payload = bf16(5000)
    room = memoryview(bytearray(len(payload)))
    assert pack(payload[:-1], Method.ZSTD, room) is None
    assert pack(payload, Method.STORED, room) is None


def test_only_plans_that_keep_the_elements_suit():
    header = BlockHeader.unpack(payload_of(1, 5000))
    said = {
        plan: suits(replace(header, plan=plan)) for plan in ("raw", "bf16", "fp16", "int8/token/sym", "K=raw,V=e4m3")
    }
    assert [plan for plan, one in said.items() if one] == ["raw", "bf16", "fp16"]


@pytest.mark.parametrize("method", PACKED)
def test_a_frame_that_was_cut_is_corrupt(method):
    content, room = packed(bf16(400), method), memoryview(bytearray(800))
    for end in range(len(content)):
        with pytest.raises(CorruptPayload):
            unpack(content[:end], room)


@pytest.mark.parametrize(
    ("at", "value", "why"),
    [
        (0, b"KVTIERBK", "no frame"),
        (8, (2).to_bytes(2, "little"), "version"),
        (10, (0).to_bytes(2, "little"), "method 0"),
        (10, (9).to_bytes(2, "little"), "method 9"),
        (16, (801).to_bytes(8, "little"), "payload of 801"),
        (16, (802).to_bytes(8, "little"), "payload of 802"),
        (16, (798).to_bytes(8, "little"), "does not decode|pieces of"),
        (16, (0).to_bytes(8, "little"), "payload of 0"),
        (16, b"\xfe" + b"\xff" * 7, "payload of"),
        (24, b"\xff" * 8, "packed|bytes of"),
        (24, (0).to_bytes(8, "little"), "ends within"),
        (32, b"\xff" * 4, "packed bytes"),
        (32, (399).to_bytes(4, "little"), "packed bytes"),
        (32, (0).to_bytes(4, "little"), "does not decode"),
    ],
)
def test_lengths_that_lie_are_corrupt(at, value, why):
    content = bytearray(packed(bf16(400)))
    content[at : at + len(value)] = value
    with pytest.raises(CorruptPayload, match=why):
        unpack(content, memoryview(bytearray(800)))


def test_a_lying_frame_makes_nobody_allocate(monkeypatch):
    """Whatever it says: one piece is decoded at a time, into exactly its elements."""
    asked = []
    codec = frame._CODECS[Method.ZSTD]

    class Codec:
        def decompress(self, content, count, *, asbytes):
            asked.append(count)
            return codec.decompress(content, count, asbytes=asbytes)

    monkeypatch.setitem(frame._CODECS, Method.ZSTD, Codec())
    bomb = frame.pa.compress(bytes(1 << 28), "zstd", asbytes=True)
    room = memoryview(bytearray(1 << 20))
    for nbytes in (1 << 16, 1 << 20, 1 << 40):
        piece = frame.LENGTH.pack(len(bomb)) + bytes(min(nbytes // 2, PIECE)) + bomb
        content = HEADER.pack(frame.MAGIC, frame.VERSION, Method.ZSTD, 0, nbytes, len(piece)) + piece
        with pytest.raises(CorruptPayload):
            unpack(content, room)
    assert asked == [1 << 15, 1 << 19]


def test_threads_do_not_disturb_each_other():
    payloads = [bf16(PIECE + 1000 * seed, seed) for seed in range(8)]

    def there_and_back(place):
        payload = payloads[place % 8]
        room = bytearray(len(payload))
        unpack(packed(payload, PACKED[place % 2]), memoryview(room))
        return room == payload

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(there_and_back, range(32)))


ZSTD, LZ4 = Measured(1.44, 0.65e9, 2.3e9), Measured(1.19, 0.75e9, 4.8e9)
BOTH = {Method.LZ4: LZ4, Method.ZSTD: ZSTD}


@pytest.mark.parametrize(
    ("path", "speed", "capacity"),
    [
        # 1 Gbit/s, packed when asked. ns a byte: 10 stored; zstd 6.9 + 1.5 + 0.4 = 8.9; lz4 8.4 + 1.3 + 0.2 = 9.9
        (Path(0.1e9, packing=1), Method.ZSTD, Method.ZSTD),
        # 10 Gbit/s: 0.8 stored; zstd 0.6 + 1.5 + 0.4; packing alone is slower than the wire
        (Path(1.25e9, packing=1), Method.STORED, Method.STORED),
        # a SATA disk, one block: 2 stored; zstd 1.4 + 0.4 = 1.8; lz4 1.7 + 0.2 = 1.9
        (Path(0.5e9), Method.ZSTD, Method.ZSTD),
        # 2 GB/s, one block: 0.5 stored; zstd 0.35 + 0.43 = 0.78; lz4 0.42 + 0.21 = 0.63, beyond 1.25 * 0.5 = 0.625
        (Path(2e9), Method.STORED, Method.STORED),
        # 2 GB/s, many blocks, two threads: zstd max(0.35, 0.22); lz4 max(0.42, 0.10)
        (Path(2e9, 2, overlapped=True), Method.ZSTD, Method.ZSTD),
        # 5.5 GB/s, likewise: 0.18 stored; zstd max(0.13, 0.22) = 0.22, 1.2 times as long; lz4 max(0.15, 0.10)
        (Path(5.5e9, 2, overlapped=True), Method.LZ4, Method.ZSTD),
        # 14 GB/s: 0.07 stored; unpacking LZ4 takes 0.10
        (Path(14e9, 2, overlapped=True), Method.STORED, Method.STORED),
    ],
)
def test_the_method_that_a_path_is_worth(path, speed, capacity):
    assert choose(BOTH, path) == speed
    assert choose(BOTH, path, "capacity") == capacity


def test_what_gains_nothing_is_never_chosen():
    slow = Path(1e6)
    assert choose({}, slow) == choose({}, slow, "capacity") == Method.STORED
    little = {Method.ZSTD: Measured(1.03, 1e12, 1e12)}
    assert choose(little, slow) == choose(little, slow, "capacity") == Method.STORED


def ticking():
    """A clock on which each thing takes a second."""
    now = iter(range(10**6))
    return lambda: float(next(now))


def test_a_sample_is_measured_in_bytes_and_seconds():
    """Two payloads, the second does not shrink: 2 s of packing, 1 s of unpacking; the fastest round counts."""
    sample = [bf16(5000), noise(6000)]
    measured = measure(sample, ticking())
    for method, one in measured.items():
        assert one == Measured(16_000 / (len(packed(sample[0], method)) + 6000), 8000, 16_000)
    assert list(measured) == [Method.LZ4, Method.ZSTD]


def test_noise_and_nothing_measure_as_no_gain():
    assert measure([noise(6000)], ticking()) == measure([], ticking()) == {}
