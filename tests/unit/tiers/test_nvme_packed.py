"""Payloads that lie in the file packed."""

from __future__ import annotations

import numpy as np
import pytest

from kvtier.block import BlockHeader
from kvtier.lossless.method import Method
from kvtier.testing import payloads
from kvtier.testing.payloads import key_of, normal_payload_of
from kvtier.tiers.nvme.recovery import FILE
from kvtier.tiers.nvme.regions import RESERVE

NBYTES = 40_000
STORED, PACKED = 4096 + 40_960, 4096 + 28_672
"""Records: 40,000 bytes are 10 pages, and 7 when a little more than (8 + 2.5) / 16 of them is left."""


@pytest.fixture(autouse=True)
def normal_payloads(monkeypatch):
    monkeypatch.setattr("kvtier.testing.tier.payload_of", normal_payload_of)


OTHER = RESERVE + 2 * 4096
"""What a tier of one region takes beside its records."""


def used(desk) -> int:
    return desk.tier.usage().used - OTHER


def test_they_take_less_and_are_listed_with_all_their_bytes(open_nvme):
    desk = open_nvme(lossless=Method.ZSTD)
    assert desk.write([1, 2], NBYTES) == [True, True]
    assert used(desk) == 2 * PACKED
    assert list(desk.tier.inventory().nbytes.items()) == [(key_of(1), NBYTES), (key_of(2), NBYTES)]
    assert desk.read([2, 1]) == [True, True]


def test_what_does_not_shrink_by_a_page_is_stored_as_it_is(open_nvme, monkeypatch):
    desk = open_nvme(lossless=Method.ZSTD)
    desk.write([1, 2], 4096)
    assert used(desk) == 2 * 2 * 4096
    monkeypatch.setattr("kvtier.testing.tier.payload_of", payloads.payload_of)
    desk.write([3], NBYTES)
    assert used(desk) == 2 * 2 * 4096 + STORED
    assert desk.read([3]) == [True]


def test_quantised_payloads_are_stored_as_they_are(open_nvme, monkeypatch):
    monkeypatch.setattr(payloads, "PLAN", "int8")
    desk = open_nvme(lossless=Method.ZSTD)
    assert BlockHeader.unpack(normal_payload_of(1, NBYTES)).plan == "int8"
    assert desk.write([1], NBYTES) == [True]
    assert used(desk) == STORED


def test_a_file_may_hold_both_and_is_read_whatever_the_option_says(open_nvme):
    methods = [Method.ZSTD, Method.STORED, Method.LZ4, Method.ZSTD, None]
    for seed, method in enumerate(methods):
        desk = open_nvme(lossless=method)
        assert desk.write([seed], NBYTES) == [True]
        assert desk.read(range(seed + 1), NBYTES) == [True] * (seed + 1)
    assert list(open_nvme().tier.inventory().nbytes.items()) == [(key_of(seed), NBYTES) for seed in range(5)]
    assert used(open_nvme()) - 2 * 4096 == 2 * PACKED + 2 * STORED + used_by_lz4(), "in two regions"


def used_by_lz4() -> int:
    """9 pages: with LZ4 the plane of exponents is not much smaller."""
    return 4096 + 9 * 4096


@pytest.mark.parametrize("place", [0, 20, 32, 36, 10_000, 24_000])
def test_altered_packed_bytes_are_a_miss_and_forgotten(open_nvme, tmp_path, place):
    desk = open_nvme(lossless=Method.ZSTD)
    desk.write([1, 2, 3], NBYTES)
    with (tmp_path / "store" / FILE).open("r+b") as file:
        file.seek(2 * 4096 + PACKED + 4096 + place)
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 0x10]))
    assert desk.read([1, 2, 3]) == [True, False, True]
    assert desk.tier.usage().counters["corrupt"] == 1
    assert desk.tier.dropped() == [key_of(2)]
    assert desk.write([2], NBYTES) == [True]
    assert desk.read([2]) == [True]


def test_a_packed_record_torn_by_a_crash_is_not_found(open_nvme, tmp_path):
    desk = open_nvme(lossless=Method.ZSTD)
    desk.write([1], NBYTES)
    desk.write([2, 3], NBYTES)
    with (tmp_path / "store" / FILE).open("r+b") as file:
        file.seek(2 * 4096 + 2 * PACKED + 4096 + 9000)
        file.write(b"torn")
    assert open_nvme(crashed=True).contains([1, 2, 3]) == [True, True, False]


def test_a_batch_of_many_groups_is_written_whole(open_nvme, monkeypatch):
    monkeypatch.setattr("kvtier.tiers.nvme.packing.GROUP", 100_000)
    desk = open_nvme(lossless=Method.ZSTD)
    assert desk.write(range(12), NBYTES) == [True] * 12
    assert used(desk) - 3 * 2 * 4096 == 12 * PACKED, "in four regions"
    assert desk.read(range(12)) == [True] * 12


def address(buffer) -> int:
    return np.frombuffer(buffer, np.uint8).ctypes.data


def test_what_is_stored_as_it_is_is_read_in_place(open_nvme, disk, monkeypatch):
    """No buffer between the slots and the device: each is handed to the operating system itself."""
    desk = open_nvme()
    desk.write([1, 2], NBYTES)
    handed = []
    monkeypatch.setattr(disk, "_some", lambda buffers: handed.extend(map(address, buffers)) or buffers)
    desk.read([1, 2])
    assert handed[::2] == [slot.ctypes.data for slot in (desk.arena.memory, desk.arena.memory[40_960:])]


@pytest.fixture
def open_on_a_disk_of(open_nvme, disk, clock, monkeypatch):
    """Time passes with the bytes that are read, and with those that are packed (1 GB/s) and unpacked (2.5 GB/s)."""
    from kvtier.lossless import choice

    def taking(call, rate):
        def timed(payload, *rest):
            clock.now += len(rest[-1]) / rate
            return call(payload, *rest)

        return timed

    monkeypatch.setattr("kvtier.tiers.nvme.trial.LEAST", 1 << 20)
    monkeypatch.setattr(choice, "pack", taking(choice.pack, 1e9))
    monkeypatch.setattr(choice, "unpack", taking(choice.unpack, 2.5e9))

    def open_it(rate):
        desk = open_nvme(64 << 20, lossless=None)

        def some(buffers):
            clock.now += sum(map(len, buffers)) / rate
            return buffers

        monkeypatch.setattr(disk, "_some", some)
        return desk

    return open_it


@pytest.mark.parametrize(("rate", "method"), [(0.2e9, Method.ZSTD), (3e9, Method.STORED)])
def test_a_trial_decides_what_the_device_is_worth(open_on_a_disk_of, rate, method):
    desk = open_on_a_disk_of(rate)
    assert desk.write([1], 500_000) == [True]
    assert desk.tier._writer.method is None, "that is too little to tell"
    assert all(desk.write([10, 11, 12], 500_000))
    assert desk.tier._writer.method is method
    before = used(desk)
    desk.write([2], NBYTES)
    assert used(desk) - before == (PACKED if method else STORED)
    assert all(desk.read([1, 2, 10, 11, 12]))
