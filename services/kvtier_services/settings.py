"""What the processes of a running kvtier are told: a `Config`, and what `kvtier up` settled."""

from __future__ import annotations

import hashlib
import os
import socket
from dataclasses import dataclass
from pathlib import Path

from kvtier.config import Config


@dataclass(frozen=True, slots=True)
class Settings:
    """One running kvtier. Every process that `kvtier up` starts gets the same one, and gets it again when it restarts.

    Attributes:
        config: as it was when kvtier was started.
        redis_url: of the index; "local" for none.
        redis_password_file: where its password is; empty for none or for the environment's.
        up_host: name of the host that `kvtier up` ran on.
    """

    config: Config
    redis_url: str = "local"
    redis_password_file: str = ""
    up_host: str = ""

    @property
    def run_dir(self) -> Path:
        """Folder of the socket, the state file and secrets."""
        return _absolute(self.config.run_dir)

    @property
    def arena_dir(self) -> Path:
        """Folder of the arena."""
        return _absolute(self.config.arena_dir)

    @property
    def nvme_dirs(self) -> dict[str, Path]:
        """Folders of the NVMe tier, by the name of the process that serves each; none when the tier is off."""
        nvme = self.config.nvme
        if not nvme.capacity:
            return {}
        if len(nvme.folders) == 1:
            return {"nvme": nvme.folders[0]}
        return {f"nvme-{number}": folder for number, folder in enumerate(nvme.folders, 1)}

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
    def namespace(self) -> str:
        """Ray namespace of this kvtier's actors; two that share a Ray cluster have two."""
        mine = f"{self.up_host}\0{os.getuid()}\0{self.run_dir}"
        return f"kvtier-{hashlib.sha256(mine.encode()).hexdigest()[:12]}"

    def gpu_device(self, gpus: int) -> str:
        """Device of the GPU tier on a host with so many GPUs; empty for no tier."""
        gpu = self.config.gpu
        if gpu.device == "off" or not gpu.capacity or (gpu.device == "auto" and not gpus):
            return ""
        return "cuda:0" if gpu.device in ("auto", "cuda") else gpu.device


def host_name() -> str:
    """Name of this host, as the node table and the status have it."""
    return socket.gethostname()


def _absolute(path: str) -> Path:
    return Path(path).expanduser().absolute()
