"""Which weights a model has."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kvtier.errors import ConfigError

WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")
ADAPTER = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")
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


def adapter_digest(path: str) -> str:
    """SHA-256 of a LoRA's files.

    Raises:
        ConfigError: they are not in a folder of this machine.
    """
    files = [file for name in ADAPTER if (file := Path(path) / name).is_file()]
    if len(files) < 2:
        raise ConfigError(f"{path} is no folder with adapter_config.json and adapter_model.*; its KV cannot be named")
    return digest(files)


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


def _content(file: Path) -> bytes:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").digest()
