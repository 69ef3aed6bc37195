"""Pruning policies by text: those of `kvtier.pruning`, and others that papers compare with.

    snap_kv(keep=0.5) | layers(0-5/16:snap_kv(keep=0.6);5/16-11/16:snap_kv(keep=0.8))

Layers that no range names lose nothing. Short contexts are pruned, too, whatever a policy says of them.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

from kvtier.codecs.ranges import bounds, ranged, split
from kvtier.errors import ConfigError
from kvtier.pruning import ByHead, KeyNorm, Mass, Policy, Window
from kvtier.pruning.presets import budget
from kvtier.pruning.text import parse_policy


def key_norm(keep: float) -> Policy:
    """The shortest keys stay (arXiv 2406.11430)."""
    return Policy(KeyNorm(), budget(keep))


def ada_kv(keep: float) -> Policy:
    """SnapKV whose KV heads share what a layer has (arXiv 2407.11550)."""
    return Policy(Window(), ByHead(budget(keep)), sinks=0)


def mean_mass(keep: float) -> Policy:
    """H2O, but for the mean of the weights in place of their sum."""
    return Policy(Mass(mean=True), budget(keep), sinks=0, recent=0, recent_share=0.5)


OTHERS: dict[str, Callable[[float], Policy]] = {each.__name__: each for each in (key_norm, ada_kv, mean_mass)}
_OTHER = re.compile(rf"({'|'.join(OTHERS)})\((?:keep=)?(\d*\.\d+)\)")


def policies(text: str, layers: int) -> list[Policy | None]:
    """The policy of each layer; None where all tokens stay.

    Raises:
        ConfigError: what is wrong with the text, and what to write.
    """
    text = text.strip()
    if not text.startswith("layers("):
        return [policy(text)] * layers
    by_layer: list[Policy | None] = [None] * layers
    for part in split(text.removeprefix("layers(").removesuffix(")")):
        first, stop, inner = ranged(part, text)
        its = policy(inner)
        low, high = bounds(first, stop, layers)
        if high > layers:
            raise ConfigError(f"{text!r}: there is no layer {high - 1}; the model has {layers}")
        for layer in range(low, high):
            if by_layer[layer] is not None:
                raise ConfigError(f"{text!r}: layer {layer} has two policies")
            by_layer[layer] = its
    return by_layer


def policy(text: str) -> Policy:
    """Read a policy.

    Raises:
        ConfigError: what is wrong with the text, and what to write.
    """
    found = _OTHER.fullmatch(text.strip())
    made = OTHERS[found[1]](float(found[2])) if found else parse_policy(text)
    return replace(made, whole=0)
