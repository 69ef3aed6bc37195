"""A real Redis server for tests, as `kvtier up` starts it. Import the fixtures where they are needed."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from redis import Redis

from kvtier.index.base import Life
from kvtier.index.connect import parts
from kvtier.index.options import RedisIndexOptions
from kvtier.index.redis import RedisIndex
from kvtier_services import redis_server
from kvtier_services.redis_server import RedisProcess

QUICK = RedisIndexOptions(lookup_timeout=0.25, heartbeat=0.05, pause=0.02, longest_pause=0.1)
"""Paces for tests; the lookup's time-out is long because test machines stall."""

MakeRedisIndex = Callable[..., RedisIndex]


@contextmanager
def server_in_temporary_folder() -> Iterator[tuple[RedisProcess, Path]]:
    folder = Path(tempfile.mkdtemp(prefix="kvt"))  # pytest's own paths are too long for a socket
    try:
        yield redis_server.start(folder), folder
    finally:
        redis_server.stop(folder)
        shutil.rmtree(folder)


@pytest.fixture(scope="session")
def shared_redis() -> Iterator[RedisProcess]:
    """One server for all tests that do not hurt it."""
    with server_in_temporary_folder() as (server, _):
        yield server


@pytest.fixture
def redis(shared_redis: RedisProcess) -> Iterator[Redis]:
    """A client of that server, emptied."""
    client = shared_redis.address.client(timeout=5.0)
    client.flushall()
    yield client
    client.close()


@pytest.fixture
def make_redis_index(redis: Redis, shared_redis: RedisProcess) -> Iterator[MakeRedisIndex]:
    """Makes indexes on the shared server, and closes them."""
    made = []

    def make(life: Life, *, options: RedisIndexOptions = QUICK, run: bool = True) -> RedisIndex:
        _, lookups, masters = parts(shared_redis.address, options)
        try:
            made.append(RedisIndex(lookups, masters, life, options=options, run=run))
        except BaseException:
            lookups.close()
            masters.close()
            raise
        return made[-1]

    yield make
    for index in made:
        index.close()
