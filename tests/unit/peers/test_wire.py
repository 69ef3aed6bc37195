"""What other hosts say is read as what it says, or refused; nothing else comes of any bytes."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvtier.errors import ProtocolMismatch
from kvtier.peers import wire
from kvtier.peers.wire import BODY_LIMIT, ITEMS_LIMIT, Kind, Status
from kvtier.testing.payloads import key_of

BLOCKS = st.lists(st.tuples(st.binary(min_size=34, max_size=34), st.integers(0, 2**32 - 1)), min_size=1, max_size=50)


def parts(blocks):
    return [key for key, _ in blocks], np.array([nbytes for _, nbytes in blocks], np.int64)


@given(BLOCKS, st.floats(0, 1e5), st.floats(0, 1e5))
def test_a_request_is_read_as_it_was_made(blocks, seconds, wait):
    keys, nbytes = parts(blocks)
    got = wire.read_fetch(wire.fetch(seconds, wait, wire.items(keys, nbytes)))
    assert got[0] == pytest.approx(seconds, abs=0.001)
    assert got[1] == pytest.approx(wait, abs=0.001)
    assert got[2] == keys
    assert got[3].tolist() == nbytes.tolist()


@given(BLOCKS, st.ip_addresses(), st.integers(0, 65535))
def test_an_offer_is_read_as_it_was_made(blocks, address, port):
    keys, nbytes = parts(blocks)
    door, *got = wire.read_offer(wire.offer(f"{address}:{port}", wire.items(keys, nbytes)))
    assert door == f"{address}:{port}"
    assert got[0] == keys
    assert got[1].tolist() == nbytes.tolist()


@given(st.lists(st.sampled_from(Status), min_size=1), st.integers(0, 4000))
def test_an_answer_is_read_as_it_was_made(statuses, first):
    body = wire.blocks(first, bytes(statuses))
    assert list(wire.read_blocks(body, first, len(statuses))) == statuses
    with pytest.raises(ProtocolMismatch):
        wire.read_blocks(body, first + 1, len(statuses))
    with pytest.raises(ProtocolMismatch):
        wire.read_blocks(body, first, len(statuses) - 1)


@given(st.binary(max_size=400))
@example(b"")
@example(b"\xff")
@example(b"\x05ab")
def test_any_bytes_are_read_or_refused(body):
    for read in (wire.read_fetch, wire.read_offer, wire.read_items, wire.read_number):
        with contextlib.suppress(ProtocolMismatch):
            read(body)
    with contextlib.suppress(ProtocolMismatch):
        assert len(wire.read_blocks(body, 0, 7)) <= 7


@given(st.binary(min_size=8, max_size=8))
def test_no_frame_is_longer_than_the_limit(head):
    with contextlib.suppress(ProtocolMismatch):
        kind, nbytes = wire.read_head(head)
        assert nbytes <= BODY_LIMIT
        assert wire.head(kind, nbytes) == head


def test_the_largest_request_fits_a_frame():
    keys = [key_of(seed) for seed in range(ITEMS_LIMIT)]
    blocks = wire.items(keys, np.full(ITEMS_LIMIT, 5000))
    for body in (wire.fetch(1.0, 1.0, blocks), wire.offer("x" * 200, blocks)):
        assert wire.read_head(wire.head(Kind.FETCH, len(body))) == (Kind.FETCH, len(body))
    with pytest.raises(ProtocolMismatch):
        wire.read_items(blocks + blocks[:38])


def test_a_request_for_nothing_is_refused():
    with pytest.raises(ProtocolMismatch):
        wire.read_fetch(wire.fetch(1.0, 1.0, b""))


def test_a_frames_mac_depends_on_all_of_it():
    made = {
        wire.mac(key, number, frame)
        for key in (bytes(32), bytes(31) + b"\1")
        for number in (0, 1, 256)
        for frame in (b"frame", b"framf", b"frame\0")
    }
    assert len(made) == 2 * 3 * 3
