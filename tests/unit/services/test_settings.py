"""What the processes of a running kvtier are told."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from kvtier.config import Config, GpuConfig, IndexConfig, NvmeConfig, Size
from kvtier_services.settings import Secret, Settings, host_name


def test_they_travel_and_show_no_secret():
    settings = Settings(Config(run_dir="/run/x"), "redis://h", Secret("hidden"), Secret("veiled"), "box")
    there = pickle.loads(pickle.dumps(settings))
    assert there == settings
    assert {path: secret.text for path, secret in there.secrets.items()} == {
        Path("/run/x/redis.password"): "hidden",
        Path("/run/x/fleet.secret"): "veiled",
    }
    assert "hidden" not in f"{there!r} {there} {there.secrets}"
    assert "veiled" not in f"{there!r} {there} {there.secrets}"


def test_a_password_in_a_file_of_each_host_stays_there():
    settings = Settings(Config(index=IndexConfig(password_file="/etc/secret")), "redis://h")
    assert settings.redis_password_file == "/etc/secret"
    assert settings.secrets == {}


def test_hosts_on_one_machine_have_folders_of_their_own(monkeypatch):
    config = Config(run_dir="/run/{host}", arena_dir="/shm/{host}", nvme=NvmeConfig(path="/disk/{host}"))
    namespaces = set()
    for name in ("a", "b"):
        monkeypatch.setenv("KVTIER_HOST", name)
        settings = Settings(config, up_host="a")
        namespaces.add(settings.namespace)
        assert host_name() == name
        assert settings.socket == config.socket == Path(f"/run/{name}/door.sock")
        assert settings.arena_dir == Path(f"/shm/{name}")
        assert settings.nvme_dirs == {"nvme": Path(f"/disk/{name}")}
        assert settings.nvme_dirs_on("c") == {"nvme": Path("/disk/c")}
    assert len(namespaces) == 1


def test_paths_are_absolute_and_of_the_run_folder(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    settings = Settings(Config(run_dir="~/run"))
    assert settings.run_dir == Path("/home/me/run")
    assert {settings.socket, settings.state_file, settings.ray_token, settings.up_lock, settings.ray_log} == {
        Path("/home/me/run", name) for name in ("door.sock", "state.json", "ray.token", "up.lock", "ray.log")
    }
    assert settings.socket == Config(run_dir="/home/me/run").socket


def test_each_device_of_the_nvme_tier_has_a_process(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")

    def dirs(**fields):
        return Settings(Config(nvme=NvmeConfig(**fields))).nvme_dirs

    assert dirs(path="~/nvme") == dirs(path=("~/nvme",)) == {"nvme": Path("/home/me/nvme")}
    assert dirs(path=("/mnt/a", "~/b")) == {"nvme-1": Path("/mnt/a"), "nvme-2": Path("/home/me/b")}
    assert dirs(path="~/nvme", capacity=Size(0)) == {}


def test_two_that_share_a_ray_have_two_namespaces():
    one, two = Settings(Config(run_dir="/run/1"), up_host="a"), Settings(Config(run_dir="/run/2"), up_host="a")
    assert one.namespace != two.namespace
    assert one.namespace == Settings(Config(run_dir="/run/1"), "redis://x", up_host="a").namespace
    assert one.namespace != Settings(Config(run_dir="/run/1"), up_host="b").namespace


@pytest.mark.parametrize(
    ("device", "capacity", "gpus", "used"),
    [
        ("auto", 1, 0, ""),
        ("auto", 1, 2, "cuda:0"),
        ("auto", 0, 2, ""),
        ("off", 1, 2, ""),
        ("cpu", 1, 0, "cpu"),
        ("cuda", 1, 0, "cuda:0"),
        ("cuda:1", 1, 2, "cuda:1"),
    ],
)
def test_the_gpu_tiers_device(device, capacity, gpus, used):
    gpu = GpuConfig(capacity=Size(capacity << 20), device=device)
    assert Settings(Config(gpu=gpu)).gpu_device(gpus) == used
