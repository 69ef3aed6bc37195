"""Which weights a model has."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kvtier.errors import ConfigError

WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")
ADAPTER = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")
ADAPTERS = 4096
"""Names that are remembered."""
THREADS = 8
HEX = frozenset("0123456789abcdef")


def revision_of(model: str, commit: str | None) -> str:
    """What names a model's weights: the hub's commit, or SHA-256 of the weight files themselves.

    Reads all of them, so call it in the background: 1 to 2 GB/s a core.

    Args:
        model: a folder or file with weights, or a name on the hub.
        commit: which the configuration was loaded from.

    Raises:
        ConfigError: neither commit nor files.
    """
    if commit and is_commit(commit):
        return f"commit:{commit}"
    folder = Path(model)
    if is_commit(folder.name) and folder.parent.name == "snapshots":
        return f"commit:{folder.name}"
    files = [folder] if folder.is_file() else sorted({found for kind in WEIGHTS for found in folder.glob(kind)})
    if not files:
        raise ConfigError(
            f"{model} has no weight files that could name its revision ({', '.join(WEIGHTS)}); say one with revision="
        )
    return f"sha256:{digest(files)}"


class Adapters:
    """Digests of LoRAs, each read once. Thread-safe.

    An engine keeps what it has loaded under a name, whatever becomes of the files, and loads them anew when it likes.
    So once they are others nobody knows any more which of both the KV under this name is of.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[str, tuple[object, str]] = {}

    def digest(self, name: str, path: str) -> str:
        """SHA-256 of a LoRA's files.

        Raises:
            ConfigError: they are not in a folder of this machine, or are not those that this name had first.
        """
        files = [file for each in ADAPTER if (file := Path(path) / each).is_file()]
        if len(files) < 2:
            raise ConfigError(
                f"{path} is no folder with adapter_config.json and adapter_model.*; KV of the LoRA {name!r} is neither "
                "stored nor loaded: load it from a folder"
            )
        with self._lock:
            seen = _seen(files)
            stamp, known = self._known.get(name, (None, ""))
            if not known or stamp != seen:
                found = digest(files)
                if known and found != known:
                    raise ConfigError(
                        f"the files of the LoRA {name!r} have changed since it was first used; its KV is neither "
                        "stored nor loaded until the engine is started anew: give a new adapter a new name"
                    )
                if len(self._known) >= ADAPTERS:
                    del self._known[next(iter(self._known))]
                self._known[name], known = (seen, found), found
            return known


def digest(files: Iterable[Path]) -> str:
    """SHA-256 over the names and contents of files, in this order."""
    every = list(files)
    with ThreadPoolExecutor(THREADS, "kvtier-weights") as threads:
        contents = list(threads.map(_content, every))
    whole = hashlib.sha256()
    for file, content in zip(every, contents, strict=True):
        whole.update(len(file.name).to_bytes(4, "little") + file.name.encode() + content)
    return whole.hexdigest()


def is_commit(text: str) -> bool:
    """Whether this is the full name of a commit, which never names other files."""
    return len(text) == 40 and HEX.issuperset(text)


def _seen(files: Iterable[Path]) -> object:
    """What changes when files do, without reading them."""
    stats = [(str(file), file.stat()) for file in files]
    return tuple((name, stat.st_ino, stat.st_size, stat.st_mtime_ns) for name, stat in stats)


def _content(file: Path) -> bytes:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").digest()
