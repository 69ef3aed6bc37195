"""Every tier obeys the laws of the seam."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtier.lossless.method import Method
from kvtier.memory.arena import Arena
from kvtier.testing.payloads import normal_payload_of
from kvtier.testing.tier import MakeTier, ReadingKit, TierKit, on_disk
from kvtier.tiers.gpu import GpuTier
from kvtier.tiers.nvme import NvmeTier
from kvtier.tiers.several import Several
from tests.peer_fixture import PeerDesk, far, near


class TestNvme(TierKit):
    direct = True

    @pytest.fixture
    def make_tier(self, tmp_path: Path) -> MakeTier:
        return lambda arena, capacity: NvmeTier(tmp_path / "store", capacity, arena, direct=self.direct)

    @pytest.fixture(autouse=True)
    def stays_within_its_capacity(self, desk, tmp_path: Path):
        yield
        assert on_disk(tmp_path / "store") <= self.capacity


class TestNvmeBuffered(TestNvme):
    direct = False

    def test_says_so(self, desk):
        assert not desk.tier.direct


class TestNvmeSmallest(TestNvme):
    """Regions of a few records, so that the log wraps all the time."""

    capacity = 1 << 20


class TestNvmePacked(TestNvme):
    @pytest.fixture
    def make_tier(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakeTier:
        monkeypatch.setattr("kvtier.testing.tier.payload_of", normal_payload_of)
        return lambda arena, capacity: NvmeTier(tmp_path / "store", capacity, arena, lossless=Method.ZSTD)

    def test_more_of_them_fit(self, desk):
        """A region of 256 pages holds 15 of 16 pages and a frame, 7 regions 105; packed, of 12 pages at most, 133."""
        for seed in range(0, 133, 7):
            desk.write(range(seed, seed + 7), 65_536)
        assert all(desk.read(range(133)))


class TestNvmePackedSmallest(TestNvmeSmallest):
    @pytest.fixture
    def make_tier(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakeTier:
        monkeypatch.setattr("kvtier.testing.tier.payload_of", normal_payload_of)
        return lambda arena, capacity: NvmeTier(tmp_path / "store", capacity, arena, lossless=Method.LZ4)


class TestTwoDevices(TierKit):
    devices = 2

    @pytest.fixture
    def make_tier(self, tmp_path: Path) -> MakeTier:
        def make(arena: Arena, capacity: int) -> Several:
            each = capacity // self.devices
            folders = [tmp_path / f"device{n}" for n in range(self.devices)]
            return Several("nvme", {str(folder): NvmeTier(folder, each, arena) for folder in folders})

        return make

    def test_all_are_used(self, desk):
        desk.write(range(40), 5000)
        desk.tier.usage()
        assert all(usage.blocks for usage in desk.tier.devices.values())


class TestFiveDevices(TestTwoDevices):
    devices = 5


class TestGpuInHostMemory(TierKit):
    @pytest.fixture
    def make_tier(self) -> MakeTier:
        def make(arena: Arena, capacity: int) -> GpuTier:
            return GpuTier(capacity, arena, device="cpu")

        return make

    def test_is_labelled_as_an_emulation(self, desk):
        assert desk.tier.label == "gpu(host)"


class TestPeer(ReadingKit):
    @pytest.fixture
    def desk(self, arena: Arena):
        with far() as host, near(arena) as tier:
            yield PeerDesk(tier, arena, hosts=[host])
        assert not host.shelf.held
