"""What the CPU tier's process gets from the layers above it."""

from __future__ import annotations

import grp
from collections.abc import Callable
from functools import partial

from kvtier.hierarchy.cache import Hierarchy
from kvtier.memory.arena import Arena
from kvtier_services.actors.hands import status_of
from kvtier_services.gateway import control
from kvtier_services.monitor.metrics import Exporter
from kvtier_services.settings import Settings, host_name


def open_door(hierarchy: Hierarchy, settings: Settings) -> control.Door:
    """The door of a host."""
    config = settings.config
    group = grp.getgrnam(config.group).gr_gid if config.group else None
    return control.Door(hierarchy, settings.socket, node=host_name(), mode=config.mode, group=group)


def open_exporter(hierarchy: Hierarchy, settings: Settings) -> Exporter:
    """The Prometheus exporter of a host."""
    metrics = settings.config.metrics
    return Exporter(partial(status_of, hierarchy), host=metrics.host, port=metrics.port)


def writer_gone(arena: Arena) -> Callable[[int], bool]:
    """Whether a cut-off session writes no more."""
    if arena.folder is None:
        return lambda _session: True
    return control.writer_gone(arena.folder)
