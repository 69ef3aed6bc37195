"""The NVMe tier's process."""

from __future__ import annotations

from kvtier.lossless.method import METHODS
from kvtier.memory.arena import Arena
from kvtier.tiers.nvme import NvmeTier
from kvtier_services.actors.service import TierService
from kvtier_services.settings import Settings


class NvmeTierActor(TierService):
    """Reads and writes one device's log, straight from and to slots of the arena. Its blocks survive a restart."""

    def __init__(self, settings: Settings, name: str) -> None:
        """Serve nobody yet.

        Args:
            settings: of this kvtier.
            name: of one of `settings.nvme_dirs`.
        """
        folder = settings.nvme_dirs[name]
        nvme = settings.config.nvme
        capacity, region, lossless = int(nvme.capacity), int(nvme.region_size), METHODS[nvme.lossless]

        def open_tier(arena: Arena) -> NvmeTier:
            return NvmeTier(folder, capacity, arena, region_nbytes=region, lossless=lossless)

        super().__init__(name, settings.arena_dir, open_tier)
