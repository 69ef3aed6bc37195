"""The window of what is asked for, against exact counts; and regrets, in the order in which things happened."""

from __future__ import annotations

import hashlib
import random

import numpy as np
import pytest

from kvtier.eviction.ghosts import WAYS, Ghosts, numbers_of
from kvtier.hierarchy import demand as module
from kvtier.hierarchy.demand import Asked, Demand
from kvtier.hierarchy.sketch import Sketch
from kvtier.hierarchy.window import PART, PARTS


def key(number: int, rank: int = 0) -> bytes:
    return hashlib.sha256(number.to_bytes(8, "little")).digest() + rank.to_bytes(2, "little")


def keys(*numbers: int) -> list[bytes]:
    return [key(number) for number in numbers]


def ask(demand: Demand, when: float, numbers, absent: int = 0, **hits: int) -> None:
    asked = keys(*numbers)
    demand.asked(Asked(when, asked, len(asked), hits, absent))


class TestSketch:
    @pytest.mark.parametrize("count", [0, 1, 2, 10, 50])
    def test_a_few_are_counted_exactly(self, count):
        sketch = Sketch()
        sketch.add(numbers_of(keys(*range(count))))
        assert len(sketch) == count

    @pytest.mark.parametrize("count", [300, 5_000, 40_000, 80_000, 300_000, 3_000_000])
    def test_many_are_counted_within_three_standard_errors(self, count):
        """1.04 / sqrt(2^14) is one; ranges in which older estimators are biased are among these."""
        sketch = Sketch()
        sketch.add(np.random.default_rng(count).integers(0, 1 << 64, count, np.uint64))
        assert abs(len(sketch) / count - 1) < 3 * 1.04 / 128

    def test_what_was_seen_before_does_not_count_again_and_a_union_is_the_union(self):
        one, other = Sketch(), Sketch()
        for _ in range(3):
            one.add(numbers_of(keys(*range(30))))
        other.add(numbers_of(keys(*range(20, 40))))
        assert (len(one), len(other), len(Sketch.union([one, other]))) == (30, 20, 40)

    def test_each_rank_of_a_block_is_a_block(self):
        sketch = Sketch()
        sketch.add(numbers_of([key(1, rank) for rank in range(8)]))
        assert len(sketch) == 8


class TestWindow:
    def test_the_ceiling_is_what_a_cache_without_end_would_hit(self):
        """Against a set and a loop: each block is a miss the first time, and a hit afterwards."""
        chosen, demand = random.Random(1), Demand(0.0)
        seen: set[int] = set()
        asked = would_hit = 0
        for turn in range(200):
            numbers = [min(int(chosen.paretovariate(0.5)), 5000) for _ in range(20)]
            asked += len(numbers)
            for number in numbers:
                would_hit += number in seen
                seen.add(number)
            ask(demand, float(turn), numbers, cpu=3)
        window = demand.status(200.0)["window"]
        assert (window["asked"], window["hits"]["cpu"], window["seconds"]) == (asked, 600, 200.0)
        assert window["distinct"] == pytest.approx(len(seen), rel=0.03)
        assert window["ceiling"] == pytest.approx(would_hit / asked, abs=0.02)

    def test_the_ceiling_is_never_below_what_was_hit(self):
        """Blocks that were saved before anybody asked for them are hits the first time."""
        demand = Demand(0.0)
        ask(demand, 1.0, range(10), cpu=9)
        assert demand.status(2.0)["window"]["ceiling"] == 0.9

    def test_nothing_asked_is_no_ratio(self):
        window = Demand(5.0).status(5.0)["window"]
        assert (window["asked"], window["distinct"], window["ceiling"], window["seconds"]) == (0, 0, 0.0, 0.0)

    def test_what_is_older_than_an_hour_is_forgotten(self):
        demand = Demand(0.0)
        ask(demand, 1.0, range(10))
        ask(demand, PART + 1.0, range(5, 20))
        assert demand.status(PART + 2.0)["window"]["distinct"] == 20
        window = demand.status(PARTS * PART + 1.0)["window"]
        assert (window["asked"], window["distinct"]) == (15, 15)
        assert window["seconds"] == pytest.approx((PARTS - 1) * PART + 1.0)
        assert demand.status((PARTS + 1) * PART + 1.0)["window"]["asked"] == 0

    def test_notes_of_several_times_are_each_of_their_own(self):
        demand = Demand(0.0)
        for part in range(PARTS + 2):
            ask(demand, part * PART, range(part, part + 1))
        assert demand.status((PARTS + 1) * PART)["window"]["distinct"] == PARTS

    def test_a_clock_that_is_set_back_loses_nothing_but_the_future(self):
        demand = Demand(10 * PART)
        ask(demand, 10 * PART, range(3))
        window = demand.status(5 * PART)["window"]
        assert (window["asked"], window["seconds"]) == (0, 0.0)
        ask(demand, 5 * PART, range(3))
        assert demand.status(5 * PART)["window"]["asked"] == 3


class TestRegrets:
    def test_a_block_that_was_evicted_is_regretted_once(self):
        demand = Demand(0.0)
        demand.dropped(keys(1, 2, 3), evicted=True)
        ask(demand, 1.0, (0, 1, 2), absent=2)
        ask(demand, 1.0, (0, 1, 2), absent=2)
        assert demand.status(2.0)["asked_again"] == 2
        demand.dropped(keys(1), evicted=True)
        ask(demand, 3.0, (1,), absent=1)
        assert demand.status(4.0)["asked_again"] == 3

    def test_only_what_missed_counts(self):
        demand = Demand(0.0)
        demand.dropped(keys(1), evicted=True)
        ask(demand, 1.0, (1, 2), absent=1, cpu=1)
        assert demand.status(2.0)["asked_again"] == 0

    def test_what_was_dropped_on_request_is_not_regretted(self):
        demand = Demand(0.0)
        demand.dropped(keys(1, 2), evicted=True)
        demand.dropped(keys(1), evicted=False)  # stored anew meanwhile
        ask(demand, 1.0, (1, 2), absent=2)
        assert demand.status(2.0)["asked_again"] == 1

    def test_the_order_counts(self):
        demand = Demand(0.0)
        ask(demand, 1.0, (1,), absent=1)
        demand.dropped(keys(1), evicted=True)
        assert demand.status(2.0)["asked_again"] == 0


def test_very_many_notes_are_read_by_who_leaves_one(monkeypatch):
    """Nothing is lost, and memory is bounded."""
    monkeypatch.setattr(module, "WAITING", 100)
    demand = Demand(0.0)
    for first in range(0, 1000, 10):
        ask(demand, 1.0, range(first, first + 10))
        assert sum(len(note.keys) for note in demand._notes) <= 100
    assert demand.status(2.0)["window"]["asked"] == 1000


def test_notes_without_keys_are_bounded_too(monkeypatch):
    monkeypatch.setattr(module, "WAITING", 100)
    demand = Demand(0.0)
    for _ in range(1000):
        demand.asked(Asked(1.0, (), 5))
        assert len(demand._notes) <= 101
    assert demand.status(1.0)["window"]["asked"] == 5000


def test_ghosts_forget_the_oldest_and_what_they_are_told_to():
    ghosts = Ghosts(WAYS)
    blocks = np.arange(1, WAYS + 2, dtype=np.uint64)
    assert not ghosts.remember(blocks[:WAYS]).any()
    assert ghosts.remember(blocks[:WAYS]).all()
    assert not ghosts.remember(blocks[WAYS:]).any()
    assert ghosts.forget(blocks) == WAYS
    assert ghosts.forget(blocks) == 0
    assert not ghosts.remember(blocks[1:2]).any()
