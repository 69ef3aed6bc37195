"""What a value of the index is, byte by byte, and how it is read."""

import pytest

from kvtier.errors import UsageError
from kvtier.index import entry
from kvtier.index.base import Life, Replica
from kvtier.index.entry import LiveReplicas, pack_body, pack_owner, unpack

ALICE = pack_owner(Life(1, 0x01020304, "alice")) + pack_body(2, 4096)
BOB = pack_owner(Life(0x0A0B, 7, "bob")) + pack_body(3, 2**32 - 1)
VALUE = b"\x01" + ALICE + BOB


def test_an_entry_is_little_endian_without_gaps():
    assert bytes.fromhex("0100 04030201 02 00100000") == ALICE
    assert bytes.fromhex("0b0a 07000000 03 ffffffff") == BOB


def test_two_replicas_fit_the_small_string_of_redis():
    assert len(VALUE) == 23 <= 44


def test_what_was_packed_is_unpacked():
    assert unpack(VALUE) == [Replica(1, 0x01020304, 2, 4096), Replica(0x0A0B, 7, 3, 2**32 - 1)]


@pytest.mark.parametrize("value", [b"", b"\x02" + ALICE, VALUE[:-1], b"junk of any sort"])
def test_a_foreign_value_has_no_replicas(value):
    assert unpack(value) == []


@pytest.mark.parametrize("life", [Life(0, 1, "x"), Life(65_536, 1, "x"), Life(1, 0, "x"), Life(1, 2**32, "x")])
def test_identities_that_do_not_fit_are_refused(life):
    with pytest.raises(UsageError):
        pack_owner(life)


def test_only_live_replicas_are_seen():
    newcomers = []
    seen = LiveReplicas({1: 0x01020304, 0x0A0B: 8}, lambda *life: newcomers.append(life))
    assert seen[VALUE] == (Replica(1, 0x01020304, 2, 4096),)
    assert seen[None] == ()
    assert newcomers == []


def test_a_life_that_the_table_does_not_know_is_reported_once_a_value():
    newcomers = []
    seen = LiveReplicas({1: 0x01020303}, lambda *life: newcomers.append(life))
    assert seen[VALUE] == seen[VALUE] == ()
    assert newcomers == [(1, 0x01020304), (0x0A0B, 7)]


def test_equal_values_are_decoded_once(monkeypatch):
    seen = LiveReplicas({1: 0x01020304}, lambda *_: None)
    first = seen[VALUE]
    monkeypatch.setattr(entry, "unpack", None)
    assert seen[bytes(bytearray(VALUE))] is first


def test_what_is_remembered_is_bounded(monkeypatch):
    monkeypatch.setattr(entry, "DECODED_LIMIT", 4)
    seen = LiveReplicas({1: 1}, lambda *_: None)
    for size in range(20):
        value = b"\x01" + pack_owner(Life(1, 1, "x")) + pack_body(2, size)
        assert seen[value] == (Replica(1, 1, 2, size),)
        assert len(seen) <= 4
        assert seen[None] == ()
