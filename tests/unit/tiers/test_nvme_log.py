"""The log's bookkeeping."""

from __future__ import annotations

from kvtier.testing.payloads import key_of
from kvtier.tiers.nvme.frames import Row
from kvtier.tiers.nvme.log import RegionLog
from kvtier.tiers.nvme.regions import Geometry

STORE = b"s" * 16


def put(log: RegionLog, seed: int, nbytes: int = 8192) -> None:
    """As the tier does, without its I/O."""
    while not (laid := log.lay_out(STORE, [Row.of(key_of(seed), nbytes)])):
        moving = log.to_carry(1 << 20, 256)
        for moved in moving:
            for frame, sealed in log.lay_out(STORE, [moved.row], carried=True):
                log.append(frame, sealed, moved=moved)
        if not moving:
            log.empty_oldest()
            log.begin(seed)
    for frame, sealed in laid:
        log.append(frame, sealed)


def touch(log: RegionLog, *seeds: int) -> None:
    for seed in seeds:
        log.touch(key_of(seed), log.entries[key_of(seed)])


def held(log: RegionLog) -> list[bytes]:
    return log.inventory().keys


def test_the_oldest_region_goes_first():
    log = RegionLog(Geometry(32 << 10, 3))
    for seed in range(6):
        put(log, seed)
    assert log.dropped() == []
    put(log, 6)
    assert log.dropped() == [key_of(0), key_of(1)]
    assert held(log) == [key_of(seed) for seed in range(2, 7)]


def test_a_key_written_again_outlives_its_first_place():
    log = RegionLog(Geometry(32 << 10, 3))
    put(log, 0)
    log.forget([key_of(0)])
    for seed in (1, 2, 3, 0, 4):
        put(log, seed)
    assert log.dropped() == []
    put(log, 5)
    assert log.dropped() == [key_of(1)]
    assert key_of(0) in log.entries


def test_a_key_dropped_and_stored_again_is_not_reported():
    log = RegionLog(Geometry(32 << 10, 2))
    for seed in (0, 1, 2, 3, 4, 0):
        put(log, seed)
    assert log.dropped() == [key_of(1)]


def test_lay_out_takes_what_fits_beside_the_table():
    log = RegionLog(Geometry(48 << 10, 2))
    rows = [Row.of(key_of(seed), 8192) for seed in range(9)]
    assert log.lay_out(STORE, rows) == []
    log.begin(1)
    laid = log.lay_out(STORE, rows)
    assert [frame.offset for frame, _ in laid] == [2 * 4096, 2 * 4096 + 12288, 2 * 4096 + 2 * 12288]


def test_use_is_summed_up_as_it_goes():
    """By hand: a begin, two records and a table of a page each region, and one record in the newest."""
    log = RegionLog(Geometry(32 << 10, 3))
    assert log.used == 0
    for seed in range(5):
        put(log, seed)
    assert log.used == 2 * (4096 + 2 * 12288 + 4096) + 4096 + 12288 + 4096
    for seed in range(5, 7):
        put(log, seed)
    assert log.used == 2 * (4096 + 2 * 12288 + 4096) + 4096 + 12288 + 4096


def test_what_is_carried_is_chosen_without_io():
    log = RegionLog(Geometry(64 << 10, 3))
    for seed in range(9):
        put(log, seed)
    touch(log, 2, 0, 1)
    assert [entry.row.key for entry in log.to_carry(1 << 20, 256)] == [key_of(0), key_of(1)], (
        "read last; in their order"
    )
    assert [entry.row.key for entry in log.to_carry(1, 256)] == [key_of(0)]
    assert [entry.row.key for entry in log.to_carry(1 << 20, 1)] == [key_of(0)]
    log.forget([key_of(1)])
    assert [entry.row.key for entry in log.to_carry(1 << 20, 256)] == [key_of(0), key_of(2)]
