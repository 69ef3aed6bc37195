"""From an address to an index."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from redis import Redis

from kvtier.index.address import RedisAddress, Where
from kvtier.index.base import Life
from kvtier.index.find import ALONE, FAULTS, UNKNOWN, Finder, Layout, finder
from kvtier.index.lookups import Lookups
from kvtier.index.masters import Masters, run
from kvtier.index.nodes import NODES, preferred_number, read_nodes, register
from kvtier.index.options import RedisIndexOptions
from kvtier.index.ready import Line, Punctual
from kvtier.index.redis import RedisIndex


def connect(
    address: RedisAddress, *, host: str, door: str = "", options: RedisIndexOptions | None = None
) -> RedisIndex:
    """Register `host` and start its index.

    When Redis is away it starts all the same: with the number that the host's name prefers and an incarnation from
    this host's clock, and works when Redis is back.

    Raises:
        ConfigError: the password cannot be read.
    """
    address.credentials()
    options = options or RedisIndexOptions()
    find, lookups, masters = parts(address, options)
    life = Life(preferred_number(host), int(time.time()), host, door, provisional=True)
    try:
        layout = find.find()
        masters.take(layout)
        lookups.take(layout)
        life = register(masters.of(NODES), host, door)
    except FAULTS:
        pass  # the background goes on trying
    return RedisIndex(lookups, masters, life, finder=find, options=options)


def parts(address: RedisAddress, options: RedisIndexOptions) -> tuple[Finder, Lookups, Masters]:
    """What an index asks its server by: who the masters are, what they know, and what they are told."""
    patience = options.update_timeout
    layout: Layout = UNKNOWN if address.kind else ALONE

    def client(where: Where) -> Redis:
        return address.client(patience, where if address.kind else None)

    def connection(where: Where) -> Callable[[], Line]:
        pool = client(where).connection_pool  # which counts the connections that it makes, and never makes many
        return partial(pool.connection_class, **pool.connection_kwargs, parser_class=Punctual)

    lookups = Lookups(connection, layout, timeout=options.lookup_timeout)
    return finder(address, patience / 2), lookups, Masters(client, layout)


def reach(address: RedisAddress, timeout: float) -> int:
    """See that all masters answer and let the index work; how many there are.

    Raises:
        redis.RedisError, OSError: one does not, within so many seconds.
        ConfigError: the password cannot be read.
    """
    address.credentials()
    find, lookups, masters = parts(address, RedisIndexOptions(lookup_timeout=timeout, update_timeout=timeout))
    try:
        layout = find.find()
        lookups.take(layout)
        masters.take(layout)
        lookups.ping()
        read_nodes(masters.of(NODES), timeout)
        for client in masters.all:
            run(client, "return 1", [], [])
        return len(masters.all)
    finally:
        lookups.close()
        masters.close()
        find.close()
