"""A range that becomes usable in steps."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from kvtier.block import PAGE
from kvtier.memory import filling as module
from kvtier.memory import pinning
from kvtier.memory.arena import Arena
from kvtier.memory.filling import Filling
from kvtier.memory.pinning import Pinner, pieces, pin_as_it_grows
from kvtier.testing.payloads import key_of, payload_of
from kvtier.tiers.base import Slots
from kvtier.tiers.gpu import GpuTier


@pytest.fixture(autouse=True)
def small_steps(monkeypatch):
    monkeypatch.setattr(module, "STEP", 100)
    monkeypatch.setattr(pinning, "STEP", 100)
    monkeypatch.setattr(pinning, "LOOK", 0.001)


def test_steps_begin_at_multiples_wherever_it_begins():
    done: list[tuple[int, int]] = []
    filling = Filling(350, lambda start, end: done.append((start, end)) or "", ready=50)
    while filling.step():
        assert filling.ready == done[-1][1]
    assert done == [(50, 100), (100, 200), (200, 300), (300, 350)]


def test_a_step_that_cannot_be_done_is_said_and_tried_again():
    whys = ["full", "still full", ""]
    filling = Filling(200, lambda *_: whys.pop(0), ready=100)
    for fault in ("full", "still full"):
        assert not filling.step()
        assert (filling.ready, filling.fault) == (100, fault)
    assert filling.step()
    assert (filling.ready, filling.fault) == (200, "")


def test_in_the_background_it_goes_on_until_all_is_ready():
    whole, tries = threading.Event(), iter(["", "full", "", ""])

    def prepare(_start: int, end: int) -> str:
        why = next(tries)
        if end == 300 and not why:
            whole.set()
        return why

    filling = Filling(300, prepare, retry=0.001)
    filling.start()
    assert whole.wait(10.0)
    filling.close()
    filling.close()
    assert (filling.ready, filling.fault) == (300, "")


def test_closing_ends_it_between_two_tries():
    tried = threading.Event()

    def prepare(*_: int) -> str:
        tried.set()
        return "full"

    filling = Filling(300, prepare, retry=3600.0)
    filling.start()
    assert tried.wait(10.0)
    filling.close()
    assert filling.ready == 0


def test_nothing_to_do_starts_nothing():
    before = threading.active_count()
    filling = Filling(300, lambda *_: pytest.fail("there is nothing to prepare"), ready=300)
    filling.start()
    assert not filling.step()
    assert threading.active_count() == before
    filling.close()


class TestPinning:
    def test_a_fault_is_said_once_and_no_more_is_tried(self, monkeypatch):
        tried: list[int] = []
        monkeypatch.setattr(pinning, "cuda_present", lambda: True)
        monkeypatch.setattr(
            pinning, "_register", lambda memory: tried.append(len(memory)) or ("no" if tried[1:] else "")
        )
        said: list[str] = []
        pin = Pinner(said.append)
        for length in (1, 2, 3):
            pin(np.zeros(length, np.uint8))
        assert (said, pin.fault, tried) == (["no"], "no", [1, 2])

    def test_without_cuda_there_is_nothing_to_do(self, monkeypatch):
        monkeypatch.setattr(pinning, "cuda_present", lambda: False)
        pin = Pinner(pytest.fail)
        pin(np.zeros(1, np.uint8))
        assert pin.fault == ""

    def test_another_process_pins_what_the_owner_has_allocated(self):
        class Owned:
            memory, capacity, ready = np.arange(250, dtype=np.uint8), 250, 120

        pinned: list[tuple[int, int]] = []
        some, rest = threading.Event(), threading.Event()

        def pin(part: np.ndarray) -> None:
            pinned.append((int(part[0]), len(part)))
            (rest if len(pinned) == 3 else some).set()

        arena = Owned()
        filling = pin_as_it_grows(arena, pin)
        assert some.wait(10.0)
        assert pinned == [(0, 100)]
        arena.ready = 250
        assert rest.wait(10.0)
        filling.close()
        assert pinned == [(0, 100), (100, 100), (200, 50)]

    def test_the_gpu_tier_copies_so_and_loses_nothing(self, monkeypatch):
        monkeypatch.setattr(pinning, "STEP", PAGE)
        arena = Arena.private(1 << 20)
        tier = GpuTier(1 << 20, arena, "cpu")
        payload = payload_of(7, 20_000)
        arena.memory[3 * PAGE : 3 * PAGE + 20_000] = np.frombuffer(payload, np.uint8)
        assert tier.write([key_of(7)], Slots.of([3 * PAGE], [20_000])) == [True]
        assert tier.read([key_of(7)], Slots.of([20 * PAGE], [20_000])) == [True]
        assert arena.payload(20 * PAGE, 20_000) == payload
        tier.close()

    @pytest.mark.parametrize(
        ("offset", "nbytes", "expected"),
        [
            (0, 100, [(0, 100)]),
            (30, 60, [(30, 60)]),
            (90, 20, [(90, 10), (100, 10)]),
            (150, 250, [(150, 50), (200, 100), (300, 100)]),
            (100, 0, []),
        ],
    )
    def test_a_copy_does_not_cross_what_is_pinned_at_once(self, offset, nbytes, expected):
        assert list(pieces(offset, nbytes)) == expected
