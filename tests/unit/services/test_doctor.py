"""What is missing on a machine is named, with what to do about it."""

from __future__ import annotations

import re

import pytest

from kvtier.config import (
    Config,
    CpuConfig,
    FleetConfig,
    GpuConfig,
    IndexConfig,
    MetricsConfig,
    NvmeConfig,
    RayConfig,
    RemoteConfig,
    Size,
    StatusConfig,
)
from kvtier.errors import ConfigError
from kvtier_services import doctor
from kvtier_services.doctor import checks
from kvtier_services.gateway import tokens
from tests.remote_fixture import Authority


def config_in(folder, **changes) -> Config:
    fields = {
        "run_dir": str(folder / "run"),
        "arena_dir": str(folder / "arena"),
        "cpu": CpuConfig(capacity=Size(1 << 20)),
        "nvme": NvmeConfig(capacity=Size(1 << 20), path=str(folder / "nvme")),
        "metrics": MetricsConfig(port=0),
        "status": StatusConfig(port=0),
    }
    return Config(**fields | changes)


@pytest.fixture
def found(tmp_path):
    """Checks by name, of the defaults with changes."""
    return lambda **changes: {check.name: check for check in checks(config_in(tmp_path, **changes))}


def test_a_machine_that_is_well_has_no_failures_and_nothing_to_fix(found, tmp_path):
    checked = found()
    assert [check for check in checked.values() if check.level == "fail"] == []
    assert all(check.fix for check in checked.values() if check.level != "ok")
    assert not any(check.fix for check in checked.values() if check.level == "ok")
    assert list(tmp_path.iterdir()) == [], "nothing was made"


def test_memory_that_is_too_small(found):
    check = found(cpu=CpuConfig(capacity=Size(1 << 60)))["arena_dir"]
    assert check.level == "fail"
    assert check.fix.startswith("set cpu.capacity to at most ")


def test_a_disk_that_is_too_small(found, tmp_path):
    check = found(nvme=NvmeConfig(capacity=Size(1 << 60), path=str(tmp_path)))["nvme space"]
    assert check.level == "fail"
    assert check.fix.startswith("set nvme.capacity to at most ")


def test_no_nvme_tier_is_no_problem(found):
    assert found(nvme=NvmeConfig(capacity=Size(0)))["nvme"].found == "off"


def test_no_direct_io(found, monkeypatch):
    monkeypatch.setattr(doctor, "_direct_io", lambda _: "Invalid argument")
    check = found()["direct I/O"]
    assert (check.level, bool(check.fix)) == ("warn", True)


def test_no_redis(found, monkeypatch):
    def none():
        raise ConfigError("install redis-server")

    monkeypatch.setattr(doctor.redis_server, "find_binary", none)
    assert (found()["redis"].level, found()["redis"].fix) == ("fail", "install redis-server")
    assert found(index=IndexConfig(url="local"))["redis"].level == "ok"


@pytest.mark.parametrize(("mode", "level"), [("", "warn"), ("token", "ok"), ("disabled", "ok")])
def test_the_auth_mode_of_the_users_ray(found, monkeypatch, mode, level):
    monkeypatch.setenv("RAY_AUTH_MODE", mode)
    assert found(ray=RayConfig(address="there:6379"))["ray auth"].level == level
    assert found()["ray auth"].level == "ok"


def test_busy_ports(found, monkeypatch):
    monkeypatch.setattr(doctor, "_busy", lambda _host, _port: "Address already in use")
    used = {"metrics": MetricsConfig(port=9400), "status": StatusConfig(), "fleet": FleetConfig(port=7080)}
    checked = found(ray=RayConfig(port=6379), **used)
    assert (checked["ray.port"].level, checked["ray.port"].fix) == ("fail", "set ray.port to a free one, or 0")
    assert {checked[f"{name}.port"].level for name in used} == {"warn"}


def test_a_gpu_that_is_not_there(found, monkeypatch):
    monkeypatch.setattr(doctor, "cuda_present", lambda: False)
    assert found(gpu=GpuConfig(device="cuda:0"))["gpu"].level == "fail"
    assert found(gpu=GpuConfig(device="cpu"))["gpu"].found == "emulated in host memory: gpu(host)"
    assert found()["gpu"].level == "ok"


def test_locked_memory_with_cuda(found, monkeypatch):
    monkeypatch.setattr(doctor, "cuda_present", lambda: True)
    monkeypatch.setattr(doctor.resource, "getrlimit", lambda _: (8 << 20, 8 << 20))
    for capacity, level in ((8 << 20, "ok"), (9 << 20, "warn")):
        check = found(gpu=GpuConfig(device="off"), cpu=CpuConfig(capacity=Size(capacity)))["memlock"]
        assert (check.level, check.found) == (level, "8MiB")


def test_an_nvme_path_where_nothing_can_be_written_is_said_and_not_raised(found, tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file" / "x", "/proc/kvtier"):
        check = found(nvme=NvmeConfig(capacity=Size(1 << 20), path=str(path)))["nvme path"]
        assert (check.level, "nvme.path" in check.fix) == ("fail", True)


def test_several_devices_on_one_file_system_work_and_share_its_room(tmp_path):
    nvme = NvmeConfig(capacity=Size(1 << 59), path=(str(tmp_path / "a"), str(tmp_path / "b")))
    found = list(checks(config_in(tmp_path, nvme=nvme)))
    said = {check.name: check for check in found if check.name.startswith("nvme")}
    assert said["nvme path"].level == "warn"
    assert said["nvme path"].found == f"{tmp_path}/a, {tmp_path}/b are on one file system"
    assert said["nvme space"].found.endswith("GiB for 1048576TiB"), "of both"
    assert len([check for check in found if check.name == "direct I/O"]) == 2


def test_of_several_devices_one_that_cannot_be_written_to_is_named(tmp_path):
    nvme = NvmeConfig(capacity=Size(1 << 20), path=(str(tmp_path / "a"), "/proc/kvtier"))
    said = {check.name: check for check in checks(config_in(tmp_path, nvme=nvme)) if check.name.startswith("nvme")}
    assert (said["nvme path"].level, said["nvme space"].level) == ("fail", "ok")
    assert "/proc" in said["nvme path"].found


@pytest.fixture
def remote(tmp_path):
    """What is found of the remote door with these settings."""

    def remote(**settings):
        config = config_in(tmp_path, remote=RemoteConfig(tokens_file=str(tmp_path / "tokens.json"), **settings))
        return {check.name: check for check in checks(config) if check.name in ("remote", "tokens")}

    return remote


def test_a_remote_door_without_tokens_or_tls(remote, tmp_path):
    assert remote() == {}
    found = remote(listen="127.0.0.1:0")
    assert (found["remote"].level, found["tokens"].level) == ("ok", "warn")
    tokens.add(tmp_path / "tokens.json", "alice")
    found = remote(listen="0.0.0.0:0", insecure=True)
    assert (found["remote"].level, found["tokens"].level) == ("warn", "ok")
    (tmp_path / "tokens.json").chmod(0o640)
    assert remote(listen="127.0.0.1:0")["tokens"].level == "fail"


def test_a_certificate_that_ends_soon_or_does_not_fit(remote, tmp_path):
    authority = Authority(tmp_path)
    cert, key = authority.issue("host")
    found = remote(listen="0.0.0.0:0", cert=str(cert), key=str(key))["remote"]
    assert found.level == "warn"
    assert re.search(r"holds for [12] days", found.found)
    _, other = authority.issue("other")
    assert remote(listen="0.0.0.0:0", cert=str(cert), key=str(other))["remote"].level == "fail"
