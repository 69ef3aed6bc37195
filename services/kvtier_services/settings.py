"""What the processes of a running kvtier are told: a `Config`, and what `kvtier up` settled."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

from kvtier.config import Config
from kvtier.config.machine import host_name as host_name  # noqa: PLC0414 - the services' name for it
from kvtier.config.schema import folder


@dataclass(frozen=True, slots=True, repr=False)
class Secret:
    """A text that shows itself nowhere."""

    text: str = ""

    def __repr__(self) -> str:
        return "Secret(***)" if self.text else "Secret()"

    def __bool__(self) -> bool:
        return bool(self.text)


@dataclass(frozen=True, slots=True)
class Settings:
    """One running kvtier. Every process that `kvtier up` starts gets the same one, and gets it again when it restarts.

    They travel to other hosts inside Ray, which lets in whoever has its token; there each secret becomes a file that
    only this user reads.

    Attributes:
        config: as it was when kvtier was started.
        redis_url: of the index; "local" for none.
        redis_password: that every host is given; empty where each has `index.password_file` or needs none.
        fleet_secret: by which hosts of this fleet know each other.
        up_host: name of the host that `kvtier up` ran on.
    """

    config: Config
    redis_url: str = "local"
    redis_password: Secret = Secret()
    fleet_secret: Secret = Secret()
    up_host: str = ""

    @property
    def redis_password_file(self) -> str:
        """Where the password of the index's Redis is on this host; empty for none."""
        if self.redis_password:
            return str(self.run_dir / "redis.password")
        return self.config.index.password_file

    @property
    def fleet_secret_file(self) -> Path:
        """Where `fleet_secret` is on this host."""
        return self.run_dir / "fleet.secret"

    @property
    def secrets(self) -> dict[Path, Secret]:
        """What must be in which file before a host's processes work."""
        files = {self.fleet_secret_file: self.fleet_secret, self.run_dir / "redis.password": self.redis_password}
        return {file: secret for file, secret in files.items() if secret}

    @property
    def run_dir(self) -> Path:
        """Folder of the socket, the state file and secrets."""
        return folder(self.config.run_dir)

    @property
    def arena_dir(self) -> Path:
        """Folder of the arena."""
        return folder(self.config.arena_dir)

    @property
    def nvme_dirs(self) -> dict[str, Path]:
        """Folders of the NVMe tier, by the name of the process that serves each; none when the tier is off."""
        return self.nvme_dirs_on(host_name())

    def nvme_dirs_on(self, host: str) -> dict[str, Path]:
        """The same, on a host of this name."""
        nvme = self.config.nvme
        if not nvme.capacity:
            return {}
        folders = nvme.folders_on(host)
        if len(folders) == 1:
            return {"nvme": folders[0]}
        return {f"nvme-{number}": folder for number, folder in enumerate(folders, 1)}

    @property
    def socket(self) -> Path:
        """The door."""
        return self.run_dir / "door.sock"

    @property
    def state_file(self) -> Path:
        """What `kvtier up` started, for `kvtier down`."""
        return self.run_dir / "state.json"

    @property
    def up_lock(self) -> Path:
        """Held while `up` or `down` is at work."""
        return self.run_dir / "up.lock"

    @property
    def ray_token(self) -> Path:
        """What proves to the Ray head that one may use it."""
        return self.run_dir / "ray.token"

    @property
    def ray_log(self) -> Path:
        """What the Ray head printed."""
        return self.run_dir / "ray.log"

    @property
    def ray_storage(self) -> str:
        """Where the Ray head keeps what it knows: "memory" for nowhere, a folder, or redis://host:port."""
        ray = self.config.ray
        if ray.storage == "rocksdb" or (ray.storage == "auto" and ray.host):
            return str(self.run_dir / "ray.gcs")
        return "memory" if ray.storage == "auto" else ray.storage

    @property
    def namespace(self) -> str:
        """Ray namespace of this kvtier's actors, the same on all hosts; two that share a Ray cluster have two."""
        mine = f"{self.up_host}\0{os.getuid()}\0{folder(self.config.run_dir, self.up_host)}"
        return f"kvtier-{hashlib.sha256(mine.encode()).hexdigest()[:12]}"

    def gpu_device(self, gpus: int) -> str:
        """Device of the GPU tier on a host with so many GPUs; empty for no tier."""
        gpu = self.config.gpu
        if gpu.device == "off" or not gpu.capacity or (gpu.device == "auto" and not gpus):
            return ""
        return "cuda:0" if gpu.device in ("auto", "cuda") else gpu.device
