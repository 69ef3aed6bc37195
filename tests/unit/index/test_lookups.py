"""Lookups keep their time and their connections, whatever servers do; on connections that are scripted."""

from __future__ import annotations

import threading

import pytest
from redis import ConnectionError as RedisConnectionError
from redis import ResponseError
from redis import TimeoutError as RedisTimeoutError
from redis.crc import key_slot
from redis.exceptions import MovedError

from kvtier.index.find import ALONE, NOBODY, SLOTS, UNKNOWN, Layout
from kvtier.index.lookups import Lookups, gets, packed, split
from kvtier.index.ready import Ready
from tests.unit.index.fakes import FakeClock

KEYS = [bytes([65 + number]) * 34 for number in range(6)]


class Line:
    """A connection that answers what it is told to.

    Attributes:
        answers: what the next reads give, or raise.
        sent: what was written.
        timeouts: of the reads.
        open: whether it is.
    """

    def __init__(self, trouble=None):
        self.trouble = trouble
        self.answers, self.sent, self.timeouts = [], [], []
        self.open = False

    def connect(self):
        if self.trouble:
            raise self.trouble
        self.open = True

    def disconnect(self):
        self.open = False

    def update_current_socket_timeout(self, relaxed_timeout):
        self.every = relaxed_timeout

    def send_packed_command(self, command):
        self.sent.append(b"".join(command))

    def read_response(self, *, timeout):
        self.timeouts.append(timeout)
        answer = self.answers.pop(0)
        if callable(answer):
            answer = answer()
        if isinstance(answer, Exception):
            raise answer
        return answer


class Lines:
    """Makes connections, the scripted ones first."""

    def __init__(self):
        self.made, self.coming = [], []

    def __call__(self, where):
        def make():
            self.made.append(self.coming.pop(0) if self.coming else Line())
            return self.made[-1]

        return make


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def lines():
    return Lines()


def make(lines, clock, layout=ALONE):
    lookups = Lookups(lines, layout, timeout=0.02, clock=clock)
    lookups.open()
    return lookups


def test_a_single_master_is_asked_once(lines, clock):
    lookups = make(lines, clock)
    lines.made[0].answers = [[b"a", None]]
    assert lookups.get(KEYS[:2]) == [b"a", None]
    assert lines.made[0].sent == [b"*3\r\n$4\r\nMGET\r\n$34\r\n" + KEYS[0] + b"\r\n$34\r\n" + KEYS[1] + b"\r\n"]
    assert lines.made[0].every == 0.02


def test_each_read_gets_what_is_left_of_the_time(lines, clock):
    def late():
        clock.now += 0.015
        return b"x"

    layout = Layout((("a", 1), ("b", 2)), tuple(slot % 2 for slot in range(SLOTS)))
    lookups = make(lines, clock, layout)
    for line in lines.made:
        line.answers = [late] * 6
    lookups.get(KEYS)
    timeouts = [timeout for line in lines.made for timeout in line.timeouts]
    assert timeouts[0] == pytest.approx(0.02)
    assert timeouts[1] == pytest.approx(0.005)
    assert all(0 < timeout < 0.001 for timeout in timeouts[2:])


def test_a_time_out_costs_the_connection_and_is_not_tried_again(lines, clock):
    lookups = make(lines, clock)
    lines.made[0].answers = [RedisTimeoutError("late")]
    with pytest.raises(RedisTimeoutError):
        lookups.get(KEYS)
    assert not lines.made[0].open
    assert len(lines.made) == 1
    lookups.open()
    lines.made[1].answers = [[b"a"]]
    assert lookups.get(KEYS[:1]) == [b"a"]


def test_a_connection_that_the_server_had_closed_costs_nothing_but_another_try(lines, clock):
    lookups = make(lines, clock)
    lookups.wake = lookups.open
    lines.made[0].answers = [RedisConnectionError("closed")]
    fresh = Line()
    fresh.answers = [[b"a"]]
    lines.coming = [fresh]
    assert lookups.get(KEYS[:1]) == [b"a"]


def test_an_error_of_the_server_is_raised(lines, clock):
    lookups = make(lines, clock)
    lines.made[0].answers = [ResponseError("NOPERM")]
    with pytest.raises(ResponseError):
        lookups.get(KEYS)


def test_before_a_master_is_known_there_is_no_answer(lines, clock):
    lookups = make(lines, clock, UNKNOWN)
    with pytest.raises(RedisConnectionError):
        lookups.get(KEYS)
    with pytest.raises(RedisConnectionError):
        lookups.ping()
    lookups.take(ALONE)
    lookups.open()
    lines.made[0].answers = [[b"a"]]
    assert lookups.get(KEYS[:1]) == [b"a"]


def test_masters_of_a_cluster_get_their_own_keys_and_answers_come_in_the_order_asked(lines, clock):
    layout = Layout((("a", 1), ("b", 2)), tuple(int(slot >= SLOTS // 2) for slot in range(SLOTS)))
    lookups = make(lines, clock, layout)
    parts = {number: [key for key in KEYS if layout.of(key) == number] for number in (0, 1)}
    assert all(parts.values())
    for number, line in enumerate(lines.made):
        line.answers = [key[:1] for key in parts[number]]
    assert lookups.get(KEYS) == [key[:1] for key in KEYS]
    assert [line.sent for line in lines.made if line.sent] == [[gets(parts[number])[0]] for number in (0, 1)]
    assert not lookups.misplaced


def test_what_is_elsewhere_is_a_miss_that_asks_for_a_look(lines, clock):
    layout = Layout((("a", 1),), tuple(0 if slot < SLOTS // 2 else NOBODY for slot in range(SLOTS)))
    here = [key for key in KEYS if layout.of(key) == 0]
    lookups = make(lines, clock, layout)
    lines.made[0].answers = [MovedError("1 127.0.0.1:7"), *[b"x"] * (len(here) - 1)]
    found = dict(zip(KEYS, lookups.get(KEYS), strict=True))
    assert [found[key] for key in here] == [None, *[b"x"] * (len(here) - 1)]
    assert all(found[key] is None for key in KEYS if key not in here)
    assert lookups.misplaced


def test_slots_are_the_servers_even_of_keys_with_braces():
    keys = [*KEYS, b"{" * 34, b"a{b}c" + bytes(29), b"{}" + bytes(32), b"}{" + bytes(32)]
    layout = Layout((("a", 1),), tuple(slot for slot in range(SLOTS)))
    assert split(layout, keys) == {key_slot(key): [place] for place, key in enumerate(keys)}
    assert packed(b"PING", ()) == [b"*1\r\n$4\r\nPING\r\n"]


def test_who_finds_no_connection_waits_for_one_and_no_longer_than_he_may():
    woken = threading.Event()
    ready = Ready(Line, woken.set, 0.02)
    with pytest.raises(RedisTimeoutError):
        ready.borrow(0.0)
    assert woken.is_set()
    ready.open()
    lent = ready.borrow(0.0)
    waiting = threading.Thread(target=lambda: ready.give(ready.borrow(10.0)))
    waiting.start()
    while ready.wanted < 2:
        pass
    ready.give(lent)
    waiting.join(10.0)
    assert not waiting.is_alive()
    ready.open()
    assert ready.borrow(0.0) is not ready.borrow(0.0)


def test_connections_that_come_back_late_are_closed():
    ready = Ready(Line, lambda: None, 0.02)
    ready.open()
    lent = ready.borrow(0.0)
    ready.close()
    ready.give(lent)
    assert not lent.open
