"""What reopening finds, and what it sets aside."""

from __future__ import annotations

import pytest

from kvtier.block import BlockHeader
from kvtier.errors import ConfigError
from kvtier.testing.payloads import key_of, payload_of
from kvtier.tiers.nvme import regions
from kvtier.tiers.nvme.frames import span
from kvtier.tiers.nvme.recovery import FILE

RECORD = 4096 + 8192
"""A payload of 5,000 bytes."""
FIRST = 2 * 4096
"""Where the first record lies: behind the superblock and the first page of its region."""
REGION = 128 << 10
"""Of a store of 1 MiB."""


def poke(path, offset: int, content: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(content)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "store" / FILE


def test_everything_is_there_again_in_its_order(open_nvme):
    before = open_nvme()
    for seed in range(90):
        before.write([seed], 5000)
    held = before.tier.inventory()
    assert 60 < len(held) < 90, "the log wrapped"
    for crashed in (False, True):
        after = open_nvme(crashed=crashed)
        assert after.tier.inventory().keys == held.keys
        assert (after.tier.inventory().records == held.records).all()
        assert after.tier.dropped() == []
        assert all(after.read([seed for seed in range(90) if key_of(seed) in held.nbytes], 5000))


def test_what_headers_say_is_known_again(open_nvme):
    open_nvme().write(range(3), 5000)
    for crashed in (False, True):
        records = open_nvme(crashed=crashed).tier.inventory().records
        for seed, record in enumerate(records):
            header = BlockHeader.unpack(payload_of(seed, 5000))
            assert (record["nbytes"], record["tokens"], record["codec"]) == (5000, header.tokens, header.codec)
            assert (record["space"].tobytes(), record["expires"]) == (header.space, header.expires)


def test_a_payload_without_a_header_is_written_all_the_same(open_nvme):
    desk = open_nvme()
    slots = desk.slots([5000])
    desk.arena.memory[:5000] = 7
    assert desk.tier.write([key_of(1)], slots) == [True]
    record = open_nvme().tier.inventory().records[0]
    assert record["nbytes"] == 5000
    assert record["tokens"] == record["expires"] == 0


def test_appending_goes_on_where_it_ended(open_nvme):
    for seed in range(8):
        assert open_nvme().write([seed], 5000) == [True]
    assert open_nvme().read(range(8), 5000) == [True] * 8
    assert open_nvme().tier.usage().used == regions.RESERVE + 4096 + 8 * RECORD + 4096


def test_frames_of_a_former_life_are_never_found(open_nvme, path):
    """The region's begin is lost, so it is free; equal records follow in place, under another root."""
    desk = open_nvme()
    desk.write([1, 2, 3], 5000)
    poke(path, 4096, b"\0" * 64)
    again = open_nvme(crashed=True)
    assert again.tier.inventory().keys == []
    again.write([4], 5000)
    assert again.tier.usage().used == regions.RESERVE + 4096 + RECORD + 4096
    assert open_nvme(crashed=True).tier.inventory().keys == [key_of(4)]


def test_a_record_torn_by_a_crash_is_not_found(open_nvme, path):
    """The last batch of the newest region is verified at opening, whatever its frames say."""
    desk = open_nvme()
    desk.write([1], 5000)
    desk.write([2, 3, 4], 5000)
    poke(path, FIRST + 2 * RECORD + 4096 + 4990, b"torn")
    for _ in range(2):
        again = open_nvme(crashed=True)
        assert again.contains([1, 2, 3, 4]) == [True, True, False, True]
    assert again.write([3], 5000) == [True]
    assert open_nvme(crashed=True).read([1, 2, 3, 4], 5000) == [True] * 4


def test_what_lies_behind_the_last_whole_record_is_overwritten(open_nvme, path):
    desk = open_nvme()
    desk.write([1], 5000)
    desk.write([2, 3], 5000)
    for record in (1, 2):
        poke(path, FIRST + record * RECORD + 4096 + 4990, b"torn")
    again = open_nvme(crashed=True)
    assert again.contains([1, 2, 3]) == [True, False, False]
    assert again.tier.usage().used == regions.RESERVE + 4096 + RECORD + 4096


def test_a_lost_frame_ends_its_region_only_and_only_without_a_table(open_nvme, path):
    """10 records a region: the first two have tables."""
    desk = open_nvme()
    for seed in range(24):
        desk.write([seed], 5000)
    for region in (0, 2):
        poke(path, FIRST + region * REGION + 3 * RECORD, b"\xff" * 8)
    assert open_nvme(crashed=True).contains(range(24)) == [True] * 23 + [False]


@pytest.mark.parametrize(
    ("offset", "content", "why"),
    [
        (0, b"SOMETHIN", "no superblock"),
        (8, (99).to_bytes(2, "little"), "format version is 99"),
        (40, b"\x01", "superblock is corrupt"),
    ],
)
def test_a_foreign_store_is_set_aside_and_kept(open_nvme, path, offset, content, why):
    open_nvme().write([1], 5000)
    for n in (1, 2):
        poke(path, offset, content)
        aside = path.with_name(f"{FILE}.aside-{n}")
        desk = open_nvme()
        assert desk.tier.inventory().keys == []
        assert len(desk.tier.notes) == 1
        assert why in desk.tier.notes[0]
        assert aside.name in desk.tier.notes[0]
        assert aside.stat().st_size == path.stat().st_size
        assert desk.write([2], 5000) == [True]


def test_an_empty_file_is_set_aside(open_nvme, path):
    path.parent.mkdir()
    path.touch()
    assert "too short" in open_nvme().tier.notes[0]


def test_a_half_made_store_is_made_again(open_nvme, path):
    path.parent.mkdir()
    path.with_name(f"{FILE}.new").write_bytes(b"\0" * 9999)
    assert open_nvme().tier.notes == ()
    assert sorted(p.name for p in path.parent.iterdir()) == ["lock", FILE]


def test_regions_of_another_size_are_set_aside(open_nvme):
    open_nvme(1 << 20).write([1], 5000)
    assert "131072 bytes, not 262144" in open_nvme(2 << 20).tier.notes[0]


def test_the_same_regions_in_another_number_are_kept(open_nvme, path):
    desk = open_nvme(2 << 20, region_nbytes=128 << 10)
    for seed in range(24):
        desk.write([seed], 5000)
    held = desk.tier.inventory().nbytes
    smaller = open_nvme(1 << 20, region_nbytes=128 << 10)
    assert smaller.tier.inventory().nbytes == held
    assert "resized" in smaller.tier.notes[0]
    assert path.stat().st_size <= 1 << 20
    larger = open_nvme(2 << 20, region_nbytes=128 << 10)
    assert larger.tier.inventory().nbytes == held
    for seed in range(24, 100):
        larger.write([seed], 5000)
    assert len(larger.tier.inventory().nbytes) == 100
    assert open_nvme(2 << 20, region_nbytes=128 << 10).tier.notes == ()


def test_the_default_region_holds_large_payloads_without_waste():
    geometry = regions.Geometry.fit(64 << 30, regions.REGION_NBYTES)
    for nbytes in (2 << 20, 8 << 20, 32 << 20):
        record = span(nbytes + 192)
        assert geometry.region_nbytes % record / geometry.region_nbytes < 0.025


@pytest.mark.parametrize("capacity", [0, 4096, 200_000])
def test_too_small_a_capacity_says_how_much_is_needed(tmp_path, open_nvme, capacity):
    with pytest.raises(ConfigError, match="at least 262144"):
        open_nvme(capacity)


@pytest.mark.parametrize("capacity", [262_144, 300_000, 1 << 20, 10_000_001, 1 << 30, 1 << 40])
def test_the_file_and_what_goes_with_it_fit_the_capacity(capacity):
    geometry = regions.Geometry.fit(capacity, regions.REGION_NBYTES)
    assert geometry.file_nbytes + regions.RESERVE - 4096 <= capacity
    assert geometry.file_nbytes >= 0.75 * capacity


def test_a_torn_record_stays_lost_when_its_region_is_no_longer_the_newest(open_nvme, path):
    """Its frame is still there, and whole; the next region's first frame says that nothing was acknowledged there."""
    open_nvme().write([1, 2], 5000)
    poke(path, FIRST + RECORD + 8192, b"torn")
    desk = open_nvme(crashed=True)
    assert desk.contains([1, 2]) == [True, False]
    for seed in (3, 4):
        desk.write([seed], 110_000)
    again = open_nvme(crashed=True)
    assert again.contains([1, 2, 3, 4]) == [True, False, True, True]


@pytest.mark.parametrize("nbytes", [5000, 110_000])
def test_a_region_whose_first_record_is_torn_is_gone_on_with(open_nvme, path, nbytes):
    """Nothing may be appended to the region before it, and nothing of that be lost."""
    desk = open_nvme()
    desk.write([1], 5000)
    desk.write([2], 110_000)
    poke(path, FIRST + REGION + 8192, b"torn")
    desk = open_nvme(crashed=True)
    assert desk.contains([1, 2]) == [True, False]
    desk.write([3], nbytes)
    for _ in range(2):
        assert open_nvme(crashed=True).contains([1, 2, 3]) == [True, False, True]
