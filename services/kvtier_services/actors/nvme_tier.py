"""The NVMe tier's process."""

from __future__ import annotations

from pathlib import Path

from kvtier.memory.arena import Arena
from kvtier.tiers.nvme import NvmeTier
from kvtier_services.actors.service import TierService
from kvtier_services.settings import Settings


class NvmeTierActor(TierService):
    """Reads and writes one device's log, straight from and to slots of the arena. Its blocks survive a restart."""

    def __init__(self, settings: Settings) -> None:
        config, folder = settings.config.nvme, settings.nvme_dir

        def open_tier(arena: Arena) -> NvmeTier:
            Path(folder).mkdir(parents=True, exist_ok=True)
            return NvmeTier(folder, config.capacity, arena, region_nbytes=config.region_size)

        super().__init__(NvmeTier.name, settings.arena_dir, open_tier)
