"""The arena as its owner and its clients see it, and what is left of it when the owner dies."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from types import SimpleNamespace

import numpy as np
import pytest

from kvtier.block import PAGE
from kvtier.errors import ConfigError, SessionUnavailable
from kvtier.memory.arena import Arena
from kvtier.memory.lock import FileLock, is_free
from kvtier.tiers.cpu import CpuTier

SIZE = 1 << 20


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr("kvtier.memory.lock.PATIENCE", 0.0)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "arena"


def test_clients_see_what_the_owner_and_writers_write(folder):
    owner = Arena.own(folder, SIZE)
    reader, writer = Arena.attach(folder), Arena.attach(folder, writable=True)
    writer.memory[5000:5003] = [1, 2, 3]
    assert reader.payload(5000, 3) == bytes([1, 2, 3])
    assert owner.renew(PAGE, 100) == reader.generations[1]
    assert reader.epoch == owner.epoch
    assert reader.capacity == SIZE


def test_readers_cannot_write_and_no_client_writes_the_tables(folder):
    Arena.own(folder, SIZE)
    reader, writer = Arena.attach(folder), Arena.attach(folder, writable=True)
    assert not reader.memory.flags.writeable
    assert not writer.generations.flags.writeable
    assert not writer.writers.flags.writeable


def test_only_its_user_may_read_it(folder):
    owner = Arena.own(folder, SIZE)
    for name in ("arena", "tables", "lock"):
        assert stat.S_IMODE((folder / name).stat().st_mode) == 0o600
    assert not stat.S_IMODE(folder.stat().st_mode) & 0o077
    owner.close()


def test_a_group_may_enter_whatever_the_umask(folder):
    before = os.umask(0o077)
    try:
        Arena.own(folder, SIZE, mode=0o660)
    finally:
        os.umask(before)
    assert stat.S_IMODE((folder / "arena").stat().st_mode) == 0o660
    assert stat.S_IMODE(folder.stat().st_mode) & 0o050 == 0o050


def test_a_folder_whose_files_belong_to_its_group_stays_so(folder):
    folder.mkdir()
    folder.chmod(0o2770)
    Arena.own(folder, SIZE, mode=0o660)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o2770
    assert folder.joinpath("clients").stat().st_mode & stat.S_ISGID


def test_its_memory_is_there_from_the_beginning(folder):
    """A page that is missing later would be a SIGBUS in an engine."""
    Arena.own(folder, SIZE)
    assert (folder / "arena").stat().st_blocks * 512 >= SIZE


def test_another_owner_is_refused_while_the_first_lives(folder):
    owner = Arena.own(folder, SIZE)
    with pytest.raises(ConfigError, match=f"running process .*pid {os.getpid()}"):
        Arena.own(folder, SIZE)
    owner.close()
    Arena.own(folder, SIZE).close()


def test_taking_over_moves_epoch_and_all_generations_on_and_keeps_the_bytes(folder):
    first = Arena.own(folder, SIZE)
    first.memory[:4] = 7
    leased = first.renew(8 * PAGE, PAGE)
    untouched = first.generations[0].item()
    reader = Arena.attach(folder)
    first.close()
    second = Arena.own(folder, SIZE)
    assert second.epoch == first.epoch + 1
    assert reader.generations[8] != leased
    assert reader.generations[0] != untouched
    assert second.memory[:4].tolist() == [7] * 4


def test_another_size_is_another_arena_with_another_epoch(folder):
    first = Arena.own(folder, SIZE)
    old_reader = Arena.attach(folder)
    first.close()
    second = Arena.own(folder, 2 * SIZE)
    assert second.capacity == 2 * SIZE
    assert second.epoch != first.epoch
    assert old_reader.memory[SIZE - 1] == 0, "who has mapped the old one can still read it"


def test_an_arena_that_was_removed_comes_back_with_another_epoch(folder):
    first = Arena.own(folder, SIZE)
    shutil.rmtree(first.folder)
    first.close()
    assert not folder.exists()
    assert Arena.own(folder, SIZE).epoch != first.epoch


def test_half_an_arena_is_made_anew(folder):
    Arena.own(folder, SIZE).close()
    with (folder / "arena").open("r+b") as file:
        file.truncate(SIZE // 2)
    with pytest.raises(SessionUnavailable):
        Arena.attach(folder)
    assert Arena.own(folder, SIZE).capacity == SIZE


def test_there_is_nothing_to_attach_to(folder):
    with pytest.raises(SessionUnavailable, match="is kvtier running"):
        Arena.attach(folder)


def test_too_small_a_file_system_says_how_large_it_is_and_what_to_set(folder, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=64 << 20))
    with pytest.raises(ConfigError) as error:
        Arena.own(folder, 256 << 20)
    for part in ("64 MiB free", "256 MiB", "cpu.capacity to at most 57MiB", "arena_dir"):
        assert part in str(error.value)
    assert is_free(folder / "lock")


def test_a_file_system_that_fills_up_meanwhile_keeps_nothing(folder, monkeypatch):
    def full(fd, offset, nbytes):
        if nbytes < SIZE:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ConfigError, match="enlarge the file system"):
        Arena.own(folder, SIZE)
    assert not (folder / "arena").exists()
    assert is_free(folder / "lock")


def test_a_folder_that_cannot_be_made_is_a_configuration_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="arena_dir"):
        Arena.own(tmp_path / "file" / "arena", SIZE)


def test_less_than_a_page_is_too_small(folder):
    with pytest.raises(ConfigError):
        Arena.own(folder, PAGE - 1)


def test_every_page_of_a_slot_moves_on():
    """A slot of another size may have begun at any of them, and somebody may still be copying it without a lease."""
    arena = Arena.private(SIZE)
    before = arena.generations.copy()
    arena.renew(2 * PAGE, 3 * PAGE - 1)
    assert np.flatnonzero(arena.generations != before).tolist() == [2, 3, 4]


def test_a_lock_on_a_deleted_file_is_taken_on_the_new_one(tmp_path):
    """An owner that ends in good order deletes its lock file: who waited for it must not own a ghost."""
    path = tmp_path / "lock"
    first, waiting = FileLock(path), FileLock(path)
    assert first.acquire()
    path.unlink()
    first.close()
    assert waiting.acquire()
    assert not is_free(path)
    assert not FileLock(path).acquire()
    waiting.close()
    waiting.close()
    assert is_free(path)
    assert not waiting.acquire()


def test_a_lock_says_who_holds_it(tmp_path):
    lock = FileLock(tmp_path / "lock")
    lock.note("a long first note")
    lock.note("pid 7")
    assert lock.read() == "pid 7"
    lock.path.unlink()
    assert lock.read() == ""


class TestQuarantine:
    """Slots that a session may still be writing into outlive the process that granted them."""

    def test_a_new_owner_grants_them_to_nobody(self, folder):
        old = CpuTier(Arena.own(folder, SIZE))
        writing = [old.grant(20_000, writer)[0] for writer in (11, 11, 12)]
        done = old.grant(20_000, 11)[0]
        old.written(done, 20_000)
        old.arena.close()
        new = CpuTier(Arena.own(folder, SIZE))
        assert set(new.quarantined) == {11, 12}
        granted = []
        while slot := new.grant(20_000):
            granted.append(slot[0])
        for offset in writing:
            assert not any(offset - 20_480 < other < offset + 20_480 for other in granted)

    def test_absolved_they_are_free_again(self, folder):
        old = CpuTier(Arena.own(folder, SIZE))
        for writer in (11, 12):
            old.grant(200_000, writer)
        old.arena.close()
        new = CpuTier(Arena.own(folder, SIZE))
        assert new.pool.used > 0
        assert new.absolve(11)
        assert new.pool.used > 0, "the other one may write still, next to it"
        assert new.absolve(12)
        assert new.absolve(12) == 0
        assert new.pool.used == 0
        assert not new.arena.writers.any()
        assert CpuTier(new.arena).quarantined == {}

    def test_they_are_in_the_usage(self):
        tier = CpuTier(Arena.private(SIZE))
        slot = tier.grant(20_000, 5)
        tier.quarantine(5, [slot[0]])
        tier.quarantine(6, [])
        assert (tier.usage().blocks, tier.usage().counters) == (0, {"quarantined": 1})
