"""A failing disk is a counted no, never an exception and never a wrong byte."""

from __future__ import annotations

import errno
import shutil
import threading

import pytest

from kvtier.errors import ConfigError
from kvtier.testing.payloads import key_of
from kvtier.tiers.nvme import transfer
from kvtier.tiers.nvme.health import FAILURES, PAUSE
from kvtier.tiers.nvme.recovery import FILE

FIRST = 2 * 4096
"""Where the first record lies: behind the superblock and the first page of its region."""
FAULTS = [errno.ENOSPC, errno.EIO, errno.EROFS, errno.ENOENT]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_failed_write_is_refused_and_the_next_one_works(open_nvme, disk, fault):
    desk = open_nvme()
    desk.write([1], 5000)
    disk.errors["pwritev"] = fault
    assert desk.write([1, 2, 3], 5000) == [True, False, False]
    assert desk.tier.usage().counters["write_error"] == 1
    assert "failed" in desk.tier.usage().fault
    disk.errors.clear()
    assert desk.read([1, 2, 3], 5000) == [True, False, False]
    assert desk.write([2, 3], 5000) == [True, True]
    assert desk.tier.usage().fault == ""
    assert desk.read([1, 2, 3]) == [True] * 3


@pytest.mark.parametrize("fault", FAULTS)
def test_a_failed_read_is_a_miss_and_the_key_may_be_written_again(open_nvme, disk, fault):
    desk = open_nvme()
    desk.write([1, 2], 5000)
    disk.errors["preadv"] = fault
    assert desk.read([1]) == [False]
    assert desk.tier.usage().counters["read_error"] == 1
    assert desk.tier.usage().fault
    disk.errors.clear()
    assert desk.write([1], 5000) == [True]
    assert desk.tier.usage().counters["written_nbytes"] == 3 * (4096 + 8192), "elsewhere, because the place is bad"
    assert desk.read([1, 2]) == [True, True]
    assert desk.tier.usage().fault == ""


@pytest.mark.parametrize(("call", "work"), [("pwritev", "write"), ("preadv", "read")])
def test_after_some_failures_the_disk_is_left_alone_for_a_while(open_nvme, disk, clock, call, work):
    desk = open_nvme()
    desk.write([0], 5000)
    disk.errors[call] = errno.EIO
    do = {"write": lambda: desk.write([1], 5000), "read": lambda: desk.read([0])}[work]
    for _ in range(FAILURES):
        assert do() == [False]
    before = disk.calls[call]
    assert do() == [False]
    assert disk.calls[call] == before
    clock.now += PAUSE
    assert do() == [False]
    assert do() == [False]
    assert disk.calls[call] == before + 1, "one try, then the next pause"
    disk.errors.clear()
    clock.now += PAUSE
    assert do() == [True]
    assert desk.tier.usage().fault == ""


def test_what_follows_a_failed_write_in_its_batch_does_not_count(open_nvme, disk, monkeypatch):
    """Recovery follows the frames: what lies behind a hole would be lost, so it is not acknowledged."""
    monkeypatch.setattr(transfer, "TRANSFER", 12 << 10)
    desk = open_nvme()
    places: list[int] = []

    def fail_third(offset: int) -> None:
        places.append(offset)
        if offset == FIRST + 2 * 12288:
            raise OSError(errno.EIO, "bad place")

    disk.before["pwritev"] = fail_third
    assert desk.write([1, 2, 3, 4, 5], 5000) == [True, True, False, False, False]
    assert len(places) == 1 + 5
    disk.before.clear()
    desk2 = open_nvme(crashed=True)
    desk2.sizes = desk.sizes
    assert desk2.contains([1, 2, 3, 4, 5]) == [True, True, False, False, False]
    assert desk2.write([6, 7], 5000) == [True, True]
    assert desk2.read([1, 2, 6, 7]) == [True] * 4


@pytest.mark.parametrize("at_most", [4096, 4096 + 512, 20480])
def test_short_reads_and_writes_are_continued(open_nvme, disk, at_most):
    desk = open_nvme(direct=False)
    disk.at_most = at_most
    assert desk.write([1, 2, 3], 30_000) == [True] * 3
    assert desk.read([3, 2, 1]) == [True] * 3
    disk.at_most = 0
    assert desk.read([1]) == [False]
    assert desk.write([4], 5000) == [False]


@pytest.mark.parametrize("place", [FIRST + 5, FIRST + 4096 + 30, FIRST + 4096 + 128 + 40, FIRST + 4096 + 4999])
def test_flipped_bits_are_a_miss_and_forgotten(open_nvme, tmp_path, place):
    """In the frame (which only recovery reads), in the payload's header, in its body, in its last byte."""
    desk = open_nvme()
    desk.write([1], 5000)
    with (tmp_path / "store" / FILE).open("r+b") as file:
        file.seek(place)
        old = file.read(1)
        file.seek(place)
        file.write(bytes([old[0] ^ 0x10]))
    in_frame = place < FIRST + 4096
    assert desk.read([1]) == [in_frame]
    assert desk.contains([1]) == [in_frame]
    assert desk.tier.usage().counters.get("corrupt", 0) == (not in_frame)
    assert desk.tier.dropped() == ([] if in_frame else [key_of(1)])
    assert open_nvme(crashed=True).read([1], 5000) == [False]


def test_a_payload_that_is_not_its_keys_is_never_served(open_nvme):
    """Whoever wrote it under the wrong key: the address in the header decides."""
    desk = open_nvme()
    slots = desk.slots([5000])
    desk.write([1], 5000)
    assert desk.tier.write([key_of(2)], slots) == [True]
    assert desk.read([2], 5000) == [False]
    assert desk.tier.usage().counters["corrupt"] == 1


def test_a_deleted_folder_is_made_again(open_nvme, tmp_path, disk, clock):
    desk = open_nvme()
    desk.write([1, 2], 5000)
    shutil.rmtree(tmp_path / "store")
    assert desk.read([1]) == [True], "the open file still has it"
    assert desk.write([3], 5000) == [True]
    assert sorted(desk.tier.dropped()) == sorted([key_of(1), key_of(2)])
    assert desk.read([1, 2, 3]) == [False, False, True]
    assert (tmp_path / "store" / FILE).exists()
    shutil.rmtree(tmp_path / "store")
    disk.errors["allocate"] = errno.ENOSPC
    assert desk.write([4], 5000) == [False]
    assert "deleted" in desk.tier.usage().fault
    assert desk.read([3]) == [False]
    disk.errors.clear()
    assert desk.write([4], 5000) == [False], "it is left alone for a while"
    clock.now += PAUSE
    assert desk.write([4], 5000) == [True]
    assert desk.tier.dropped() == [key_of(3)]
    assert desk.read([4]) == [True]


def test_a_region_is_not_overwritten_while_it_is_read(open_nvme, disk):
    desk = open_nvme()
    desk.write([0], 30_000)
    reading, go_on = threading.Event(), threading.Event()

    def block(_: int) -> None:
        reading.set()
        assert go_on.wait(30)

    disk.before["preadv"] = block
    answers: list[bool] = []
    reader = threading.Thread(target=lambda: answers.extend(desk.read([0])))
    reader.start()
    assert reading.wait(30)
    other = type(desk)(desk.tier, desk.arena, 1 << 20)
    writer = threading.Thread(target=lambda: [other.write([seed], 30_000) for seed in range(1, 40)])
    writer.start()
    while desk.contains([0]) == [True]:
        pass
    writer.join(0.05)
    assert writer.is_alive()
    assert not any(other.contains([39]))
    go_on.set()
    for thread in (reader, writer):
        thread.join()
    assert answers == [True]
    assert other.contains([39]) == [True]


@pytest.mark.parametrize(
    ("call", "fault"), [("allocate", errno.ENOSPC), ("open", errno.EACCES), ("pwritev", errno.EIO)]
)
def test_a_store_that_cannot_be_made_is_a_configuration_error(open_nvme, disk, tmp_path, call, fault):
    disk.errors[call] = fault
    with pytest.raises(ConfigError, match=r"set nvme\.(path|capacity)"):
        open_nvme()
    assert not list((tmp_path / "store").glob(f"{FILE}*")), "nothing half made is left"
    disk.errors.clear()
    assert open_nvme().write([1], 5000) == [True]


def test_where_direct_io_is_refused_it_is_buffered_and_says_so(open_nvme, disk):
    def refuse(flags: int) -> None:
        import os

        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")

    disk.before["open"] = refuse
    desk = open_nvme()
    assert not desk.tier.direct
    assert "buffered" in desk.tier.notes[0]
    assert desk.write([1], 5000) == desk.read([1], 5000) == [True]


def test_direct_io_refused_at_the_first_read_is_buffered_too(open_nvme, disk):
    open_nvme()
    reads = []

    def refuse_second(_: int) -> None:
        reads.append(1)
        if len(reads) == 2:
            raise OSError(errno.EINVAL, "Invalid argument")

    disk.before["preadv"] = refuse_second
    desk = open_nvme()
    assert not desk.tier.direct


def test_a_region_that_cannot_be_read_is_empty_and_the_others_are_there(open_nvme, disk):
    desk = open_nvme()
    for seed in range(8):
        desk.write([seed], 30_000)

    def fail_first_region(offset: int) -> None:
        if offset == 4096:
            raise OSError(errno.EIO, "bad place")

    disk.before["preadv"] = fail_first_region
    again = open_nvme()
    assert again.contains(range(8)) == [False] * 3 + [True] * 5
    assert "region 0 could not be read" in again.tier.notes[0]
