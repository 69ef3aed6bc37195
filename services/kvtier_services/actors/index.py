"""From the settings to an index."""

from __future__ import annotations

from kvtier.index.address import RedisAddress
from kvtier.index.base import Index
from kvtier.index.connect import connect
from kvtier.index.local import LocalIndex, LocalStore
from kvtier_services.settings import Settings, host_name


def open_index(settings: Settings, door: str = "") -> Index:
    """The index that this host speaks to; `door`: where other hosts reach it."""
    host = host_name()
    if settings.redis_url == "local":
        store = LocalStore()
        return LocalIndex(store, store.register(host, door))
    return connect(RedisAddress(settings.redis_url, settings.redis_password_file), host=host, door=door)
