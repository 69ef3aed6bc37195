"""How Ray nodes of kvtier's own are started, and who may join them."""

from __future__ import annotations

import socket

import pytest

from kvtier.errors import ConfigError
from kvtier_services.cluster import head, join, node
from kvtier_services.cluster.state import Running
from kvtier_services.cluster.up import can_revive

PORTS = range(20001, 20001 + len(node.NAMED_PORTS) + 1)


def test_a_node_is_known_by_its_hosts_name_and_has_something_to_hold(monkeypatch):
    monkeypatch.setenv("KVTIER_HOST", "rack-1.box_7")
    command = node.command(["--address=10.0.0.1:6391"], "/tmp/ray", "10.0.0.2", PORTS)
    assert {"--labels=kvtier.io/host=rack-1.box_7", "--node-ip-address=10.0.0.2", "--num-cpus=0"} <= set(command)
    assert '"kvtier.nvme": 1' in next(flag for flag in command if flag.startswith("--resources="))
    assert [flag for flag in command if "token" in flag or "password" in flag] == []


def test_a_name_that_cannot_be_a_label(monkeypatch):
    monkeypatch.setenv("KVTIER_HOST", "no spaces")
    with pytest.raises(ConfigError, match=r"\$KVTIER_HOST is 'no spaces'; set it to letters"):
        node.command([], "/tmp/ray", "", PORTS)
    monkeypatch.delenv("KVTIER_HOST")
    monkeypatch.setattr(socket, "gethostname", lambda: "-odd-")
    assert not any("--labels" in flag for flag in node.command([], "/tmp/ray", "", PORTS))


def test_a_silent_host_is_dead_for_ray_about_when_it_is_for_the_index(tmp_path):
    from kvtier.index.options import RedisIndexOptions

    made = node.environment({}, "run", tmp_path)
    period, late = (int(made[f"RAY_health_check_{name}_ms"]) / 1000 for name in ("period", "timeout"))
    longest = int(made["RAY_health_check_failure_threshold"]) * (period + late)
    assert RedisIndexOptions().dead_after - 2 <= longest <= RedisIndexOptions().dead_after + 2


def test_what_a_head_keeps_is_of_its_run():
    assert head._remembering("memory", "r1") == {}
    assert head._remembering("/run/ray.gcs", "r1")["RAY_gcs_storage_path"] == "/run/ray.gcs"
    kept = head._remembering("redis://10.0.0.9:6379", "r1")
    assert kept["RAY_REDIS_ADDRESS"] == "10.0.0.9:6379"
    assert kept != head._remembering("redis://10.0.0.9:6379", "r2")


def test_only_a_head_that_kept_something_is_revived(tmp_path):
    def was(**fields) -> Running:
        told = {"version": 1, "run": "r", "started": 0.0, "starting": False, "up": None, "config": "", "socket": ""}
        told |= {"arena_dir": "", "address": "10.0.0.1:6391", "ray_token": "/t", "ray_storage": str(tmp_path)}
        return Running(**told | fields)

    assert not can_revive(was()), "it had not come up"
    (tmp_path / "session_name").touch()
    assert can_revive(was())
    assert can_revive(was(ray_storage="redis://h:1"))
    for other in ({"ray_storage": "memory"}, {"joined": True}, {"starting": True}, {"ray_token": ""}, {"address": ""}):
        assert not can_revive(was(**other)), other


def test_who_joins_needs_the_token(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot be read .*copy ray\.token out of run_dir of the fleet's first host"):
        join._secret(tmp_path / "token")
    (tmp_path / "token").write_text("\n")
    with pytest.raises(ConfigError, match="is empty"):
        join._secret(tmp_path / "token")
    (tmp_path / "token").write_text("abc\n")
    assert join._secret(tmp_path / "token") == "abc"
