"""Fixtures of the cluster tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cluster.kit import Cluster, cluster_in_temporary_folders


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """Not started."""
    with cluster_in_temporary_folders() as made:
        yield made


@pytest.fixture(scope="module")
def running() -> Iterator[Cluster]:
    """Started once for all tests of a module."""
    with cluster_in_temporary_folders() as made:
        made.cli("up")
        yield made
