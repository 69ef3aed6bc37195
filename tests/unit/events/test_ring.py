"""Who missed some batches gets those that are still there, and can see whether that is all."""

from __future__ import annotations

from kvtier.events.ring import Ring


def ring(*payloads: bytes, batches: int = 3, nbytes: int = 100) -> Ring:
    ring = Ring(10, batches=batches, nbytes=nbytes)
    for payload in payloads:
        ring.append(payload)
    return ring


def test_an_empty_ring_has_nothing():
    assert (ring().last, ring().since(0)) == (9, [])


def test_numbers_grow_by_one_from_the_first():
    assert ring(b"a", b"b").since(0) == [(10, b"a"), (11, b"b")]
    assert ring(b"a", b"b").since(11) == [(11, b"b")]
    assert ring(b"a", b"b").since(12) == []


def test_the_oldest_leave_by_number_and_by_size():
    assert ring(b"a", b"b", b"c", b"d").since(10) == [(11, b"b"), (12, b"c"), (13, b"d")]
    assert ring(b"a" * 60, b"b" * 60).since(10) == [(11, b"b" * 60)]
    assert ring(b"a", b"b" * 200).since(10) == [(11, b"b" * 200)]


def test_an_answer_may_be_a_part():
    held = ring(b"a" * 10, b"b" * 10, b"c" * 10)
    assert held.since(10, batches=2) == [(10, b"a" * 10), (11, b"b" * 10)]
    assert held.since(11, nbytes=15) == [(11, b"b" * 10)]
    assert held.since(11, nbytes=5) == [(11, b"b" * 10)]
    assert held.since(12, batches=5) == [(12, b"c" * 10)]


def test_what_was_skipped_is_a_hole_that_shows():
    held = ring(b"a")
    held.skip()
    assert (held.last, held.since(10)) == (11, [])
    held.append(b"c")
    assert held.since(11) == [(12, b"c")]


def test_a_number_that_never_was_is_of_another_life():
    assert ring(b"a", b"b").since(13) == [(10, b"a"), (11, b"b")]
