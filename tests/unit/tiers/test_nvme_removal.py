"""What was removed stays removed, whatever ends the process."""

from __future__ import annotations

import errno

import pytest

from kvtier.testing.payloads import key_of
from kvtier.tiers.nvme.frames import REMOVAL
from kvtier.tiers.nvme.health import FAILURES, PAUSE
from kvtier.tiers.nvme.log import RegionLog
from kvtier.tiers.nvme.recovery import FILE
from kvtier.tiers.nvme.regions import Geometry

EACH, COUNT = 10, 7
"""A store of 1 MiB has 7 regions, and each has room for 10 records of 5,000 bytes."""
REGION = 128 << 10


def remove(desk, *seeds: int) -> None:
    desk.tier.remove([key_of(seed) for seed in seeds])


def counted(desk, name: str) -> int:
    return desk.tier.usage().counters.get(name, 0)


@pytest.mark.parametrize("crashed", [True, False])
@pytest.mark.parametrize("more", [0, EACH], ids=["in the newest region", "in a region with a table"])
def test_removed_keys_stay_removed(open_nvme, crashed, more):
    desk = open_nvme()
    desk.write(range(4), 5000)
    remove(desk, 1, 2, 99)
    desk.write([1], 5000)
    for seed in range(100, 100 + more):
        desk.write([seed], 5000)
    for _ in range(2):
        assert open_nvme(crashed=crashed).read(range(4), 5000) == [True, True, False, True]


def test_what_was_never_there_costs_nothing(open_nvme, disk):
    desk = open_nvme()
    desk.write([1], 5000)
    before = disk.written
    remove(desk, 2, 3)
    assert disk.written == before


def test_one_page_says_that_many_are_removed(open_nvme, disk):
    desk = open_nvme()
    desk.write(range(50), 192)
    before = disk.written
    remove(desk, *range(50))
    assert disk.written - before == 4096
    assert open_nvme(crashed=True).tier.inventory().keys == []


def test_a_hundred_thousand_keys_go_in_few_records():
    log = RegionLog(Geometry(257 << 20, 8))
    log.begin(1)
    log.removed.update((key_of(0)[:-4] + number.to_bytes(4, "little"), None) for number in range(100_000))
    records = 0
    while log.removed:
        laid = log.lay_out_removal(b"")
        assert laid is not None
        frame, content = laid
        assert frame.row.kind == REMOVAL
        assert frame.row.span >= len(content)
        log.append_removal(frame, content)
        records += 1
    assert records == 4


def test_when_the_device_refuses_they_are_gone_and_it_is_tried_again(open_nvme, disk):
    desk = open_nvme()
    desk.write(range(4), 5000)
    disk.errors["pwritev"] = errno.EROFS
    remove(desk, 1, 2)
    assert desk.contains(range(4)) == [True, False, False, True]
    assert counted(desk, "removal_error") == 1
    assert "failed" in desk.tier.usage().fault
    disk.errors.clear()
    assert desk.write([5], 5000) == [True]
    assert desk.tier.usage().fault == ""
    assert open_nvme(crashed=True).contains(range(6)) == [True, False, False, True, False, True]


def test_a_device_that_is_left_alone_is_not_asked(open_nvme, disk, clock):
    desk = open_nvme()
    desk.write([1], 5000)
    disk.errors["pwritev"] = errno.EIO
    for _ in range(FAILURES):
        desk.write([2], 5000)
    calls, errors = disk.calls["pwritev"], counted(desk, "removal_error")
    remove(desk, 1)
    assert disk.calls["pwritev"] == calls
    assert counted(desk, "removal_error") == errors + 1
    disk.errors.clear()
    clock.now += PAUSE
    remove(desk, 1)
    assert open_nvme(crashed=True).tier.inventory().keys == []


def test_closing_tries_again(open_nvme, disk):
    desk = open_nvme()
    desk.write([1, 2], 5000)
    disk.errors["pwritev"] = errno.EIO
    remove(desk, 1)
    disk.errors.clear()
    assert open_nvme().tier.inventory().keys == [key_of(2)]


def test_without_room_the_oldest_region_goes(open_nvme):
    desk = open_nvme()
    for seed in range(EACH * COUNT):
        desk.write([seed], 5000)
    assert counted(desk, "evicted") == 0
    remove(desk, *range(EACH, EACH + 3))
    assert counted(desk, "evicted") == EACH
    assert sorted(desk.tier.dropped()) == sorted(key_of(seed) for seed in range(EACH))
    assert open_nvme(crashed=True).tier.inventory().keys == [key_of(seed) for seed in range(EACH + 3, EACH * COUNT)]


def test_what_failed_to_be_written_is_not_there_after_a_crash(open_nvme, disk, monkeypatch):
    """The first of two writes side by side fails, the second is whole; then equal bytes take the place of the first."""
    monkeypatch.setattr("kvtier.tiers.nvme.transfer.TRANSFER", 12 << 10)
    desk = open_nvme()
    desk.write([0], 5000)

    def fail(offset: int) -> None:
        if offset == 2 * 4096 + 12288:
            raise OSError(errno.EIO, "bad place")

    disk.before["pwritev"] = fail
    assert desk.write([1, 2], 5000) == [False, False]
    disk.before.clear()
    desk = open_nvme(crashed=True)
    remove(desk, 2)
    assert desk.write([1], 5000) == [True]
    assert open_nvme(crashed=True).contains([0, 1, 2]) == [True, True, False]


def test_what_was_refused_though_it_is_whole_can_be_removed(open_nvme, disk, monkeypatch):
    desk = open_nvme()
    desk.write([0], 5000)
    write = disk.pwritev

    def write_and_fail(*arguments) -> int:
        write(*arguments)
        raise OSError(errno.EIO, "said to have failed")

    monkeypatch.setattr(disk, "pwritev", write_and_fail)
    assert desk.write([1], 5000) == [False]
    monkeypatch.undo()
    remove(desk, 1)
    assert open_nvme(crashed=True).contains([0, 1]) == [True, False]


def test_what_is_corrupt_is_not_claimed_again(open_nvme, tmp_path):
    desk = open_nvme()
    desk.write([1, 2], 5000)
    with (tmp_path / "store" / FILE).open("r+b") as file:
        file.seek(2 * 4096 + 4096 + 1000)
        file.write(b"bad")
    assert desk.read([1, 2]) == [False, True]
    assert open_nvme().tier.inventory().keys == [key_of(2)]


def test_a_removal_that_is_damaged_is_said(open_nvme, tmp_path):
    desk = open_nvme()
    desk.write([1], 5000)
    remove(desk, 1)
    desk.write([2], 5000)
    open_nvme()
    with (tmp_path / "store" / FILE).open("r+b") as file:
        file.seek(2 * 4096 + 12288 + 160)
        file.write(b"\xff" * 34)
    desk = open_nvme(crashed=True)
    assert desk.contains([1, 2]) == [True, True]
    assert "may be back" in desk.tier.notes[0]


def test_removed_keys_stay_removed_when_the_store_shrinks(open_nvme):
    """The removal lies in a region that is cut off; to say it again needs room, and so the oldest region."""
    desk = open_nvme(2 << 20, region_nbytes=REGION)
    for seed in range(EACH * COUNT + 15):
        desk.write([seed], 5000)
    remove(desk, 10, 11)
    assert desk.tier.usage().used > 1 << 20
    for _ in range(2):
        shrunk = open_nvme(1 << 20, region_nbytes=REGION, crashed=True)
        assert shrunk.tier.inventory().keys == [key_of(seed) for seed in range(12, EACH * COUNT)]
