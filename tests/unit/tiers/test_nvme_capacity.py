"""Never more bytes on the disk than configured, whatever happens; files are counted, and the blocks that they take."""

from __future__ import annotations

import errno

import pytest

from kvtier.testing.payloads import key_of
from kvtier.testing.tier import on_disk
from kvtier.tiers.nvme.recovery import FILE

CAPACITIES = (1 << 20, 3_000_001)


@pytest.mark.parametrize("capacity", CAPACITIES)
@pytest.mark.parametrize("direct", [True, False])
def test_load_eviction_faults_and_reopening_stay_within_it(open_nvme, disk, tmp_path, capacity, direct):
    store, seen = tmp_path / "store", set()

    def within(_: object = None) -> None:
        """Called in the middle of writes too."""
        seen.add(on_disk(store))
        assert max(seen) <= capacity
        assert {path.name for path in store.iterdir()} <= {"lock", FILE, f"{FILE}.new"}

    disk.before["pwritev"] = within
    for turn in range(6):
        desk = open_nvme(capacity, direct=direct, crashed=turn % 2 == 1)
        within()
        for seed in range(turn * 100, turn * 100 + 60):
            desk.write([seed], (192, 5000, 40_000)[seed % 3])
            desk.read([seed, seed - 7], 5000)
            if seed % 10 == 0:
                desk.tier.remove([key_of(seed - 3)])
        disk.errors["pwritev"] = errno.ENOSPC
        assert desk.write([10_000 + turn], 5000) == [False]
        disk.errors.clear()
        within()
    assert desk.tier.usage().counters["evicted"] > 0
    assert max(seen) - min(seen) <= 4096, "it is all taken at once, but for what the lock's file says"


@pytest.mark.parametrize("change", [1 << 20, 4 << 20])
def test_resizing_stays_within_the_new_one(open_nvme, tmp_path, change):
    desk = open_nvme(2 << 20, region_nbytes=128 << 10)
    for seed in range(200):
        desk.write([seed], 5000)
    open_nvme(change, region_nbytes=128 << 10)
    assert on_disk(tmp_path / "store") <= change


def test_what_is_set_aside_is_not_counted_and_not_deleted(open_nvme, tmp_path):
    store = tmp_path / "store"
    open_nvme().tier.close()
    (store / FILE).write_bytes(b"something else")
    open_nvme().write([2], 5000)
    assert on_disk(store) <= 1 << 20
    assert (store / f"{FILE}.aside-1").read_bytes() == b"something else"
