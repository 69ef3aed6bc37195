"""The GPU tier's process."""

from __future__ import annotations

from kvtier.memory.arena import Arena
from kvtier.memory.pinning import pin
from kvtier.tiers.gpu import GpuTier
from kvtier_services.actors.service import TierService
from kvtier_services.settings import Settings


class GpuWorkerActor(TierService):
    """Copies between slots of the arena and one GPU's memory. A restart loses its blocks."""

    def __init__(self, settings: Settings, device: str) -> None:
        import torch  # noqa: F401 - seconds, spent while the CPU tier makes the arena

        capacity = int(settings.config.gpu.capacity)

        def open_tier(arena: Arena) -> GpuTier:
            if device != "cpu":
                pin(arena.memory)
            return GpuTier(capacity, arena, device)

        super().__init__(GpuTier.name, settings.arena_dir, open_tier)
