"""What is written to NVMe, and what is refused for which reason."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence

import pytest

from kvtier.errors import ConfigError
from kvtier.eviction import admission as module
from kvtier.eviction.admission import DAY, HOUR, Admission
from kvtier.eviction.ghosts import GHOSTS, WAYS

SIZE = 4096


def key(number: int) -> bytes:
    return hashlib.sha256(number.to_bytes(8, "little")).digest() + bytes(2)


class Tier:
    """A tier of so many blocks, least recently used, behind an admission."""

    def __init__(self, blocks: int, rule: str = "auto", budget: int = 0) -> None:
        self.now = 0.0
        self.admission = Admission(rule, budget, lambda: self.now)
        self.blocks: OrderedDict[int, None] = OrderedDict()
        self.capacity = blocks
        self.written = self.hits = 0

    def ask(self, numbers: Sequence[int], *, again: bool = False) -> list[bool]:
        """A request for blocks: those that are here are read, the others offered; what was offered and is written."""
        self.admission.usage(len(self.blocks) * SIZE, self.capacity * SIZE, self.written * SIZE)
        here = [number for number in numbers if number in self.blocks]
        self.admission.read([key(number) for number in here], [SIZE] * len(here))
        for number in here:
            self.blocks.move_to_end(number)
        self.hits += len(here)
        new = [number for number in numbers if number not in self.blocks]
        answers = self.admission.admit([key(number) for number in new], [SIZE] * len(new), [again] * len(new))
        for number in [number for number, ok in zip(new, answers, strict=True) if ok]:
            self.blocks[number] = None
            self.written += 1
            if len(self.blocks) > self.capacity:
                self.blocks.popitem(last=False)
        return answers


def scans_and_a_loop(tier: Tier, rounds: int, first: int = 10**6) -> None:
    """A loop of 60 that would fit, between blocks that never come again and fill the tier three times a round."""
    for fresh in range(first, first + 300 * rounds, 5):
        tier.ask([fresh // 5 % 60])
        tier.ask(range(fresh, fresh + 5))


def pairs(tier: Tier, count: int) -> None:
    """Every block comes twice, with fewer blocks in between than the tier has room for."""
    for number in range(count):
        tier.ask([number])
        if number >= tier.capacity // 4:
            tier.ask([number - tier.capacity // 4])


@pytest.mark.parametrize("rule", ["auto", "all", "second"])
def test_while_there_is_room_everything_is_written(rule):
    tier = Tier(100, rule)
    assert all(tier.ask(range(87)))
    assert not tier.admission.refused
    assert not tier.admission.selective


def test_under_pressure_second_sight_keeps_what_is_read():
    hits = {}
    for rule in ("auto", "all", "second"):
        tier = Tier(100, rule)
        scans_and_a_loop(tier, 60)
        hits[rule] = tier.hits
        assert tier.admission.selective == (rule != "all")
    assert hits["all"] == 0
    assert hits["second"] > 60 * 60 * 0.9
    assert hits["auto"] > hits["second"] * 0.8, "a few rounds pass before it is sure"


def test_where_second_sight_would_be_late_everything_is_written():
    hits = {}
    for rule in ("auto", "all", "second"):
        tier = Tier(100, rule)
        pairs(tier, 2000)
        hits[rule] = tier.hits
    assert hits["auto"] == hits["all"] == 2000 - 25
    assert hits["second"] < 200


def test_it_follows_when_the_load_changes():
    tier = Tier(100)
    pairs(tier, 2000)
    assert not tier.admission.selective
    scans_and_a_loop(tier, 100)
    assert tier.admission.selective
    tier.hits = 0
    scans_and_a_loop(tier, 10, 10**7)
    assert tier.hits > 10 * 60 * 0.9


def test_a_tier_larger_than_its_models_is_judged_by_a_sample(monkeypatch):
    monkeypatch.setattr(module, "MODEL_BLOCKS", 300)
    tier = Tier(900)
    pairs(tier, 2400)
    models = tier.admission._all, tier.admission._second
    assert all(0 < len(model.blocks) <= 300 for model in models)
    assert all(model.used == len(model.blocks) * SIZE for model in models)
    assert tier.admission._limit < 1 << 63
    assert not tier.admission.selective


def test_what_was_used_in_memory_was_seen_again():
    tier = Tier(100, "second")
    tier.ask(range(100))
    assert tier.ask([200]) == [False]
    assert tier.ask([201], again=True) == [True]
    assert tier.ask([200]) == [True], "offered again: the second sight"
    assert tier.admission.refused == {"first_sight": 1}


def test_what_was_read_and_dropped_was_seen():
    tier = Tier(100, "second")
    tier.ask(range(100))
    tier.ask([5])
    del tier.blocks[5]
    assert tier.ask([5]) == [True]


def test_a_batch_remembers_every_block_of_it():
    """Also those that share a set of places: more blocks than there are sets cannot all have their own."""
    admission = Admission("second", 0, lambda: 0.0)
    admission.usage(100, 100, 0)
    keys = [number.to_bytes(8, "little") + bytes(26) for number in range(1, 1 + 3 * (GHOSTS // WAYS))]
    none = [False] * len(keys)
    assert admission.admit(keys, [SIZE] * len(keys), none) == none
    assert all(admission.admit(keys, [SIZE] * len(keys), none))


def test_nothing_is_no_question():
    admission = Admission("auto", 0, lambda: 0.0)
    assert admission.admit([], [], []) == []
    admission.read([], [])


def test_a_budget_refuses_first_sight_at_its_half_and_everything_at_its_end():
    """24 times 100 blocks a day: 100 may be written at once."""
    tier = Tier(10_000, "all", budget=24 * 100 * SIZE)
    assert sum(tier.ask(range(200))) == 51, "down to below the half"
    assert sum(tier.ask(range(1000, 1200), again=True)) == 50, "and a last one on credit"
    assert tier.admission.refused == {"endurance": 149 + 150}


def test_a_budget_comes_back_with_time():
    tier = Tier(100_000, "all", budget=24 * 100 * SIZE)
    tier.ask(range(1000), again=True)
    written = tier.written
    for number in range(int(2 * DAY / HOUR)):
        tier.now += HOUR
        tier.ask(range(1000 * (number + 1), 1000 * (number + 2)), again=True)
    assert tier.written - written == pytest.approx(2 * 24 * 100, rel=0.02)
    tier.now += 100 * HOUR
    tier.ask(range(10**6, 10**6 + 1000), again=True)
    assert tier.written - written == pytest.approx(2 * 24 * 100 + 100, rel=0.02), "an hour's worth is the most"


def test_the_budget_is_of_what_the_device_writes():
    """A tier that writes twice what it is given (frames, blocks carried over) is granted half."""
    tier = Tier(100_000, "all", budget=24 * 100 * SIZE)
    given = 0
    for number in range(100):
        tier.now += HOUR
        given += sum(tier.ask(range(1000 * number, 1000 * number + 10), again=True))
        tier.admission.usage(len(tier.blocks) * SIZE, tier.capacity * SIZE, 20 * given * SIZE)
        tier.written = 20 * given
    assert given == pytest.approx(100 * 100 / 20, rel=0.1)


def test_an_unknown_rule_is_said():
    with pytest.raises(ConfigError, match=r"nvme\.admission is 'never'; set it to"):
        Admission("never", 0, lambda: 0.0)
