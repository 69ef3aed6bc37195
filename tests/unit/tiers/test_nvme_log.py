"""The log's bookkeeping."""

from __future__ import annotations

from kvtier.testing.payloads import key_of
from kvtier.tiers.nvme.log import RegionLog
from kvtier.tiers.nvme.regions import Geometry

STORE = b"s" * 16


def put(log: RegionLog, seed: int, nbytes: int = 8192) -> None:
    if log.room() < 4096 + nbytes:
        log.empty_oldest()
        log.begin(seed)
    for frame, sealed in log.lay_out(STORE, [(key_of(seed), nbytes, 0)]):
        log.append(log.newest, frame, sealed)


def test_the_oldest_region_goes_first():
    log = RegionLog(Geometry(24 << 10, 3))
    for seed in range(6):
        put(log, seed)
    assert log.dropped() == []
    put(log, 6)
    assert log.dropped() == [key_of(0), key_of(1)]
    assert list(log.entries) == [key_of(seed) for seed in range(2, 7)]


def test_a_key_written_again_outlives_its_first_place():
    log = RegionLog(Geometry(24 << 10, 3))
    put(log, 0)
    del log.entries[key_of(0)]
    for seed in (1, 2, 3, 0, 4):
        put(log, seed)
    assert log.dropped() == []
    put(log, 5)
    assert log.dropped() == [key_of(1)]
    assert key_of(0) in log.entries


def test_a_key_dropped_and_stored_again_is_not_reported():
    log = RegionLog(Geometry(24 << 10, 2))
    for seed in (0, 1, 2, 3, 4, 0):
        put(log, seed)
    assert log.dropped() == [key_of(1)]


def test_lay_out_takes_what_fits():
    log = RegionLog(Geometry(40 << 10, 2))
    assert log.room() == 0
    log.begin(1)
    laid = log.lay_out(STORE, [(key_of(seed), 8192, 0) for seed in range(9)])
    assert [frame.offset for frame, _ in laid] == [4096, 4096 + 12288, 4096 + 2 * 12288]
