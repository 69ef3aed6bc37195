"""The GPU tier's process."""

from __future__ import annotations

import logging
from functools import partial

from kvtier.memory.arena import Arena
from kvtier.memory.filling import Filling
from kvtier.memory.pinning import Pinner, pin_as_it_grows
from kvtier.tiers.gpu import GpuTier
from kvtier_services.actors.service import TierService
from kvtier_services.settings import Settings

log = logging.getLogger(__name__)


class GpuWorkerActor(TierService):
    """Copies between slots of the arena and one GPU's memory. A restart loses its blocks."""

    def __init__(self, settings: Settings, device: str) -> None:
        import torch  # noqa: F401 - seconds, spent while the CPU tier makes the arena

        capacity = int(settings.config.gpu.capacity)

        pinning: list[Filling] = []

        def open_tier(arena: Arena) -> GpuTier:
            while pinning:  # of an arena that is no more
                pinning.pop().close()
            if device != "cpu":
                pinning.append(pin_as_it_grows(arena, Pinner(partial(log.warning, "arena not page-locked: %s"))))
            return GpuTier(capacity, arena, device)

        super().__init__(GpuTier.name, settings.arena_dir, open_tier)
