"""`Order` keeps only its lowest rows sorted; walked, it is a sorted list."""

from __future__ import annotations

import random

import numpy as np
import pytest

from kvtier.eviction import order as module
from kvtier.eviction.order import ABSENT, Order


def walked(order: Order) -> list[int]:
    """All rows in the order of the first time that each is walked."""
    return list(dict.fromkeys(row for rows in order.walk() for row in rows))


@pytest.mark.parametrize("always_above", [True, False])
@pytest.mark.parametrize("run", [1, 7, 1024])
def test_it_is_a_sorted_list(monkeypatch, run, always_above):
    """A dict that is sorted anew each time is the oracle. Ranks differ, so that there is one right answer."""
    monkeypatch.setattr(module, "RUN_AT_LEAST", run)
    monkeypatch.setattr(module, "STEP", 3)
    rng = random.Random(5)
    order, ranks = Order(), {}
    for step in range(1500):
        rank = step + (0 if always_above else rng.choice([0, -400]) + rng.random() / 2)
        act = rng.random()
        if act < 0.4:
            row = rng.randrange(200)
            order.put(row, rank)
            ranks[row] = rank
        elif act < 0.6 and ranks:
            rows = rng.sample(sorted(ranks), rng.randrange(1, 1 + min(6, len(ranks))))
            many = [rank + i / 1e4 for i in range(len(rows))]
            order.put_all(np.array(rows), np.array(many))
            ranks |= dict(zip(rows, many, strict=True))
        elif act < 0.8:
            row = rng.randrange(300)
            order.discard(row)
            ranks.pop(row, None)
        if act > 0.3:
            assert walked(order) == sorted(ranks, key=ranks.__getitem__)
    assert all(order.rank(row) == ranks.get(row, ABSENT) for row in range(5000))


def test_rows_of_one_rank_are_all_walked():
    order = Order()
    for row in range(5000):
        order.put(row, 7.0)
    assert sorted(walked(order)) == list(range(5000))


def test_a_row_that_goes_and_comes_back_at_its_rank_does_not_pile_up():
    """Below the horizon for ever, behind a row that stays."""
    order = Order()
    for row in range(2000):
        order.put(row, row)
    for _ in range(5000):
        order.discard(3)
        order.put(3, 3)
        assert next(order.walk())[:4] == [0, 1, 2, 3]
    assert walked(order) == list(range(2000))
    assert len(order._rows) <= 2 * len(order._rank)


def test_what_nobody_walks_does_not_pile_up():
    """A tier that never fills asks for no victims; its blocks are used all the same."""
    order, rows = Order(), np.arange(100)
    for row in rows.tolist():
        order.put(row, 1000.0 + row)
    assert walked(order) == rows.tolist()
    for turn in range(500):
        order.put_all(rows, np.arange(100.0) + turn / 1000)
        order.put(turn % 100, -1.0 - turn)
    assert sum(map(len, order._below)) <= len(order._rank)
    assert walked(order)[0] == 99
