"""Who knows the secret gets in, and nothing that was said before helps anybody else."""

from __future__ import annotations

import contextlib
import hashlib
import hmac

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.errors import ConfigError, ProtocolMismatch, Unauthenticated
from kvtier.peers import handshake
from kvtier.peers.handshake import CHALLENGE, HELLO, PROOF_NBYTES

SECRET, OTHER = b"s" * 32, b"t" * 32
NONCE, NONCE2 = bytes(range(32)), bytes(range(32, 64))


def test_both_ends_agree():
    hello = handshake.hello("host-1", NONCE)
    challenge = handshake.challenge(SECRET, hello, NONCE2)
    proof, keys = handshake.answer(SECRET, hello, challenge)
    assert handshake.accept(SECRET, hello, challenge, proof) == keys
    assert handshake.read_hello(hello) == "host-1"
    assert keys.client != keys.server
    assert "s" * 32 not in repr(keys)
    assert str(keys.client) not in repr(keys)


def test_the_messages_are_what_is_documented():
    """Made by hand here from the picture in the module's docstring."""
    hello = b"KVTPEERS" + b"\1\0" + b"\0" + b"\2" + bytes(4) + NONCE + b"h1" + bytes(62)
    assert handshake.hello("h1", NONCE) == hello
    front = b"KVTPEERS" + b"\1\0" + bytes(6) + NONCE2
    proof = hmac.new(SECRET, b"kvtier peer server\0" + hello + front, hashlib.sha256).digest()
    assert handshake.challenge(SECRET, hello, NONCE2) == front + proof
    client = hmac.new(SECRET, b"kvtier peer client\0" + hello + front, hashlib.sha256).digest()
    assert handshake.answer(SECRET, hello, front + proof)[0] == client


def test_the_secret_is_in_no_message():
    hello = handshake.hello("h1", NONCE)
    challenge = handshake.challenge(SECRET, hello, NONCE2)
    assert SECRET not in hello + challenge + handshake.answer(SECRET, hello, challenge)[0]


def test_another_secret_is_refused_by_both():
    hello = handshake.hello("h1", NONCE)
    challenge = handshake.challenge(SECRET, hello, NONCE2)
    with pytest.raises(Unauthenticated):
        handshake.answer(OTHER, hello, challenge)
    with pytest.raises(Unauthenticated):
        handshake.accept(SECRET, hello, challenge, handshake.challenge(OTHER, hello, NONCE2)[-PROOF_NBYTES:])


def test_a_servers_proof_is_no_clients():
    hello = handshake.hello("h1", NONCE)
    challenge = handshake.challenge(SECRET, hello, NONCE2)
    with pytest.raises(Unauthenticated):
        handshake.accept(SECRET, hello, challenge, challenge[-PROOF_NBYTES:])


@pytest.mark.parametrize("again", ["hello", "challenge"])
def test_a_fresh_nonce_on_either_side_makes_old_proofs_worthless(again):
    hello = handshake.hello("h1", NONCE)
    challenge = handshake.challenge(SECRET, hello, NONCE2)
    proof, _ = handshake.answer(SECRET, hello, challenge)
    if again == "challenge":
        with pytest.raises(Unauthenticated):
            handshake.accept(SECRET, hello, handshake.challenge(SECRET, hello, NONCE), proof)
    else:
        with pytest.raises(Unauthenticated):
            handshake.answer(SECRET, handshake.hello("h1", NONCE2), challenge)


def test_a_name_cannot_be_changed_on_the_way():
    hello = handshake.hello("h1", NONCE)
    challenge = handshake.challenge(SECRET, hello, NONCE2)
    proof, _ = handshake.answer(SECRET, hello, challenge)
    with pytest.raises(Unauthenticated):
        handshake.accept(SECRET, handshake.hello("h2", NONCE), challenge, proof)


def test_another_version_is_named_on_both_sides():
    older = handshake.hello("h1", NONCE).replace(b"KVTPEERS\1", b"KVTPEERS\0")
    with pytest.raises(ProtocolMismatch, match="speaks version 0"):
        handshake.read_hello(older)
    with pytest.raises(ProtocolMismatch, match="speaks version 9"):
        handshake.answer(SECRET, older, b"KVTPEERS\t" + handshake.refusal()[9:])


def test_a_long_name_is_cut_between_its_characters():
    """An é has two bytes; 64 bytes hold a letter and 31 of them."""
    assert handshake.read_hello(handshake.hello("a" + "é" * 40, NONCE)) == "a" + "é" * 31


def test_a_short_secret_is_none():
    with pytest.raises(ConfigError, match="16"):
        handshake.check(b"guess me")


@given(st.binary(min_size=HELLO.size, max_size=HELLO.size))
def test_any_bytes_are_a_hello_or_refused(data):
    for said in (data, handshake.MAGIC + b"\1\0" + data[10:]):
        with contextlib.suppress(ProtocolMismatch):
            assert handshake.read_hello(said)


@given(st.binary(min_size=CHALLENGE.size, max_size=CHALLENGE.size))
def test_any_bytes_are_refused_as_a_challenge(data):
    for said in (data, handshake.MAGIC + b"\1\0" + data[10:]):
        with pytest.raises((ProtocolMismatch, Unauthenticated)):
            handshake.answer(SECRET, handshake.hello("h1", NONCE), said)
