"""When the index stops asking, and when it asks again."""

import math

import pytest

from kvtier.index.breaker import Breaker
from tests.unit.index.fakes import FakeClock


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def breaker(clock):
    return Breaker(clock, failures=3, pause=0.1, longest=0.3)


def open_(breaker):
    for _ in range(3):
        breaker.failed()


def test_it_opens_after_failures_in_a_row(breaker):
    breaker.failed()
    breaker.failed()
    breaker.succeeded()
    breaker.failed()
    breaker.failed()
    assert breaker.closed
    assert breaker.wait() == math.inf
    breaker.failed()
    assert not breaker.closed
    assert breaker.opened == 1


def test_the_pause_doubles_with_every_failed_probe_up_to_the_longest(breaker, clock):
    open_(breaker)
    for pause in (0.1, 0.2, 0.3, 0.3):
        assert breaker.wait() == pytest.approx(pause)
        assert not breaker.due()
        clock.now += pause + 1e-6
        assert breaker.due()
        breaker.failed()


def test_calls_that_began_before_it_opened_do_not_lengthen_the_pause(breaker):
    open_(breaker)
    breaker.failed()
    assert breaker.wait() == pytest.approx(0.1)


def test_an_answer_closes_it_and_forgets_the_pause(breaker, clock):
    open_(breaker)
    clock.now += 1
    breaker.failed()
    breaker.succeeded()
    assert breaker.closed
    open_(breaker)
    assert breaker.wait() == pytest.approx(0.1)


def test_callers_that_fail_at_the_same_moment_do_not_open_it():
    clock = FakeClock()
    breaker = Breaker(clock, failures=3, pause=0.1, longest=1.0, span=0.04)
    for _ in range(20):
        breaker.failed()
    assert breaker.closed
    clock.now += 0.05
    breaker.failed()
    assert not breaker.closed
    breaker.succeeded()
    clock.now += 0.05
    for _ in range(20):
        breaker.failed()
    assert breaker.closed
