"""A host's kvtier in this process, and an engine's scheduler over it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import kvtier
from tests.unit.connectors.vllm.side import Engine, Here


@pytest.fixture
def cache() -> Iterator[kvtier.Cache]:
    with kvtier.open({"cpu": {"capacity": "16MiB"}}) as opened:
        yield opened


@pytest.fixture
def here(cache: kvtier.Cache) -> Here:
    return Here(cache)


@pytest.fixture
def engine(here: Here) -> Iterator[Engine]:
    engine = Engine(here)
    yield engine
    here.free.set()
    engine.side.close()
