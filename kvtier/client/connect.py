"""From a configuration to a cache: on the host's kvtier, or in this process."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from kvtier import config as configuration
from kvtier.client.cache import Cache
from kvtier.client.local import LocalSession
from kvtier.config import Config, NvmeConfig
from kvtier.config.load import parse
from kvtier.errors import ConfigError
from kvtier.hierarchy.cache import Hierarchy, Limits, Rules
from kvtier.hierarchy.flush import flush
from kvtier.index.local import LocalIndex, LocalStore
from kvtier.memory.arena import Arena
from kvtier.memory.pinning import resolve_device
from kvtier.tiers.base import Tier, TierNumber

FLUSH_SECONDS = 10.0
"""That a cache of this process's own may take to write down what only its memory has, when it is closed."""


def connect(
    target: str | Path | None = None,
    *,
    threads: int = 1,
    token: str = "",
    ca: str | Path | None = None,
    cert: str | Path | None = None,
    key: str | Path | None = None,
    insecure: bool = False,
) -> Cache:
    """Open a session with the kvtier of this host, or of another one.

    The engine's process needs no Ray. When the host restarts, calls are misses until it is back; the session attaches
    again by itself.

    Args:
        target: the host's socket (`door.sock`), or a kvtier.toml; by default what `kvtier up` uses here:
            $KVTIER_CONFIG, ./kvtier.toml, or the defaults. Or grpcs://host:port of another host, which then asks for
            what follows.
        threads: how many threads decode one load.
        token: of `kvtier token add`; else $KVTIER_TOKEN.
        ca: certificates (PEM) of who may vouch for that host; the system's unless given.
        cert: this client's certificate, for hosts that ask for one.
        key: its private key.
        insecure: allow grpc://, which is plain text, to another machine than this one.

    Raises:
        ConfigError: no such file, or a file that cannot be read; no token.
        Unauthenticated: the host does not know the token.
        SessionUnavailable: nobody answers; `kvtier up` starts it.
        ProtocolMismatch: the host runs a version that this client does not understand.
    """
    from kvtier.client.credentials import Credentials
    from kvtier.client.door import DoorSession
    from kvtier.client.remote import RemoteWay, is_remote, split_url
    from kvtier.client.way import Way

    path = None if target is None or is_remote(target) else Path(target).expanduser()
    bare = is_remote(target) or (path is not None and path.suffix != ".toml")
    settings = Config() if bare else configuration.load(path)
    way: Way | Path = path if bare and path is not None else settings.socket
    if is_remote(target):
        url = str(target)
        proof = Credentials.of(token, tls=split_url(url)[2], ca=ca, cert=cert, key=key)
        way = RemoteWay(url, proof, insecure=insecure)
    session = DoorSession(
        way, connect_timeout=settings.client.connect_timeout, call_timeout=settings.client.call_timeout
    )
    return Cache(session, threads=threads)


def open(config: str | Path | Mapping[str, Any] | None = None, *, threads: int = 1) -> Cache:  # noqa: A001
    """Build the same cache inside this process: no Ray, no Redis, no other process.

    `Cache.close` writes down to NVMe, if there is that tier, what only memory has, for `FLUSH_SECONDS` at most; opened
    again on the same folder, it is there. Memory alone keeps nothing.

    Args:
        config: a kvtier.toml or its tables as a mapping, such as `{"cpu": {"capacity": "1GiB"}}`. Only the tiers that
            it names are built; the CPU tier always is.
        threads: how many threads decode one load.

    Raises:
        ConfigError: a configuration that cannot work.
    """
    raw, name = _tables(config)
    settings = parse(raw, name=name)
    arena = Arena.private(settings.cpu.capacity)
    tiers: dict[TierNumber, Tier] = {}
    if "gpu" in raw and settings.gpu.capacity and (device := resolve_device(settings.gpu.device)):
        from kvtier.tiers.gpu import GpuTier

        tiers[TierNumber.GPU] = GpuTier(settings.gpu.capacity, arena, device)
    # The tier on disk last: a folder that was locked for an open() that failed would stay locked.
    if "nvme" in raw and settings.nvme.capacity:
        tiers[TierNumber.NVME] = _nvme(settings.nvme, arena)
    store = LocalStore()
    limits = Limits.of(arena.capacity, high=settings.cpu.high, low=settings.cpu.low, pinned=settings.cpu.pinned)
    rules = Rules(settings.cpu.policy, settings.nvme.admission, settings.nvme.endurance)
    hierarchy = Hierarchy(arena, tiers, LocalIndex(store, store.register("local")), limits=limits, rules=rules)
    closing: list[Callable[[], None]] = [hierarchy.close]
    if TierNumber.NVME in tiers:
        closing.insert(0, lambda: _flush(hierarchy))
    return Cache(LocalSession(hierarchy), threads=threads, closing=closing)


def _flush(hierarchy: Hierarchy) -> None:
    flush(hierarchy, FLUSH_SECONDS)


def _nvme(nvme: NvmeConfig, arena: Arena) -> Tier:
    from kvtier.lossless.method import METHODS
    from kvtier.tiers.nvme import NvmeTier
    from kvtier.tiers.several import Several

    tiers: dict[str, Tier] = {}
    with ExitStack() as opened:
        for folder in nvme.folders:
            lossless = METHODS[nvme.lossless]
            tier = NvmeTier(folder, nvme.capacity, arena, region_nbytes=nvme.region_size, lossless=lossless)
            opened.callback(tier.close)
            tiers[str(folder)] = tier
        opened.pop_all()
    return tier if len(tiers) == 1 else Several(tier.name, tiers)


def _tables(config: str | Path | Mapping[str, Any] | None) -> tuple[dict[str, Any], str]:
    if config is None:
        return {}, "open()"
    if isinstance(config, Mapping):
        return dict(config), "open()"
    try:
        return tomllib.loads(Path(config).expanduser().read_text(encoding="utf-8")), str(config)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as exc:
        raise ConfigError(f"{config} cannot be read: {exc}") from exc
