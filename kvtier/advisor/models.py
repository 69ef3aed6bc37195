"""Shapes of the KV of well-known models."""

from __future__ import annotations

import difflib
import json
from pathlib import Path
from types import SimpleNamespace

from kvtier.errors import ConfigError
from kvtier.spec import KVSpec

SHAPES = {
    "smollm2-135m": (30, 3, 64),
    "llama-3.2-1b": (16, 8, 64),
    "llama-3.2-3b": (28, 8, 128),
    "llama-3.1-8b": (32, 8, 128),
    "llama-3.1-70b": (80, 8, 128),
    "llama-3.1-405b": (126, 8, 128),
    "mistral-7b-v0.3": (32, 8, 128),
    "mixtral-8x7b": (32, 8, 128),
    "qwen2.5-7b": (28, 4, 128),
    "qwen2.5-14b": (48, 8, 128),
    "qwen2.5-32b": (64, 8, 128),
    "qwen2.5-72b": (80, 8, 128),
    "qwen3-8b": (36, 8, 128),
    "qwen3-32b": (64, 8, 128),
    "qwen3-30b-a3b": (48, 4, 128),
    "qwen3-235b-a22b": (94, 4, 128),
}
"""Layers, KV heads, head dimension, from each model's config.json; 16-bit, all heads."""
LATENTS = {"deepseek-v3": (61, 512 + 64), "deepseek-v2-lite": (27, 512 + 64)}
"""Layers and elements of the latent, for models with multi-head latent attention."""


def spec_of(model: str, block_tokens: int) -> KVSpec:
    """The KV's shape of a model, by its name or the path of its Hugging Face config.json.

    Raises:
        ConfigError: neither is known; the file says not what is needed.
        UnsupportedKV: the model's KV cannot be shared by prefix.
    """
    if model in SHAPES:
        layers, heads, dim = SHAPES[model]
        return KVSpec(layers, heads, dim, "bfloat16", block_tokens=block_tokens)
    if model in LATENTS:
        layers, latent = LATENTS[model]
        return KVSpec(layers, 1, latent, "bfloat16", block_tokens=block_tokens, mla=True)
    path = Path(model).expanduser()
    if path.is_dir():
        path /= "config.json"
    if not path.is_file():
        if "/" in model or model.endswith(".json"):
            raise ConfigError(
                f"there is no file {path}; pass the path of a Hugging Face config.json, or a model's name"
            )
        names = [*SHAPES, *LATENTS]
        near = difflib.get_close_matches(model.lower(), names, 1, 0)[0]
        raise ConfigError(
            f"no model {model!r}; did you mean {near!r}? Models: {', '.join(names)}; or the path of a config.json"
        )
    return _from_file(path, block_tokens)


def _from_file(path: Path, block_tokens: int) -> KVSpec:
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        text = SimpleNamespace(**{**raw, **(raw.get("text_config") or {})})
        dtype = getattr(text, "dtype", None) or getattr(text, "torch_dtype", None)
        return KVSpec.from_hf(text, dtype=dtype, block_tokens=block_tokens)
    except (OSError, ValueError, TypeError, AttributeError) as exc:
        raise ConfigError(f"{path} is no Hugging Face config.json: {exc}") from exc
