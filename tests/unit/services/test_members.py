"""Who is drained, and who has gone."""

from __future__ import annotations

from dataclasses import dataclass

from kvtier_services import members as module
from kvtier_services.members import Members


@dataclass
class At:
    address: str
    node: str = "n1"


class Page:
    page = b""

    def read(self):
        return self.page

    def write(self, page):
        self.page = page


class Clock:
    now = 1000.0

    def __call__(self):
        return self.now


def test_what_is_known_outlives_the_process():
    page, clock = Page(), Clock()
    members = Members(page, clock)
    assert members.seen({"a": At("1"), "b": At("2")}) == []
    members.drain("a")
    clock.now += 5
    members.seen({"a": At("1")})
    again = Members(page, clock)
    clock.now += 50
    assert again.seen({"a": At("1")}) == []
    assert again.is_drained("a")
    assert again.away(serving=["a"]) == [{"host": "b", "address": "2", "serving": False, "gone_since": 1005.0}]
    assert again.seen({"a": At("1"), "b": At("3")}) == ["b"]
    assert again.away(serving=["b"]) == [{"host": "a", "address": "1", "serving": False, "drained_since": 1000.0}]


def test_a_host_that_dies_while_drained_stays_drained():
    members = Members(Page(), Clock())
    members.seen({"a": At("1")})
    members.drain("a")
    members.seen({})
    assert members.seen({"a": At("1")}) == ["a"]
    assert members.is_drained("a")


def test_who_has_gone_for_good_is_forgotten():
    clock = Clock()
    members = Members(Page(), clock)
    members.seen({"a": At("1")})
    members.seen({})
    clock.now += module.MISSED_FOR + 1
    members.seen({})
    assert members.away([]) == []


def test_only_so_many_are_remembered(monkeypatch):
    monkeypatch.setattr(module, "MOST", 3)
    clock = Clock()
    members = Members(Page(), clock)
    for number in range(6):
        clock.now += 1
        members.seen({f"host{number}": At("1")})
    assert sorted(members.known) == ["host3", "host4", "host5"]


def test_a_ledger_that_cannot_be_read_is_read_later_and_not_overwritten():
    page, clock = Page(), Clock()
    Members(page, clock).drain("a")
    written = page.page

    class Away(Page):
        def read(self):
            raise ConnectionError

        def write(self, page):
            raise AssertionError("what was not read would be lost")

    members = Members(Away(), clock)
    for call in (lambda: members.seen({"b": At("1")}), lambda: members.drain("b")):
        try:
            call()
        except ConnectionError:
            continue
        raise AssertionError
    assert page.page == written


def test_a_host_that_left_and_joined_again_at_once_does_not_wait():
    members = Members(Page(), Clock())
    members.seen({"a": At("1")})
    members.leaving("a")
    members.seen({"a": At("1", "n2")})
    assert not members.is_away("a")


def test_a_leaving_host_that_stays_is_taken_up_again():
    clock = Clock()
    members = Members(Page(), clock)
    members.seen({"a": At("1")})
    members.leaving("a")
    members.seen({"a": At("1")})
    assert members.is_away("a")
    clock.now += module.LEAVING + 1
    members.seen({"a": At("1")})
    assert not members.is_away("a")
