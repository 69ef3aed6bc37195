"""Which models can be stored, and what makes the KV of two of them different."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from kvtier.client.cache import Cache
from kvtier.client.space import Space
from kvtier.connectors.configs import config_digest
from kvtier.connectors.transformers.adapters import adapter_digest, has_adapter
from kvtier.errors import ConfigError, KVMismatch, UnsupportedKV, UsageError
from kvtier.spec import KVSpec

PREFIX = "transformers."
"""What the overrides begin with that the connector itself puts into a keyspace."""
EXACT_ATTENTION = frozenset(
    ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flash_attention_4", "flex_attention")
)
"""Implementations of one formula: they differ by rounding, as two batch shapes of one of them do, and may share."""
SHIFTING_ROPE = frozenset(("dynamic", "longrope"))
"""Kinds of RoPE whose frequencies depend on how long the sequence is that a token is part of."""


def spec_for(model: Any, *, block_tokens: int = 64) -> KVSpec:
    """The shape of a model's KV as a DynamicCache keeps it.

    Raises:
        UnsupportedKV: layers that do not keep one K and V a token, or KV of a token that depends on later ones.
    """
    spec = KVSpec.from_hf(model.config, dtype=model.dtype, block_tokens=block_tokens)
    config = model.config.get_text_config(decoder=True)
    if spec.mla:
        raise UnsupportedKV(
            "the model has latent attention (MLA): transformers caches K and V of every head instead of the latent "
            "that a block holds; use an engine that caches latents"
        )
    _refuse_stateful(model, config, spec)
    _refuse_shifting_rope(config)
    if getattr(config, "use_bidirectional_attention", False) or getattr(config, "is_causal", True) is False:
        raise UnsupportedKV("the model attends in both directions: the KV of a prefix depends on what follows it")
    devices = set((getattr(model, "hf_device_map", None) or {}).values())
    if len(devices) > 1:
        raise UnsupportedKV(f"the model is spread over {sorted(map(str, devices))}; load it onto one device")
    return spec


def space_for(
    cache: Cache,
    model: Any,
    *,
    model_name: str,
    revision: str,
    plan: str = "raw",
    block_tokens: int = 64,
    **parts: Any,
) -> Space:
    """Open the keyspace of a model: a digest of its configuration goes into the keys, RoPE parameters included.

    Weights are known by their name only: fine-tuned, merged or quantised ones need a `revision` of their own, and a
    LoRA `adapter` and `adapter_digest`.

    Args:
        cache: from `kvtier.connect` or `kvtier.open`.
        model: as `from_pretrained` gave it.
        model_name: name of the model, the same for all engines that are to share.
        revision: weights revision.
        plan: precision plan.
        block_tokens: tokens in one block.
        **parts: as for `Cache.keyspace`.

    Raises:
        UnsupportedKV: the model's KV cannot be stored.
        ConfigError: an adapter is loaded that `adapter` does not name.
    """
    spec = spec_for(model, block_tokens=block_tokens)
    if has_adapter(model) and not (parts.get("adapter") and parts.get("adapter_digest")):
        raise ConfigError("the model has an adapter loaded, which changes its KV: pass adapter= and adapter_digest=")
    if parts.get("adapter") and not has_adapter(model):
        raise ConfigError(f"the model has no adapter loaded, and adapter= names {parts['adapter']!r}; leave it out")
    overrides = {**(parts.pop("overrides", None) or {}), **identity(model)}
    return cache.keyspace(spec, model=model_name, revision=revision, plan=plan, overrides=overrides, **parts)


def identity(model: Any) -> dict[str, str]:
    """What of a model changes its KV, besides shape, weights and adapter; all of it is in its keyspace."""
    kind = type(model)
    parts = {"config": config_digest(model.config), "class": f"{kind.__module__}.{kind.__qualname__}"}
    parts["rope"] = _rope_digest(model)
    if has_adapter(model):
        parts["adapter"] = adapter_digest(model)
    attention = getattr(model.config, "_attn_implementation", None) or "eager"
    if attention not in EXACT_ATTENTION:
        parts["attention"] = str(attention)
    return {PREFIX + name: value for name, value in parts.items()}


def require(model: Any, space: Space) -> None:
    """Check that a model's KV is what a space holds.

    Raises:
        UnsupportedKV: it cannot be stored.
        KVMismatch: the space was made for another shape.
        UsageError: the space was made for another model, or for this one before its configuration was changed; or the
            model is in training mode, under autocast, or has an adapter that the space does not name.
    """
    keyspace = space.keyspace
    spec = spec_for(model, block_tokens=keyspace.spec.block_tokens)
    if spec != keyspace.spec:
        raise KVMismatch(f"the model's KV is {spec}; the space was made for {keyspace.spec}")
    named = {name: value for name, value in keyspace.overrides.items() if name.startswith(PREFIX)}
    now = identity(model)
    if named != now:
        other = sorted({name.removeprefix(PREFIX) for name, _ in named.items() ^ now.items()})
        raise UsageError(
            f"the space was not made for this model as it is now ({', '.join(other)}: not the same); make one with "
            "space_for(cache, model, ...)"
        )
    if torch.is_autocast_enabled(model.device.type):
        raise UsageError("autocast is on, which changes the KV; load the model in the dtype that it should run in")
    if getattr(model, "training", False):
        raise UsageError("the model is in training mode, where dropout may change its KV; call model.eval()")


def _refuse_stateful(model: Any, config: Any, spec: KVSpec) -> None:
    kinds = [type(layer) for layer in DynamicCache(config=config).layers]
    other = sorted({kind.__name__ for kind in kinds if kind is not DynamicLayer})
    if getattr(model, "_is_stateful", False) or other or len(kinds) != spec.layers:
        raise UnsupportedKV(
            f"the model's cache has {', '.join(other) or f'{len(kinds)} layers and a state'}: not every layer keeps "
            "one K and V for every token, so its blocks cannot be shared by prefix; use a model with full attention"
        )


def _refuse_shifting_rope(config: Any) -> None:
    parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    by_kind = [value for value in parameters.values() if isinstance(value, dict)] or [parameters]
    for one in by_kind:
        kind = one.get("rope_type", one.get("type", "default"))
        if kind in SHIFTING_ROPE:
            raise UnsupportedKV(
                f"the model's RoPE is {kind!r}: its frequencies change with the length of the sequence, so the K of a "
                "prefix differs from prompt to prompt; set another rope_type"
            )


def _rope_digest(model: Any) -> str:
    """SHA-256 of the frequencies that the model really uses, which need not be those of its configuration."""
    digest = hashlib.sha256()
    for name, buffer in model.named_buffers():
        if "inv_freq" in name:
            digest.update(name.encode() + buffer.detach().float().cpu().numpy().tobytes())
    return digest.hexdigest()
