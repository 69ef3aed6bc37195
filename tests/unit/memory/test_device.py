"""Memory of a GPU tier, as its owner and as other processes see it; emulated in host memory."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

from kvtier.errors import ConfigError
from kvtier.memory import device as device_module
from kvtier.memory.arena import Arena
from kvtier.memory.device import MEMORY, TABLE, DeviceArena, DeviceMemory, attach

CPU = torch.device("cpu")
NBYTES = 64 << 10


@pytest.fixture
def folder(tmp_path):
    arena = Arena.own(tmp_path / "arena", 1 << 20)
    yield tmp_path / "arena"
    arena.close()


class Nothing(dict):
    """Does not keep what it is given."""

    def __setitem__(self, key, value):
        pass


@pytest.fixture
def elsewhere(monkeypatch):
    """As if who attaches were another process."""
    monkeypatch.setattr(device_module, "_mine", Nothing())


def opened(handle: bytes) -> DeviceMemory:
    memory = attach(handle, "cpu")
    assert isinstance(memory, DeviceMemory), memory
    return memory


def test_another_process_reads_what_the_owner_writes(folder, elsewhere):
    owner = DeviceArena(NBYTES, CPU, folder)
    reader = opened(owner.share())
    assert (reader.epoch, reader.nbytes, reader.current) == (owner.epoch, NBYTES, True)
    generation = owner.renew(8192, 5000)
    owner.memory[8192:8200] = 7
    assert reader.memory[8190:8202].tolist() == [0, 0, *[7] * 8, 0, 0]
    assert reader.generations[2:4].tolist() == [generation, generation]
    assert reader.generations[1] == reader.generations[4] != generation


def test_readers_cannot_write(folder, elsewhere):
    reader = opened(DeviceArena(NBYTES, CPU, folder).share())
    for array in (reader.memory, reader.generations, reader.head):
        assert not array.flags.writeable


def test_closed_memory_says_so_and_stays_what_it_was(folder, elsewhere):
    owner = DeviceArena(NBYTES, CPU, folder)
    owner.memory.fill_(3)
    reader = opened(owner.share())
    owner.close()
    owner.close()
    assert not reader.current
    assert (reader.memory == 3).all()
    assert not (folder / MEMORY).exists()
    assert not (folder / TABLE).exists()
    assert "is not here" in str(attach(owner.share(), "cpu"))


def test_the_next_life_says_so_for_one_that_was_killed(folder, elsewhere):
    killed = DeviceArena(NBYTES, CPU, folder)
    killed.memory.fill_(3)
    reader = opened(killed.share())
    owner = DeviceArena(NBYTES, CPU, folder)
    owner.memory.fill_(9)
    assert not reader.current
    assert (reader.memory == 3).all()
    assert "another life" in str(attach(killed.share(), "cpu"))
    assert (opened(owner.share()).memory == 9).all()
    killed.close()
    assert opened(owner.share()).current


def test_whoever_may_read_the_arena_may_read_it(tmp_path):
    arena = Arena.own(tmp_path / "arena", 1 << 20, mode=0o660)
    owner = DeviceArena(NBYTES, CPU, tmp_path / "arena")
    modes = {name: os.stat(tmp_path / "arena" / name).st_mode for name in ("arena", MEMORY, TABLE)}
    assert len(set(modes.values())) == 1
    owner.close()
    arena.close()


def test_memory_without_a_folder_is_for_this_process(elsewhere, monkeypatch):
    owner = DeviceArena(NBYTES, CPU, None)
    assert attach(owner.share(), "cpu") == "it is memory of another process alone"
    monkeypatch.setattr(device_module, "_mine", {owner.epoch: owner})
    assert opened(owner.share()).memory.ctypes.data == owner.memory.data_ptr()


def test_there_is_nothing_to_attach_for_kv_on_another_kind_of_device(folder):
    assert attach(DeviceArena(NBYTES, CPU, folder).share(), "cuda:0") == ""


@pytest.mark.parametrize("handle", [b"", b"nonsense", b"\x93\x01\x02\x03"])
def test_what_is_no_handle_is_refused_with_words(handle):
    why = attach(handle, "cpu")
    assert isinstance(why, str)
    assert why


def test_memory_that_does_not_fit_is_a_configuration_error(folder):
    with pytest.raises(ConfigError, match=r"gpu\.capacity"):
        DeviceArena(1 << 50, CPU, folder)
    assert not (folder / MEMORY).exists()


def test_epochs_and_generations_begin_anywhere(folder):
    lives = [DeviceArena(NBYTES, CPU, folder) for _ in range(3)]
    assert len({life.epoch for life in lives}) == len({int(life.generations[0]) for life in lives}) == 3
    assert all(np.unique(life.generations).size == 1 for life in lives)
