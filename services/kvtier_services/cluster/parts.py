"""What the actors get from the layers above them."""

from __future__ import annotations

import grp
from collections.abc import Callable
from functools import partial
from typing import Any

from kvtier.config.schema import folder
from kvtier.hierarchy.cache import Hierarchy
from kvtier.memory.arena import Arena
from kvtier_services import redis_server
from kvtier_services.actors.cpu_tier import Door, Serving
from kvtier_services.actors.hands import status_of
from kvtier_services.cluster import state
from kvtier_services.gateway import control, tokens
from kvtier_services.gateway.doors import Doors
from kvtier_services.gateway.register import Register
from kvtier_services.gateway.remote import Listen, RemoteDoor
from kvtier_services.gateway.tls import Certificate
from kvtier_services.monitor.metrics import Exporter
from kvtier_services.monitor.page import Page
from kvtier_services.settings import Settings, host_name


def open_door(hierarchy: Hierarchy, settings: Settings) -> Door:
    """The door of a host; with one for clients of other hosts beside it, where that is configured."""
    config, remote = settings.config, settings.config.remote
    group = grp.getgrnam(config.group).gr_gid if config.group else None
    front = partial(control.Door, hierarchy, settings.socket, node=host_name(), mode=config.mode, group=group)
    if not remote.listen:
        return front()
    # Without its tokens file a host does not know the salt of its own engines' keys, and so lets nobody in.
    tokens.prepare(remote.tokens)
    register = Register(remote.tokens)
    files = [folder(name) if name else None for name in (remote.cert, remote.key, remote.client_ca)]
    cert, key, client_ca = files
    certificate = Certificate(cert, key, client_ca) if cert and key else None
    listen = Listen(*remote.address, remote.bulk, certificate, remote.insecure)
    side = RemoteDoor(hierarchy, listen, register, settings.run_dir / "audit.log", node=host_name())
    return Doors(front(salt=register.local_salt), side)


def open_exporter(hierarchy: Hierarchy, settings: Settings, serving: Serving) -> Exporter:
    """The Prometheus exporter of a host."""
    metrics = settings.config.metrics
    return Exporter(
        partial(status_of, hierarchy),
        name=host_name(),
        host=metrics.host,
        port=metrics.port,
        why_not=serving.why_not,
        tenants=serving.tenants,
    )


def open_page(settings: Settings, snapshot: Callable[[], dict[str, Any]]) -> Page:
    """The status page of a fleet, over its controller's snapshots."""
    status = settings.config.status
    token_file = folder(status.token_file) if status.token_file else None
    return Page(snapshot, host=status.host, port=status.port, token_file=token_file)


def about(settings: Settings) -> dict[str, Any]:
    """What a host knows of the Ray and the Redis of its kvtier, for a snapshot; little where it did not start them."""
    known = state.read(settings.state_file)
    redis = redis_server.running(settings.run_dir) if known and known.redis else None
    ray = {"address": settings.config.ray.address, "own": False, "pid": 0}
    if known is not None:
        ray = {"address": known.address, "own": known.own_ray, "pid": known.head.pid if known.head else 0}
    return {
        "run_dir": str(settings.run_dir),
        "ray": ray,
        "redis": {
            "embedded": known is not None and known.redis,
            "pid": redis.pid if redis else 0,
            "version": redis.version if redis else "",
        },
    } | ({"started": known.started} if known else {})


def writer_gone(arena: Arena) -> Callable[[int], bool]:
    """Whether a cut-off session writes no more."""
    if arena.folder is None:
        return lambda _session: True
    return control.writer_gone(arena.folder)
