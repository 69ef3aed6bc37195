"""Which adapters (PEFT) are at work in a model."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Any


def has_adapter(model: Any) -> bool:
    """Whether any is loaded."""
    return bool(getattr(model, "_hf_peft_config_loaded", False) or getattr(model, "peft_config", None))


def adapter_digest(model: Any) -> str:
    """SHA-256 of which adapters are at work and how they are configured; their weights are the caller's to name."""
    active = getattr(model, "active_adapters", None)
    try:
        active = active() if callable(active) else active
    except ValueError:  # transformers' word for none
        active = None
    known = getattr(model, "peft_config", None) or {}
    configs = {str(name): one.to_dict() if hasattr(one, "to_dict") else one for name, one in known.items()}
    said = [active, configs, list(Adapters(model).now())]
    return hashlib.sha256(json.dumps(said, sort_keys=True, default=str).encode()).hexdigest()


class Adapters:
    """What the adapted layers of a model do: PEFT switches them on and off, and scales them, in place."""

    def __init__(self, model: Any) -> None:
        self._layers = [layer for layer in model.modules() if hasattr(layer, "_disable_adapters")]
        self._then = list(self.now())

    @property
    def changed(self) -> bool:
        """Whether they do something else than when this was made."""
        return bool(self._layers) and self._then != list(self.now())

    def now(self) -> Iterator[tuple[Any, ...]]:
        """For each layer whether it is off, which adapters are active, and their scales."""
        for layer in self._layers:
            active = getattr(layer, "_active_adapter", ())
            names = (active,) if isinstance(active, str) else tuple(active)
            scales = getattr(layer, "scaling", None) or {}
            yield bool(layer._disable_adapters), names, tuple(scales.get(name) for name in names)  # noqa: SLF001
