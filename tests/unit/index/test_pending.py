"""Updates that wait: the last word wins, nothing told twice or lost without saying so."""

from kvtier.index.pending import DISCARD, Pending


def test_the_last_word_of_a_key_is_told_in_the_order_of_the_first():
    pending = Pending(10)
    pending.update([(b"a", b"1"), (b"b", b"1")])
    pending.update([(b"a", DISCARD)])
    assert pending.take(10) == {b"a": DISCARD, b"b": b"1"}


def test_batches_are_bounded_and_in_flight_until_done():
    pending = Pending(10)
    pending.update([(b"a", b"1"), (b"b", b"1"), (b"c", b"1")])
    batch = pending.take(2)
    assert list(batch) == [b"a", b"b"]
    assert len(pending) == 3
    pending.done(batch)
    assert len(pending) == 1
    assert not pending.wait_empty(0)
    pending.done(pending.take(2))
    assert pending.wait_empty(0)


def test_a_batch_put_back_does_not_overrule_newer_words():
    pending = Pending(10)
    pending.update([(b"a", b"1"), (b"b", b"1")])
    batch = pending.take(10)
    pending.update([(b"b", DISCARD), (b"c", b"1")])
    assert pending.put_back(batch)
    assert pending.take(10) == {b"a": b"1", b"b": DISCARD, b"c": b"1"}


def test_over_the_bound_everything_is_dropped_and_said_so():
    pending = Pending(2)
    assert pending.update([(b"a", b"1"), (b"b", b"1")])
    assert not pending.update([(b"c", b"1")])
    assert len(pending) == 0
    assert pending.dropped == 3
    assert pending.update([(b"d", b"1")])


def test_a_batch_put_back_counts_towards_the_bound():
    pending = Pending(2)
    pending.update([(b"a", b"1"), (b"b", b"1")])
    batch = pending.take(2)
    pending.update([(b"c", b"1")])
    assert not pending.put_back(batch)
    assert len(pending) == 0


def test_waiting_ends_at_once_when_there_is_reason():
    pending = Pending(10)
    pending.nudge()
    pending.wait_for_work(60, batch=2, linger=60)
    pending.update([(b"a", b"1"), (b"b", b"1")])
    pending.wait_for_work(60, batch=2, linger=60)
    pending.wait_for_work(0, batch=9, linger=60, idle=True)


def test_the_lag_is_the_age_of_the_oldest_update_that_was_not_told():
    now = [100.0]
    pending = Pending(3, lambda: now[0])
    assert pending.lag == 0
    pending.update([(b"a", b"1")])
    now[0] += 2
    pending.update([(b"b", b"1"), (b"a", b"2")])
    assert pending.lag == 2
    batch = pending.take(1)
    now[0] += 1
    assert pending.lag == 3, "in flight is not told"
    assert pending.put_back(batch)
    assert pending.lag == 3
    pending.done(pending.take(1))
    assert pending.lag == 1
    batch = pending.take(1)
    pending.update([(b"b", b"2")])
    now[0] += 5
    pending.done(batch)
    assert pending.lag == 0, "it changed while it was told: since when is not known"
    now[0] += 4
    assert pending.lag == 4
    pending.update((bytes([n]), b"1") for n in range(4))
    assert (pending.lag, pending.dropped) == (0, 5)
