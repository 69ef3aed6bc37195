"""What the GPU tier does beyond the seam's laws."""

from __future__ import annotations

import threading

import pytest
import torch

from kvtier.errors import ConfigError
from kvtier.memory.arena import Arena
from kvtier.testing.tier import Desk
from kvtier.tiers.gpu import GpuTier


@pytest.fixture
def desk():
    arena = Arena.private(4 << 20)
    return Desk(GpuTier(1 << 20, arena, device="cpu"), arena)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_cuda_the_error_says_what_emulates():
    with pytest.raises(ConfigError, match='"cpu" to emulate'):
        GpuTier(1 << 20, Arena.private(4096), device="cuda:0")


def test_an_unknown_device_is_a_configuration_error():
    with pytest.raises(ConfigError, match="nonsense"):
        GpuTier(1 << 20, Arena.private(4096), device="nonsense")


def test_it_refuses_when_full_and_takes_more_after_a_removal(desk):
    said = desk.write(list(range(40)), 40_000)
    held = [seed for seed in range(40) if said[seed]]
    assert 0 < len(held) < 40
    assert desk.tier.usage().counters["refused"] == 40 - len(held)
    assert desk.tier.dropped() == []
    desk.tier.remove(list(desk.tier.inventory().keys)[:1])
    assert desk.write([99], 40_000) == [True]
    assert desk.read(held[1:]) == [True] * (len(held) - 1)


def test_a_block_removed_while_it_is_copied_stays_until_the_copy_ends(desk, monkeypatch):
    desk.write([1], 40_000)
    copy = desk.tier._copy
    copying, go_on = threading.Event(), threading.Event()

    def slow(copies, *, inward):
        if not inward:
            copying.set()
            assert go_on.wait(30)
        return copy(copies, inward=inward)

    monkeypatch.setattr(desk.tier, "_copy", slow)
    answers = []
    reader = threading.Thread(target=lambda: answers.extend(desk.read([1])))
    reader.start()
    assert copying.wait(30)
    desk.tier.remove(list(desk.tier.inventory().keys))
    other = Desk(desk.tier, desk.arena, 1 << 20)
    other.write(list(range(10, 50)), 40_000)
    go_on.set()
    reader.join()
    assert answers == [True]
    assert desk.tier.usage().blocks == len(desk.tier.inventory())


def test_a_failing_device_is_a_counted_no(desk, monkeypatch):
    desk.write([1], 5000)
    memory = desk.tier._memory

    class Broken:
        def __getitem__(self, _):
            raise RuntimeError("CUDA error: device-side assert triggered")

    working = memory.memory
    monkeypatch.setattr(memory, "memory", Broken())
    assert desk.read([1]) == [False]
    assert desk.write([2], 5000) == [False]
    usage = desk.tier.usage()
    assert usage.counters == {"read_error": 1, "write_error": 1}
    assert "device-side assert" in usage.fault
    monkeypatch.setattr(memory, "memory", working)
    assert desk.read([1]) == [True]
    assert desk.tier.usage().fault == ""
    assert desk.tier.usage().used == usage.used
