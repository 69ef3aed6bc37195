import struct
from contextlib import suppress
from dataclasses import replace

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvtier.block import MAGIC, PAGE, BlockHeader, address, header_nbytes, slot_nbytes, verify_payload
from kvtier.errors import ConfigError, CorruptPayload, UsageError

HEADER = BlockHeader(
    key=bytes(range(32)),
    rank=3,
    position=5,
    tokens=64,
    codec=2,
    plan="int8",
    spec_digest=bytes(range(32, 64)),
    body_nbytes=11,
    checksum=xxhash.xxh3_64_intdigest(b"hello world"),
    space=bytes(range(64, 80)),
    expires=1_800_000_000,
)
PAYLOAD = HEADER.pack() + b"hello world"

digests = st.binary(min_size=32, max_size=32)
headers = st.builds(
    BlockHeader,
    key=digests,
    rank=st.integers(0, 2**16 - 1),
    position=st.integers(0, 2**32 - 1),
    tokens=st.integers(0, 2**32 - 1),
    codec=st.integers(0, 2**16 - 1),
    plan=st.text(max_size=500),
    spec_digest=digests,
    body_nbytes=st.integers(0, 2**64 - 1),
    checksum=st.integers(0, 2**64 - 1),
    space=st.binary(min_size=16, max_size=16),
    expires=st.integers(0, 2**64 - 1),
)


def test_the_bytes_of_a_header():
    front = b"KVTIERBK"
    front += struct.pack("<HHHH", 2, 192, 2, 3)  # version, header bytes, codec, rank
    front += struct.pack("<IIQQ", 64, 5, 11, 0xD447B1EA40E6988B)  # tokens, position, body, XXH3 of "hello world"
    front += bytes(range(32)) + bytes(range(32, 64))
    front += struct.pack("<H6x", 4) + bytes(range(64, 80)) + struct.pack("<Q", 1_800_000_000)
    front += b"int8" + bytes(44)
    assert HEADER.pack() == front + struct.pack("<Q", xxhash.xxh3_64_intdigest(front))


@given(headers, st.binary(max_size=100))
def test_what_was_packed_is_unpacked(header, behind):
    packed = header.pack()
    assert len(packed) == header.nbytes == header_nbytes(header.plan)
    assert len(packed) % 64 == 0
    assert BlockHeader.unpack(packed + behind) == header


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_a_payload_verifies_whatever_holds_it_and_follows_it(kind):
    assert verify_payload(kind(PAYLOAD + b"rest of the slot"), expected=address(bytes(range(32)), 3)) == HEADER
    assert HEADER.payload_nbytes == len(PAYLOAD) == 203


def test_no_flipped_bit_passes():
    for bit in range(len(PAYLOAD) * 8):
        bad = bytearray(PAYLOAD)
        bad[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CorruptPayload):
            verify_payload(bad)


@pytest.mark.parametrize("size", [0, 1, 143, 144, 191, 192, len(PAYLOAD) - 1])
def test_no_cut_payload_passes(size):
    with pytest.raises(CorruptPayload):
        verify_payload(PAYLOAD[:size])


@given(st.one_of(st.binary(max_size=400), st.binary(max_size=400).map(lambda b: MAGIC + b"\2\0\xc0\0" + b)))
def test_any_bytes_are_a_header_or_corrupt(data):
    with suppress(CorruptPayload):
        BlockHeader.unpack(data)


def sealed(**fields):
    """A header with wrong fields and a right checksum."""
    front = bytearray(PAYLOAD[:184])
    for offset, value in fields.values():
        front[offset : offset + len(value)] = value
    return bytes(front) + struct.pack("<Q", xxhash.xxh3_64_intdigest(front)) + b"hello world"


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        (sealed(magic=(0, b"KVTIERBL")), "no block header"),
        (sealed(version=(8, b"\1\0")), "version 1"),
        (sealed(size=(10, b"\0\1")), "256 bytes"),
        (sealed(size=(10, b"\0\0")), "0 bytes"),
        (sealed(size=(10, b"\x81\0")), "129 bytes"),
        (sealed(plan=(104, b"\xff\xff")), "65535"),
        (sealed(plan=(136, b"\xff\xff")), "UTF-8"),
        (sealed(body=(24, b"\xff" * 8)), "was cut"),
    ],
)
def test_a_right_checksum_over_wrong_fields(payload, message):
    with pytest.raises(CorruptPayload, match=message):
        verify_payload(payload)


def test_another_block_in_its_place():
    with pytest.raises(CorruptPayload, match="carries the address"):
        verify_payload(PAYLOAD, expected=address(bytes(range(32)), 4))
    with pytest.raises(CorruptPayload, match="carries the address"):
        verify_payload(PAYLOAD, expected=address(bytes(32), 3))


@pytest.mark.parametrize(
    "fields",
    [
        {"key": bytes(31)},
        {"key": bytes(34)},
        {"spec_digest": b""},
        {"space": bytes(32)},
        {"expires": -1},
        {"rank": 2**16},
        {"position": -1},
        {"codec": 2**16},
        {"body_nbytes": 2**64},
    ],
)
def test_fields_that_do_not_fit(fields):
    with pytest.raises(UsageError):
        replace(HEADER, **fields).pack()


def test_the_longest_plan():
    # 4096 - 136 - 8 = 3952
    assert len(replace(HEADER, plan="x" * 3952).pack()) == PAGE
    with pytest.raises(ConfigError, match="3953 bytes; at most 3952"):
        replace(HEADER, plan="x" * 3953).pack()


@pytest.mark.parametrize(("payload", "slot"), [(1, 4096), (4096, 4096), (4097, 8192), (23_040 * 64, 23_040 * 64)])
def test_a_slot_is_the_payload_rounded_up_to_pages(payload, slot):
    assert slot_nbytes(payload) == slot


def test_addresses():
    assert address(b"k" * 32) == b"k" * 32 + b"\0\0"
    assert HEADER.address == bytes(range(32)) + b"\3\0"
