"""Real KV of the models in tests/data, as bodies of the plan "raw"."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np

DATA = Path(__file__).parents[1] / "tests" / "data"


def bodies(parts: str = "kv") -> list[bytes]:
    """One body a model, 256 tokens of 6 layers: in each K `[tokens, kv_heads, head_dim]`, then V, or one of them."""
    made = []
    for file in sorted(DATA.glob("kv_*.npz")):
        with np.load(file) as arrays:
            layers = [arrays[part].transpose(0, 2, 1, 3).reshape(len(arrays[part]), -1) for part in parts]
        made.append(np.concatenate(layers, axis=1).tobytes())
    return made


@cache
def _all() -> bytes:
    return b"".join(bodies())


def body_of(seed: int, nbytes: int) -> bytes:
    """A body of any size: all of it again and again, from another place for each seed.

    It comes back after 2 MB only, so that no compressor that looks at a megabyte at a time sees it twice.
    """
    start = int(np.random.default_rng(seed).integers(0, len(_all()) // 4096)) * 4096
    turned = _all()[start:] + _all()[:start]
    return (turned * (nbytes // len(turned) + 1))[:nbytes]
