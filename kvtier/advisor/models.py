"""Shapes of the KV of well-known models."""

from __future__ import annotations

import difflib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from kvtier.errors import ConfigError, UnsupportedKV
from kvtier.spec import KVSpec

SHAPES = {
    "smollm2-135m": (30, 3, 64),
    "smollm2-360m": (32, 5, 64),
    "smollm2-1.7b": (24, 32, 64),
    "tinyllama-1.1b": (22, 4, 64),
    "llama-7b": (32, 32, 128),
    "llama-13b": (40, 40, 128),
    "llama-30b": (60, 52, 128),
    "llama-65b": (80, 64, 128),
    "llama-2-70b": (80, 8, 128),
    "llama-3.2-1b": (16, 8, 64),
    "llama-3.2-3b": (28, 8, 128),
    "llama-3.1-8b": (32, 8, 128),
    "llama-3.1-70b": (80, 8, 128),
    "llama-3.1-405b": (126, 8, 128),
    "mistral-7b-v0.3": (32, 8, 128),
    "mistral-nemo-12b": (40, 8, 128),
    "mixtral-8x7b": (32, 8, 128),
    "mixtral-8x22b": (56, 8, 128),
    "qwen2.5-0.5b": (24, 2, 64),
    "qwen2.5-1.5b": (28, 2, 128),
    "qwen2.5-3b": (36, 2, 128),
    "qwen2.5-7b": (28, 4, 128),
    "qwen2.5-14b": (48, 8, 128),
    "qwen2.5-32b": (64, 8, 128),
    "qwen2.5-72b": (80, 8, 128),
    "qwen3-0.6b": (28, 8, 128),
    "qwen3-1.7b": (28, 8, 128),
    "qwen3-4b": (36, 8, 128),
    "qwen3-8b": (36, 8, 128),
    "qwen3-14b": (40, 8, 128),
    "qwen3-32b": (64, 8, 128),
    "qwen3-30b-a3b": (48, 4, 128),
    "qwen3-235b-a22b": (94, 4, 128),
    "gemma-2b": (18, 1, 256),
    "gemma-7b": (28, 16, 256),
    "phi-4": (40, 10, 128),
    "opt-6.7b": (32, 32, 128),
    "opt-13b": (40, 40, 128),
    "opt-30b": (48, 56, 128),
    "opt-66b": (64, 72, 128),
    "gpt2": (12, 12, 64),
    "gpt2-xl": (48, 25, 64),
}
"""Layers, KV heads, head dimension, from each model's config.json; 16-bit, all heads. Models with sliding windows
(Gemma 2 and 3, Mistral v0.1, Phi-3) are not among them: they do not keep the KV of every token."""
LATENTS = {"deepseek-v3": (61, 512 + 64), "deepseek-v2": (60, 512 + 64), "deepseek-v2-lite": (27, 512 + 64)}
"""Layers and elements of the latent, for models with multi-head latent attention."""
ALIASES = {
    "llama-2-7b": "llama-7b",
    "llama-2-13b": "llama-13b",
    "llama-3-8b": "llama-3.1-8b",
    "llama-3-70b": "llama-3.1-70b",
    "llama-3.3-70b": "llama-3.1-70b",
    "deepseek-r1": "deepseek-v3",
}
"""Models whose KV has the shape of another's."""
OLDER = {
    "num_hidden_layers": ("n_layer", "n_layers"),
    "num_attention_heads": ("n_head", "n_heads"),
    "hidden_size": ("n_embd", "n_embed", "d_model"),
    "num_key_value_heads": ("kv_n_heads",),
}
"""Names that the config.json of older models (GPT-2, GPT-J, BLOOM, MPT, DBRX) has for these."""
OTHERWISE = (
    "attention_chunk_size",
    "attn_layer_indices",
    "attn_layer_period",
    "attn_type_list",
    "block_types",
    "cross_attention_layers",
    "full_attention_interval",
    "full_attn_idxs",
    "hybrid_override_pattern",
    "layers_block_type",
    "linear_attn_config",
)
"""Fields by which some layers keep other KV, or none: chunked, linear or cross-attention, state spaces (Llama 4, Jamba,
Qwen3-Next, Nemotron-H, Mllama); for files without `layer_types`."""


MOST_LAYERS = 10_000
"""More would take minutes to add up, and no model has them."""


def spec_of(model: str, block_tokens: int) -> KVSpec:
    """The KV's shape of a model, by its name or the path of its Hugging Face config.json.

    A file that names no dtype is taken for one of bfloat16.

    Raises:
        ConfigError: neither is known; the file says not what is needed.
        UnsupportedKV: the model's KV cannot be shared by prefix.
    """
    known = _known(model)
    model = ALIASES.get(known, known)
    if model in SHAPES:
        layers, heads, dim = SHAPES[model]
        return KVSpec(layers, heads, dim, "bfloat16", block_tokens=block_tokens)
    if model in LATENTS:
        layers, latent = LATENTS[model]
        return KVSpec(layers, 1, latent, "bfloat16", block_tokens=block_tokens, mla=True)
    path = _file(model)
    if path is None:
        if "/" in model or model.endswith(".json"):
            raise ConfigError(
                f"there is no config.json at {model}; pass the path of a Hugging Face config.json, or a model's name"
            )
        names = [*SHAPES, *LATENTS, *ALIASES]
        near = difflib.get_close_matches(model.lower(), names, 1, 0)[0]
        raise ConfigError(
            f"no model {model!r}; did you mean {near!r}? Models: {', '.join(names)}; or the path of a config.json"
        )
    return _from_file(path, block_tokens)


def _known(model: str) -> str:
    """The name that a model has here, of one as the hub writes it: meta-llama/Llama-3.1-8B-Instruct; else the same."""
    if "/" in model and _file(model) is not None:
        return model
    name = model.rsplit("/", 1)[-1].lower()
    plain = name.removesuffix("-hf").removesuffix("-chat").removesuffix("-it").removesuffix("-instruct")
    plain = plain.removesuffix("-base")
    return next((each for each in (name, plain) if each in {**SHAPES, **LATENTS, **ALIASES}), model)


def _file(model: str) -> Path | None:
    try:
        path = Path(model).expanduser()
        path = path / "config.json" if path.is_dir() else path
        return path if path.is_file() else None
    except (OSError, RuntimeError):  # a name too long, no such user
        return None


def _from_file(path: Path, block_tokens: int) -> KVSpec:
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        known = {**raw, **(raw.get("text_config") or {})}
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as exc:
        raise ConfigError(f"{path} is no Hugging Face config.json: {exc}") from exc
    try:
        return _from_fields(known, block_tokens)
    except AttributeError as exc:
        raise ConfigError(f"{path} has no {exc.name}; write it there") from exc
    except (ConfigError, ValueError, TypeError, ZeroDivisionError) as exc:
        raise ConfigError(f"{path} does not say the shape of a model's KV: {exc}") from exc


def _from_fields(known: dict[str, Any], block_tokens: int) -> KVSpec:
    attention = known.get("attn_config")
    named = {**attention, **known} if isinstance(attention, dict) else known
    older = {name: named[other] for name, others in OLDER.items() for other in others if other in named}
    otherwise = next((name for name in OTHERWISE if known.get(name)), None)
    if otherwise and not known.get("layer_types"):
        raise UnsupportedKV(
            f"by its {otherwise} not all of the model's layers keep one KV entry a token; use a model whose layers are "
            "all of full attention"
        )
    text = SimpleNamespace(**older | known)
    dtype = known.get("dtype") or known.get("torch_dtype") or "bfloat16"
    spec = KVSpec.from_hf(text, dtype=dtype, block_tokens=block_tokens)
    if spec.layers > MOST_LAYERS:
        raise ConfigError(f"num_hidden_layers is {spec.layers:,}; write {MOST_LAYERS:,} at most")
    return spec
