"""Addresses where nobody answers are said at once, in one line."""

from __future__ import annotations

import socket

import pytest

from kvtier.config import Config, IndexConfig, MetricsConfig, NvmeConfig, Size
from kvtier.errors import ConfigError
from kvtier_services.cluster.actors import connected
from kvtier_services.cluster.state import read
from kvtier_services.doctor import checks


@pytest.fixture
def nobody():
    """A port that is taken and not listened on."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{taken.getsockname()[1]}"


def test_a_ray_head_that_is_not_there(nobody):
    with pytest.raises(ConfigError, match=r"ray\.address"), connected(nobody, "kvtier"):
        pass
    with pytest.raises(ConfigError, match="host:port"), connected("nonsense", "kvtier"):
        pass


def test_a_redis_that_is_not_there(nobody, tmp_path):
    config = Config(
        run_dir=str(tmp_path / "run"),
        arena_dir=str(tmp_path / "arena"),
        nvme=NvmeConfig(capacity=Size(0)),
        metrics=MetricsConfig(port=0),
        index=IndexConfig(url=f"redis://{nobody}/0"),
    )
    redis = next(check for check in checks(config) if check.name == "redis")
    assert (redis.level, "does not answer" in redis.found) == ("fail", True)


def test_a_run_dir_that_is_no_folder_has_no_state(tmp_path):
    (tmp_path / "file").write_text("")
    assert read(tmp_path / "file" / "state.json") is None
