"""A region's table says what its frames say, and never more."""

from __future__ import annotations

import errno

import pytest

from kvtier.testing.payloads import key_of
from kvtier.tiers.nvme.frames import Begin, Row
from kvtier.tiers.nvme.io import pages
from kvtier.tiers.nvme.recovery import FILE
from kvtier.tiers.nvme.regions import Superblock
from kvtier.tiers.nvme.table import Table, nbytes_of

REGION, COUNT, EACH = 128 << 10, 7, 10
"""A store of 1 MiB has 7 regions, and each has room for 10 records of 5,000 bytes beside its begin and its table."""
STORE = b"s" * 16


def poke(path, offset: int, content: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(content)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "store" / FILE


def fill(desk, seeds) -> None:
    for seed in seeds:
        assert desk.write([seed], 5000) == [True]


def memory(content: bytes) -> memoryview:
    view = pages(len(content) // 4096)
    view[:] = content
    return view


def test_a_table_is_of_one_store_and_one_life():
    table = Table(7, 8192, 9, bytearray(Row.of(key_of(1), 5000).pack() * 60))
    packed = memory(table.pack(STORE))
    last = packed[-4096:]
    assert len(packed) == nbytes_of(STORE, 7, last) == 2 * 4096
    assert Table.unpack(packed) == table
    assert nbytes_of(b"t" * 16, 7, last) == nbytes_of(STORE, 8, last) == 0
    for place in (4000, 4096 + 100, -60):
        packed[place] ^= 1
        assert not nbytes_of(STORE, 7, last) or Table.unpack(packed) is None
        packed[place] ^= 1


def test_opening_reads_a_table_a_region_and_the_frames_of_the_newest(open_nvme, disk):
    fill(open_nvme(), range(EACH * 4 + 5))
    disk.calls.clear()
    desk = open_nvme(crashed=True)
    assert desk.contains(range(EACH * 4 + 5)) == [True] * 45
    begins, tables, ends = COUNT, 5, 4
    assert disk.calls["preadv"] == 2 + begins + tables + ends + 5 + 1 + 1, (
        "superblock twice; 5 frames, 1 payload, the end"
    )


def test_after_closing_in_good_order_no_record_is_scanned(open_nvme, disk):
    fill(open_nvme(), range(5))
    open_nvme()
    disk.calls.clear()
    desk = open_nvme()
    assert disk.calls["preadv"] == 2 + COUNT + 1 + 1
    assert "pwritev" not in disk.calls, "and the table is not written again"
    assert desk.read(range(5), 5000) == [True] * 5


def test_a_long_region_gets_a_table_before_it_is_full(open_nvme, disk, monkeypatch):
    monkeypatch.setattr("kvtier.tiers.nvme.writer.UNTABLED", 4)
    fill(open_nvme(), range(7))
    disk.calls.clear()
    desk = open_nvme(crashed=True)
    assert disk.calls["preadv"] == 2 + COUNT + 1 + 3 + 1 + 1, "3 frames, the end, 1 payload"
    assert desk.read(range(7), 5000) == [True] * 7


@pytest.mark.parametrize("place", [-4096 + 40, -200, -20])
def test_a_torn_table_is_as_good_as_none(open_nvme, path, place):
    fill(open_nvme(), range(EACH + 5))
    for region in (1, 2):
        poke(path, 4096 + region * REGION + place, b"torn")
    assert open_nvme(crashed=True).contains(range(EACH + 5)) == [True] * 15


def test_records_follow_a_table_and_are_found_behind_it(open_nvme):
    for first in (0, 3, 6):
        fill(open_nvme(), range(first, first + 3))
    assert open_nvme(crashed=True).read(range(9), 5000) == [True] * 9


def test_a_torn_record_behind_a_table_is_not_found(open_nvme, path):
    fill(open_nvme(), range(3))
    fill(open_nvme(), range(3, 5))
    poke(path, 2 * 4096 + 4 * 12288 + 4096 + 100, b"torn")
    assert open_nvme(crashed=True).contains(range(5)) == [True] * 4 + [False]


def test_between_sealing_and_beginning(open_nvme, disk):
    """The newest region has a table and no room: everything is there, and the next write begins another."""
    fill(open_nvme(), range(EACH))

    def fail_to_begin(offset: int) -> None:
        if offset == 4096 + REGION:
            raise OSError(errno.EIO, "bad place")

    desk = open_nvme(crashed=True)
    disk.before["pwritev"] = fail_to_begin
    assert desk.write([EACH], 5000) == [False]
    disk.before.clear()
    again = open_nvme(crashed=True)
    assert again.contains(range(EACH + 1)) == [True] * EACH + [False]
    fill(again, range(EACH, EACH + 3))
    assert open_nvme(crashed=True).contains(range(EACH + 3)) == [True] * (EACH + 3)


@pytest.mark.parametrize("written", [0, 1, EACH - 1])
def test_the_table_of_a_former_life_is_not_this_ones(open_nvme, disk, written):
    """Region 0 has begun anew, with some records; its former table is still there, whole."""
    desk = open_nvme()
    fill(desk, range(EACH * COUNT))
    if written:
        fill(desk, range(EACH * COUNT, EACH * COUNT + written))
    else:
        disk.before["pwritev"] = fail_at(2 * 4096)
        assert desk.write([EACH * COUNT], 5000) == [False]
        disk.before.clear()
    again = open_nvme(crashed=True)
    assert again.tier.inventory().keys == [key_of(seed) for seed in range(EACH, EACH * COUNT + written)]


def fail_at(place: int):
    def fail(offset: int) -> None:
        if offset == place:
            raise OSError(errno.EIO, "bad place")

    return fail


def test_of_a_key_in_two_regions_the_later_place_counts(open_nvme, disk, path):
    desk = open_nvme()
    fill(desk, range(EACH))
    disk.errors["preadv"] = errno.EIO
    desk.read([0])
    disk.errors.clear()
    fill(desk, [0])
    poke(path, 2 * 4096 + 4096 + 200, b"bad")
    for _ in range(2):
        again = open_nvme()
        assert again.read(range(EACH), 5000) == [True] * EACH
        assert again.tier.inventory().keys[-1] == key_of(0)


def test_a_table_that_cannot_be_written_is_done_without(open_nvme, disk):
    """A bad place at the end of a region does not keep the tier from going on."""
    desk = open_nvme()
    disk.before["pwritev"] = fail_at(4096 + REGION - 4096)
    fill(desk, range(EACH + 3))
    assert desk.tier.usage().fault == ""
    assert open_nvme(crashed=True).contains(range(EACH + 3)) == [True] * (EACH + 3)


def test_a_table_that_cannot_be_read_is_done_without(open_nvme, disk):
    fill(open_nvme(), range(EACH + 3))
    disk.before["preadv"] = fail_at(4096 + REGION - 4096)
    desk = open_nvme()
    assert desk.contains(range(EACH + 3)) == [True] * (EACH + 3)
    assert "region 0 could not be read" in desk.tier.notes[0]


def test_no_number_is_given_twice_though_a_region_could_not_be_read(open_nvme, disk):
    """The newest and an older one could not, and the older one begins anew while the newest is still there."""
    fill(open_nvme(), range(EACH * (COUNT + 3) + 3))

    def fail(offset: int) -> None:
        if offset in (4096, 4096 + 3 * REGION):
            raise OSError(errno.EIO, "bad place")

    disk.before["preadv"] = fail
    desk = open_nvme()
    fill(desk, range(200, 202))
    disk.before.clear()
    again = open_nvme()
    assert again.read([100, 101, 102, 200, 201], 5000) == [True] * 5
    assert again.tier.notes == ()


def test_two_regions_with_one_number_are_both_left_alone(open_nvme, path):
    fill(open_nvme(), range(EACH * 2 + 3))
    open_nvme().tier.close()
    content = path.read_bytes()
    store = Superblock.unpack(content).store
    first, _ = Begin.unpack(store, content[4096:])
    poke(path, 4096 + 2 * REGION, first._replace(offset=4096 + 2 * REGION, nonce=5).pack(store))
    desk = open_nvme()
    assert desk.tier.inventory().keys == [key_of(seed) for seed in range(EACH, EACH * 2)]
    assert "neither is used" in desk.tier.notes[0]
