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
from kvtier.memory.filling import Filling
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


def memory_of(folder):
    return (folder / "arena").stat().st_blocks * 512


class TestSteps:
    """Memory comes in steps, and each is there before a slot of it is granted: a missing page would be a SIGBUS."""

    STEP = SIZE // 4

    @pytest.fixture(autouse=True)
    def by_hand(self, monkeypatch):
        monkeypatch.setattr("kvtier.memory.filling.STEP", self.STEP)
        monkeypatch.setattr(Filling, "start", lambda _: None)

    def test_the_first_is_ready_at_once_and_the_rest_step_by_step(self, folder):
        arena = Arena.own(folder, SIZE)
        reader = Arena.attach(folder)
        for ready in range(self.STEP, SIZE + 1, self.STEP):
            assert arena.ready == reader.ready == ready
            assert ready <= memory_of(folder) <= ready + 64 * PAGE
            assert arena.filling.step() == (ready < SIZE)
        assert (folder / "arena").stat().st_size == reader.capacity == SIZE

    def test_a_new_owner_goes_on_where_the_dead_one_was(self, folder):
        first = Arena.own(folder, SIZE)
        first.filling.step()
        first.memory[self.STEP : self.STEP + 4] = 7
        first.close()
        second = Arena.own(folder, SIZE)
        assert second.ready == 2 * self.STEP
        assert second.memory[self.STEP : self.STEP + 4].tolist() == [7] * 4
        while second.filling.step():
            pass
        assert second.ready == SIZE

    def test_each_is_pinned_before_it_is_ready_by_every_owner(self, folder):
        pinned: list[tuple[int, int]] = []
        for _ in range(2):
            arena = Arena.own(folder, SIZE, pin=lambda part: pinned.append((part.nbytes, memory_of(folder))))
            while arena.filling.step():
                assert len(pinned) * self.STEP == arena.ready
            assert [nbytes for nbytes, _ in pinned] == [self.STEP] * 4
            assert all(there >= (i + 1) * self.STEP for i, (_, there) in enumerate(pinned))
            pinned.clear()
            arena.close()

    def test_a_file_system_that_is_full_leaves_what_there_is_until_there_is_room(self, folder, monkeypatch):
        arena = Arena.own(folder, SIZE)
        roomy = shutil.disk_usage
        monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=self.STEP - 1))
        assert not arena.filling.step()
        assert (arena.ready, arena.fault.partition(",")[0]) == (self.STEP, "0 MiB of 1 MiB are allocated")
        assert "0 MiB free: enlarge the file system" in arena.fault
        monkeypatch.setattr(shutil, "disk_usage", roomy)
        assert arena.filling.step()
        assert (arena.ready, arena.fault) == (2 * self.STEP, "")

    def test_what_somebody_else_took_meanwhile_is_no_crash(self, folder, monkeypatch):
        arena = Arena.own(folder, SIZE)

        def full(*_):
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(os, "posix_fallocate", full)
        assert not arena.filling.step()
        assert "No space left on device" in arena.fault
        assert arena.ready == Arena.attach(folder).ready == self.STEP

    def test_files_that_were_removed_get_no_memory_of_the_arena_that_came_after(self, folder):
        first = Arena.own(folder, SIZE)
        shutil.rmtree(folder)
        assert not first.filling.step()
        second = Arena.own(folder, SIZE)
        before = memory_of(folder)
        assert not first.filling.step()
        assert "was replaced" in first.fault
        assert memory_of(folder) == before
        assert second.filling.step()

    def test_nothing_beyond_is_granted_and_slots_of_a_former_life_are_known_when_it_comes(self, folder):
        first = Arena.own(folder, SIZE)
        while first.filling.step():
            pass
        old = CpuTier(first)
        # One writer's slots on both sides of the end of the first step, another's far beyond it.
        granted = [old.grant(20_000, 11)[0] for _ in range(SIZE // 20_480 - 4)]
        for offset in granted:
            if not self.STEP - 25_000 <= offset <= self.STEP + 25_000:
                old.written(offset, 20_000)
        far = next(offset for offset in granted if offset > 3 * self.STEP)
        old._mark(far, 20_000, 12)
        marked = np.flatnonzero(first.writers)
        first.close()

        new = CpuTier(Arena.own(folder, SIZE, pin=lambda _: None))
        assert (new.pool.capacity, new.pool.total) == (self.STEP, SIZE)
        assert set(new.quarantined) == {11}
        pages = set()

        def take_all():
            while slot := new.grant(PAGE):
                pages.add(slot[0] // PAGE)

        take_all()
        assert max(pages) < self.STEP // PAGE
        while new.arena.filling.step():
            new.grow()
            take_all()
        assert set(new.quarantined) == {11, 12}
        assert not pages & set(marked.tolist())
        new.absolve(11)
        new.absolve(12)
        take_all()
        assert pages == set(range(SIZE // PAGE))


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
    with pytest.raises(ConfigError, match="No space left"):
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


def test_private_memory_that_does_not_fit_is_refused_too():
    with pytest.raises(ConfigError, match=r"set cpu\.capacity to at most"):
        Arena.private(1 << 60)


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
