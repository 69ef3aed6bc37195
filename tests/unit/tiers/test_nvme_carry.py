"""What was read outlives its region."""

from __future__ import annotations

import errno
import threading

import pytest

from kvtier.lossless.method import Method
from kvtier.testing.payloads import key_of, normal_payload_of
from kvtier.tiers.nvme.recovery import FILE

EACH, COUNT = 10, 7
"""A store of 1 MiB has 7 regions, and each has room for 10 records of 5,000 bytes."""
RECORD = 4096 + 8192


def write(desk, seeds) -> None:
    for seed in seeds:
        assert desk.write([seed], 5000) == [True]


def counters(desk) -> dict[str, int]:
    return desk.tier.usage().counters


def keys(*seeds: int) -> list[bytes]:
    return [key_of(seed) for seed in seeds]


@pytest.fixture
def full(open_nvme):
    """No region is free any more, and the newest has one record, 60."""
    desk = open_nvme()
    write(desk, range(EACH * (COUNT - 1) + 1))
    return desk


def test_blocks_that_were_read_are_appended_again_in_their_order(full, open_nvme):
    assert all(full.read([7, 3, 5]))
    write(full, range(100, 100 + EACH * 2))
    assert counters(full)["carried"] == 3
    assert counters(full)["carried_nbytes"] == 3 * RECORD
    assert full.tier.dropped() == keys(*(seed for seed in range(EACH) if seed not in (3, 5, 7))) + keys(*range(10, 20))
    assert full.tier.inventory().keys[41:] == keys(*range(100, 106), 3, 5, 7, *range(106, 120))
    for crashed in (True, False):
        assert open_nvme(crashed=crashed).read([3, 5, 7], 5000) == [True] * 3


def test_once_carried_a_block_has_to_be_read_again(full):
    full.read([3])
    write(full, range(100, 108 + EACH * (COUNT - 1)))
    assert full.contains([3]) == [True]
    write(full, range(200, 200 + EACH))
    assert full.contains([3]) == [False]
    assert counters(full)["carried"] == 1


def test_at_most_half_a_region_is_carried_and_the_last_read_ones_first(full):
    full.read([9, 1])
    full.read(range(2, 9))
    write(full, range(100, 100 + EACH))
    assert counters(full)["carried"] == 5
    assert full.contains(range(EACH)) == [seed in range(4, 9) for seed in range(EACH)]
    for first in range(200, 500, EACH):
        full.read([seed for seed, held in zip(range(500), full.contains(range(500)), strict=True) if held], 5000)
        write(full, range(first, first + EACH))
        assert all(full.contains(range(first, first + EACH))), "what is fresh always finds room"


def test_large_payloads_find_room_beside_what_is_carried(full):
    for seed in range(200, 220):
        full.read([s for s, held in zip(range(70), full.contains(range(70)), strict=True) if held])
        assert full.write([seed], 115_000) == [True], "a region's whole room"
        assert full.read([seed], 115_000) == [True]


def test_nothing_is_carried_while_regions_are_free(open_nvme):
    desk = open_nvme()
    write(desk, range(EACH))
    desk.read(range(EACH))
    write(desk, range(EACH, EACH * (COUNT - 1)))
    assert "carried" not in counters(desk)


def test_removed_blocks_are_not_carried(full, open_nvme):
    full.read([3, 5])
    full.tier.remove(keys(3))
    write(full, range(100, 100 + EACH))
    assert full.contains([3, 5]) == [False, True]
    assert open_nvme(crashed=True).contains([3, 5]) == [False, True]


def test_removed_while_it_is_carried_it_is_gone(full, open_nvme, disk):
    full.read([3, 5])
    threads: list[threading.Thread] = []

    def remove(_: int) -> None:
        if not threads:
            threads.append(threading.Thread(target=full.tier.remove, args=(keys(3),)))
            threads[0].start()
            while full.contains([3]) == [True]:
                pass

    disk.before["preadv"] = remove
    write(full, range(100, 100 + EACH))
    threads[0].join()
    assert counters(full)["carried"] == 1
    assert full.contains([3, 5]) == [False, True]
    disk.before.clear()
    assert open_nvme(crashed=True).contains([3, 5]) == [False, True]


def test_removed_while_its_copy_is_written_it_is_gone(full, open_nvme, disk):
    """The copy is whole on the disk, and the removal behind it."""
    full.read([3, 5])
    write(full, range(100, 107))
    threads: list[threading.Thread] = []

    def remove(_: int) -> None:
        if not threads:
            threads.append(threading.Thread(target=full.tier.remove, args=(keys(3),)))
            threads[0].start()
            while full.contains([3]) == [True]:
                pass

    disk.before["preadv"] = lambda _: disk.before.update(pwritev=remove)
    write(full, [107, 108, 109])
    threads[0].join()
    assert full.contains([3, 5]) == [False, True]
    disk.before.clear()
    assert open_nvme(crashed=True).contains([3, 5]) == [False, True]


def test_corrupt_blocks_are_not_carried(full, tmp_path):
    full.read([3, 5])
    with (tmp_path / "store" / FILE).open("r+b") as file:
        file.seek(2 * 4096 + 3 * RECORD + 4096 + 500)
        file.write(b"bad")
    write(full, range(100, 100 + EACH))
    assert full.contains([3, 5]) == [False, True]
    assert counters(full)["corrupt"] == 1
    assert key_of(3) in full.tier.dropped()


def test_blocks_that_cannot_be_read_are_not_carried(full, disk):
    full.read([3, 5])
    disk.errors["preadv"] = errno.EIO
    write(full, range(100, 100 + EACH))
    assert full.contains([3, 5]) == [False, False]
    assert counters(full)["read_error"] == 2


@pytest.mark.parametrize("fault", [errno.EIO, errno.ENOSPC])
def test_a_device_that_fails_then_refuses_the_write_and_drops_nothing(full, disk, fault):
    full.read([3, 5])
    write(full, range(100, 107))
    disk.errors["pwritev"] = fault
    assert full.write([107, 108], 5000) == [False, False]
    assert full.tier.dropped() == []
    disk.errors.clear()
    assert full.read(range(EACH)) == [True] * EACH
    write(full, range(107, 120))


def test_packed_blocks_are_carried_as_they_lie_there(open_nvme, monkeypatch):
    monkeypatch.setattr("kvtier.testing.tier.payload_of", normal_payload_of)
    desk = open_nvme(lossless=Method.ZSTD)
    desk.write([1, 2, 3], 40_000)
    desk.read([2])
    for seed in range(100, 122):
        assert desk.write([seed], 40_000) == [True]
    assert counters(desk)["carried_nbytes"] == 4096 + 28_672
    assert open_nvme(lossless=Method.STORED, crashed=True).read([1, 2, 3], 40_000) == [False, True, False]


def test_all_that_goes_to_the_device_is_counted(full, disk):
    """So that write amplification can be told: what was written over what was accepted."""
    before = disk.written - counters(full)["device_nbytes"]
    for step in range(5):
        oldest = full.tier.inventory().keys[:4]
        full.read([seed for seed in full.sizes if key_of(seed) in oldest])
        write(full, range(100 + step * EACH, 100 + step * EACH + EACH))
        full.tier.remove(keys(100 + step * EACH))
    counted = counters(full)
    assert counted["device_nbytes"] == disk.written - before
    assert counted["payload_nbytes"] == 5000 * (EACH * (COUNT - 1) + 1 + 5 * EACH)
    assert counted["written_nbytes"] == RECORD * (EACH * (COUNT - 1) + 1 + 5 * EACH)
    assert counted["carried"] >= 10
    assert counted["device_nbytes"] > counted["written_nbytes"] + counted["carried_nbytes"]
