"""Keys: which KV is the same KV.

`docs/keys.md` has the byte-by-byte definition and golden vectors made by an independent script.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtier.errors import BadTokens, ConfigError
from kvtier.spec import KVSpec

DOMAIN = b"kvtier/keyspace/1\0"
ROW_DOMAIN = b"kvtier/row/1\0"


@dataclass(frozen=True)
class Keyspace:
    """Everything that makes two KVs different although their tokens are equal.

    Attributes:
        spec: shape of the KV.
        model: model name.
        revision: weights revision; a change of weights must change it.
        plan: canonical text of the precision plan.
        tenant: salt; tenants with different salts never share.
        layout: "canonical", or "opaque:" with engine, version, instruction set and page size.
        overrides: whatever else changes the KV: RoPE scaling, config overrides.
        kv_scales: digest or text of calibrated KV scales.
        tp_size: tensor-parallel size.
        adapter: LoRA name.
        adapter_digest: digest of the LoRA's content.
        recipe: canonical text of a pruning recipe.
    """

    spec: KVSpec
    model: str
    revision: str
    plan: str
    tenant: str = field(default="", repr=False)
    layout: str = "canonical"
    overrides: Mapping[str, str] = field(default_factory=dict, hash=False)
    kv_scales: str = ""
    tp_size: int = 1
    adapter: str = ""
    adapter_digest: str = ""
    recipe: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "overrides", dict(self.overrides))
        if not self.model:
            raise ConfigError("Keyspace.model is empty; name the model, so that no other model's KV can answer for it")
        if not 1 <= self.tp_size < 2**16:
            raise ConfigError(f"Keyspace.tp_size is {self.tp_size}; it must be between 1 and 65535")

    def canonical(self) -> bytes:
        """Encode: each field as its name and value, both length-prefixed, in a fixed order."""
        overrides = b"".join(_sized(k.encode()) + _sized(v.encode()) for k, v in sorted(self.overrides.items()))
        fields = (
            ("tenant", self.tenant.encode()),
            ("model", self.model.encode()),
            ("revision", self.revision.encode()),
            ("spec", self.spec.canonical()),
            ("layout", self.layout.encode()),
            ("overrides", overrides),
            ("kv_scales", self.kv_scales.encode()),
            ("tp_size", struct.pack("<I", self.tp_size)),
            ("adapter", self.adapter.encode()),
            ("adapter_digest", self.adapter_digest.encode()),
            ("plan", self.plan.encode()),
            ("recipe", self.recipe.encode()),
        )
        return DOMAIN + b"".join(_sized(name.encode()) + _sized(value) for name, value in fields)

    @cached_property
    def root(self) -> bytes:
        """SHA-256 of the canonical encoding: the key before the first block."""
        return hashlib.sha256(self.canonical()).digest()

    def chain(self, token_ids: Any, *, extra: Sequence[bytes] | None = None) -> list[bytes]:
        """Keys of all whole blocks of `token_ids`, in order.

        Args:
            token_ids: list, numpy array or torch tensor of one dimension, any integer dtype; ids must fit u32.
            extra: what else block i depends on (multimodal content digests); one entry a block, b"" for none.

        Raises:
            BadTokens: floats, negative ids, ids beyond u32, more than one dimension; too few or too many in `extra`.
        """
        return chain(self.root, token_ids, self.spec.block_tokens, extra=extra)

    def named(self, name: bytes) -> bytes:
        """Key of a block that the engine names itself, by a hash of everything that it depends on."""
        return hashlib.sha256(ROW_DOMAIN + self.root + name).digest()


def chain(root: bytes, token_ids: Any, block_tokens: int, *, extra: Sequence[bytes] | None = None) -> list[bytes]:
    """See `Keyspace.chain`, for the keyspace with this root.

    Raises:
        BadTokens: as there.
    """
    tokens = tokens_u32(token_ids)
    blocks = len(tokens) // block_tokens
    if extra is not None and len(extra) != blocks:
        raise BadTokens(f"extra has {len(extra)} entries for {blocks} whole blocks; give one a block")
    sha256 = hashlib.sha256
    raw = tokens.tobytes()
    size = block_tokens * 4
    key, keys = root, []
    for i in range(blocks):
        key = sha256(key + raw[i * size : (i + 1) * size] + (extra[i] if extra else b"")).digest()
        keys.append(key)
    return keys


def tokens_u32(token_ids: Any) -> NDArray[np.uint32]:
    """Token ids as one contiguous little-endian u32 array.

    Raises:
        BadTokens: they are not integers of one dimension that fit u32.
    """
    try:
        array = np.asarray(token_ids.detach().cpu() if hasattr(token_ids, "detach") else token_ids)
    except (TypeError, ValueError, OverflowError, NotImplementedError) as exc:
        raise BadTokens(f"token ids are not one sequence of integers: {exc}") from exc
    if array.size == 0:
        return np.empty(0, np.dtype("<u4"))
    if array.ndim != 1:
        raise BadTokens(f"token ids have the shape {list(array.shape)}; pass one sequence, of one dimension")
    if array.dtype.kind not in "iu":
        raise BadTokens(f"token ids are {array.dtype}; pass integers")
    low, high = int(array.min()), int(array.max())
    if low < 0 or high >= 2**32:
        raise BadTokens(f"token id {low if low < 0 else high} does not fit an unsigned 32-bit integer")
    return np.ascontiguousarray(array, np.dtype("<u4"))


def _sized(data: bytes) -> bytes:
    return struct.pack("<I", len(data)) + data
