"""What kvtier needs of a machine, and how to fix what is missing."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import mmap
import os
import platform
import resource
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from redis.exceptions import RedisError

from kvtier.config import Config, RemoteConfig, Size
from kvtier.config.machine import is_loopback
from kvtier.config.schema import folder as absolute
from kvtier.errors import ConfigError
from kvtier.index.address import RedisAddress
from kvtier.index.connect import reach
from kvtier.memory import limits
from kvtier.memory.pinning import cuda_present
from kvtier_services import redis_server
from kvtier_services.cluster import look
from kvtier_services.gateway import tokens
from kvtier_services.gateway.tls import Certificate
from kvtier_services.settings import Settings

PACKAGES = ("ray", "torch", "numpy", "numba", "grpcio", "redis", "msgspec", "prometheus-client")
OPEN_FILES = 4096
EXPIRING = 14 * 86_400.0
"""Seconds that a certificate must hold yet."""


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at.

    Attributes:
        level: whether it is well.
        name: what was looked at.
        found: what is there.
        fix: what to do; empty when it is well.
    """

    level: Literal["ok", "warn", "fail"]
    name: str
    found: str
    fix: str = ""


def checks(config: Config) -> Iterator[Check]:
    """Look at everything, without changing anything that stays."""
    settings = Settings(config)
    _, runs = look.running(config)
    yield _versions()
    yield _run_dir(settings)
    yield _arena(settings, runs=runs)
    yield from _locked_memory(config.cpu.capacity)
    yield _open_files()
    yield from _nvme(settings)
    yield _gpu(settings)
    yield _redis(config)
    yield from _ray(config)
    yield from _remote(config)
    yield from _ports(config, runs=runs)


def _versions() -> Check:
    missing, found = [], [f"Python {platform.python_version()}"]
    for package in PACKAGES:
        try:
            found.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            missing.append(package)
    if missing or sys.version_info < (3, 11):
        return Check("fail", "versions", ", ".join(found), f"install {' '.join(missing) or 'Python 3.11 or later'}")
    return Check("ok", "versions", ", ".join(found))


def _run_dir(settings: Settings) -> Check:
    folder = _existing(settings.run_dir)
    if not os.access(folder, os.W_OK):
        return Check("fail", "run_dir", f"{folder} cannot be written to", "set run_dir to a folder of yours")
    length = len(os.fsencode(settings.socket))
    return Check("ok", "run_dir", f"{settings.run_dir}; the socket's path has {length} bytes of at most 103")


def _arena(settings: Settings, *, runs: bool) -> Check:
    folder, need = settings.arena_dir, settings.config.cpu.capacity
    limit = limits.room(_existing(folder))
    if runs or (folder / "arena").exists():
        return Check("ok", "arena_dir", f"{folder} has an arena; {limit.found}")
    found = f"{limit.found}, the arena needs {need}"
    if limits.fits(_existing(folder), need):
        return Check("fail", "arena_dir", found, limits.advice(limit))
    return Check("ok", "arena_dir", found)


def _locked_memory(need: int) -> Iterator[Check]:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    found = "unlimited" if soft == resource.RLIM_INFINITY else _written(soft)
    if not cuda_present():
        yield Check("ok", "memlock", f"{found}; without CUDA nothing is page-locked")
    elif soft == resource.RLIM_INFINITY or soft >= need:
        yield Check("ok", "memlock", found)
    else:
        yield Check("warn", "memlock", found, "raise it (ulimit -l unlimited), else copies to the GPU are slower")


def _open_files() -> Check:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < OPEN_FILES:
        return Check("warn", "open files", f"{soft}", f"Ray wants more: ulimit -n {OPEN_FILES}")
    return Check("ok", "open files", f"{soft}")


def _nvme(settings: Settings) -> Iterator[Check]:
    folders = list(settings.nvme_dirs.values())
    if not folders:
        yield Check("ok", "nvme", "off")
    disks: dict[int, list[Path]] = {}
    for folder in folders:
        place = _existing(folder)
        try:
            direct = _direct_io(place)
            disks.setdefault(place.stat().st_dev, []).append(folder)
        except OSError as exc:
            found = f"nothing can be written in {place}: {exc.strerror}"
            yield Check("fail", "nvme path", found, "set nvme.path to a folder of yours")
            continue
        yield Check(
            "ok" if not direct else "warn",
            "direct I/O",
            f"works in {place}" if not direct else f"not in {place}: {direct}",
            "" if not direct else "the page cache is used, which works; for speed set nvme.path to a local disk",
        )
    for together in disks.values():
        yield from _disk(together, settings.config.nvme.capacity)


def _disk(folders: list[Path], each: Size) -> Iterator[Check]:
    """Folders of the NVMe tier that are on one file system."""
    names, need = ", ".join(map(str, folders)), Size(each * len(folders))
    if len(folders) > 1:
        yield Check("warn", "nvme path", f"{names} are on one file system", "name one folder on each device")
    taken = 0
    with suppress(OSError):
        taken = sum(file.stat().st_blocks * 512 for folder in folders for file in folder.glob("*"))
    free = shutil.disk_usage(_existing(folders[0])).free + taken
    most = Size(int(free * 0.9) // len(folders) >> 20 << 20)
    fix = f"set nvme.capacity to at most {most}, or nvme.path to a larger disk"
    found = f"{names}: {_written(free)} for {need}"
    yield Check("ok", "nvme space", found) if need <= free else Check("fail", "nvme space", found, fix)


def _direct_io(folder: Path) -> str:
    """Why O_DIRECT does not work there; empty when it does.

    Raises:
        OSError: no file can be made there at all.
    """
    fd, path = tempfile.mkstemp(prefix=".kvtier-doctor-", dir=folder)
    os.close(fd)
    if not hasattr(os, "O_DIRECT"):
        os.unlink(path)
        return "this platform has no O_DIRECT"
    try:
        fd = os.open(path, os.O_RDWR | os.O_DIRECT)
        try:
            os.pwrite(fd, mmap.mmap(-1, 4096), 0)
        finally:
            os.close(fd)
    except OSError as exc:
        return exc.strerror or str(exc)
    finally:
        os.unlink(path)
    return ""


def _gpu(settings: Settings) -> Check:
    device = settings.gpu_device(int(cuda_present()))
    if not device:
        return Check("ok", "gpu", "no CUDA device: no GPU tier" if settings.config.gpu.device == "auto" else "off")
    if device == "cpu":
        return Check("ok", "gpu", "emulated in host memory: gpu(host)")
    if not cuda_present():
        return Check(
            "fail", "gpu", f"gpu.device is {device}, and there is no CUDA", 'set gpu.device to "auto" or "off"'
        )
    import torch

    number = int(device.partition(":")[2] or 0)
    if number >= torch.cuda.device_count():
        return Check(
            "fail", "gpu", f"there are {torch.cuda.device_count()} CUDA devices", "set gpu.device to one of them"
        )
    free, _ = torch.cuda.mem_get_info(number)
    need = settings.config.gpu.capacity
    found = f"{torch.cuda.get_device_name(number)} has {_written(free)} free, the tier needs {need}"
    return Check("ok", "gpu", found) if free > need else Check("fail", "gpu", found, "set gpu.capacity lower")


def _redis(config: Config) -> Check:
    if config.index.url == "local":
        return Check("ok", "redis", "none: index.url is local")
    if config.index.url != "embedded":
        address = RedisAddress(config.index.url, config.index.password_file)
        try:
            masters = reach(address, 2.0)
        except (RedisError, OSError, ConfigError) as exc:
            return Check("fail", "redis", f"{config.index.url} does not answer: {exc}", "start it, or set index.url")
        return Check("ok", "redis", f"{config.index.url} answers" + (f": {masters} masters" if masters > 1 else ""))
    try:
        return Check("ok", "redis", str(redis_server.find_binary()))
    except ConfigError as exc:
        return Check("fail", "redis", "no server program", str(exc))


def _ray(config: Config) -> Iterator[Check]:
    if importlib.util.find_spec("ray") is None:
        yield Check("fail", "ray", "not installed", "pip install ray")
        return
    mode = os.environ.get("RAY_AUTH_MODE", "")
    token = Path.home() / ".ray" / "auth_token"
    if not config.ray.address:
        yield Check("ok", "ray auth", "kvtier's own cluster has a token of its own, whatever the environment says")
    elif mode:
        yield Check("ok", "ray auth", f"RAY_AUTH_MODE={mode} for {config.ray.address}")
    else:
        yield Check(
            "warn",
            "ray auth",
            f"RAY_AUTH_MODE is not set, and {token} {'exists' if token.exists() else 'does not exist'}",
            f"set RAY_AUTH_MODE to token or disabled, as {config.ray.address} has it: the default depends on that file",
        )


def _ports(config: Config, *, runs: bool) -> Iterator[Check]:
    wanted = [("ray.port", "", config.ray.port)] if not config.ray.address else []
    wanted.append(("metrics.port", config.metrics.host, config.metrics.port))
    wanted.append(("status.port", config.status.host, config.status.port))
    wanted.append(("fleet.port", config.fleet.address, config.fleet.port))
    if config.remote.listen:
        host, port = config.remote.address
        wanted += [("remote.listen", host, port), ("remote.bulk_port", host, config.remote.bulk)]
    for name, host, port in wanted:
        if not port:
            yield Check("ok", name, "any free one")
        elif runs:
            yield Check("ok", name, f"{port}; kvtier runs")
        elif fault := _busy(host, port):
            yield Check(
                "fail" if name == "ray.port" else "warn", name, f"{port}: {fault}", f"set {name} to a free one, or 0"
            )
        else:
            yield Check("ok", name, f"{port} is free")


def _remote(config: Config) -> Iterator[Check]:
    remote = config.remote
    if not remote.listen:
        return
    host, _ = remote.address
    open_to = "loopback only" if is_loopback(host) else "other hosts"
    if not remote.cert:
        how = Check("ok", "remote", f"{remote.listen}, plain text, {open_to}")
        yield how if is_loopback(host) else replace(how, level="warn", fix="set remote.cert and remote.key")
    else:
        yield _certificate(remote)
    try:
        known = tokens.read(remote.tokens)
    except ConfigError as exc:
        yield Check("fail", "tokens", str(exc), "`chmod 600` it, or write it anew with `kvtier token add`")
    else:
        found = f"{len(known.tokens)} in {remote.tokens}"
        yield Check(
            "ok" if known.tokens else "warn", "tokens", found, "" if known.tokens else "`kvtier token add NAME`"
        )


def _certificate(remote: RemoteConfig) -> Check:
    """Whether certificate and key go together, and for how long."""
    files = [absolute(name) if name else None for name in (remote.cert, remote.key, remote.client_ca)]
    cert, key, client_ca = files
    if cert is None or key is None:
        return Check("fail", "remote", "there is no certificate", "set remote.cert and remote.key")
    try:
        left = Certificate(cert, key, client_ca).expires() - time.time()
    except ConfigError as exc:
        return Check("fail", "remote", str(exc), "name PEM files that go together")
    found = f"{remote.listen}, {cert} holds for {left / 86_400:.0f} days"
    if left < EXPIRING:
        return Check("warn" if left > 0 else "fail", "remote", found, "renew it: hosts that run take the new one over")
    return Check("ok", "remote", found)


def _busy(host: str, port: int) -> str:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as exc:
            return exc.strerror or str(exc)
    return ""


def _existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that exists."""
    with suppress(OSError):
        while not folder.exists():
            folder = folder.parent
    return folder


def _written(nbytes: int) -> str:
    return f"{nbytes / 2**30:.1f}GiB" if nbytes >= 1 << 30 else f"{nbytes / 2**20:.0f}MiB"
