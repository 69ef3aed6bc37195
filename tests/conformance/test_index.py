"""Every index passes the kit."""

from __future__ import annotations

import pytest

from kvtier.index.local import LocalIndex, LocalStore
from kvtier.testing.index import IndexKit
from tests.redis_fixture import make_redis_index, redis, shared_redis  # noqa: F401


class TestLocalIndex(IndexKit):
    @pytest.fixture
    def make_index(self):
        store = LocalStore()
        return lambda life: LocalIndex(store, life)


class TestRedisIndex(IndexKit):
    @pytest.fixture
    def make_index(self, make_redis_index):  # noqa: F811
        return make_redis_index
