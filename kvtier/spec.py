"""The shape of one model's KV, and all byte arithmetic that follows from it."""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from typing import Any

from kvtier.errors import ConfigError, UnsupportedKV

ITEMSIZE = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True, slots=True)
class KVSpec:
    """Shape of the KV of one tensor-parallel shard of a model.

    Multi-head, grouped-query and multi-query attention: every layer has K `[tokens, kv_heads, head_dim]` and V
    `[tokens, kv_heads, v_head_dim]`. Multi-head latent attention (`mla=True`): every layer has one latent
    `[tokens, 1, head_dim]`, head_dim = kv_lora_rank + qk_rope_head_dim, and no V.

    Attributes:
        layers: layers of this stage.
        kv_heads: KV heads of this shard.
        head_dim: elements of one K head (MLA: of the latent).
        dtype: "bfloat16", "float16" or "float32".
        v_head_dim: elements of one V head; the same as `head_dim` unless given; 0 for MLA.
        block_tokens: tokens in one block.
        mla: one latent a layer in place of K and V.
        first_layer: number of this pipeline stage's first layer in the whole model.
    """

    layers: int
    kv_heads: int
    head_dim: int
    dtype: str
    v_head_dim: int = -1
    block_tokens: int = 64
    mla: bool = False
    first_layer: int = 0

    def __post_init__(self) -> None:
        if self.v_head_dim == -1:
            object.__setattr__(self, "v_head_dim", 0 if self.mla else self.head_dim)
        smallest = {"layers": 1, "kv_heads": 1, "head_dim": 1, "v_head_dim": 0, "block_tokens": 1, "first_layer": 0}
        for name, low in smallest.items():
            value = getattr(self, name)
            if not isinstance(value, int) or not low <= value < 2**31:
                raise ConfigError(f"KVSpec.{name} is {value!r}; it must be an integer from {low} to {2**31 - 1}")
        if self.dtype not in ITEMSIZE:
            raise ConfigError(f"KVSpec.dtype is {self.dtype!r}; use one of {', '.join(ITEMSIZE)}")
        if self.mla and (self.kv_heads != 1 or self.v_head_dim != 0):
            raise ConfigError("an MLA spec has kv_heads=1 and no v_head_dim: each layer has one latent")
        if not self.mla and self.v_head_dim == 0:
            raise ConfigError("KVSpec.v_head_dim is 0; only an MLA spec has no V")

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return ITEMSIZE[self.dtype]

    @property
    def head_dims(self) -> tuple[int, ...]:
        """Head dimension of each part of a layer: (K, V), or (latent,) for MLA."""
        return (self.head_dim,) if self.mla else (self.head_dim, self.v_head_dim)

    @property
    def token_nbytes(self) -> int:
        """Bytes of one token over all layers, unencoded."""
        return self.layers * self.kv_heads * sum(self.head_dims) * self.itemsize

    @property
    def block_nbytes(self) -> int:
        """Bytes of one block over all layers, unencoded."""
        return self.token_nbytes * self.block_tokens

    def canonical(self) -> bytes:
        """Encode for the keyspace root and the spec digest; see `docs/keys.md`."""
        dtype = self.dtype.encode()
        return (
            struct.pack(
                "<7IB",
                self.layers,
                self.first_layer,
                self.kv_heads,
                self.head_dim,
                self.v_head_dim,
                self.block_tokens,
                len(dtype),
                self.mla,
            )
            + dtype
        )

    @property
    def digest(self) -> bytes:
        """SHA-256 of the canonical encoding, 32 bytes."""
        return hashlib.sha256(b"kvtier/spec/1\0" + self.canonical()).digest()

    @classmethod
    def from_hf(cls, config: Any, *, dtype: Any = None, block_tokens: int = 64) -> KVSpec:
        """Derive the spec from a Hugging Face model configuration.

        Args:
            config: a `transformers` config; its text part is used where there is one.
            dtype: dtype of the KV cache (a torch dtype or its name); the config's own when not given.
            block_tokens: tokens in one block.

        Raises:
            UnsupportedKV: sliding-window, linear-attention or other layers whose KV is not one entry a token;
                encoder-decoder models.
            ConfigError: the configuration does not say what is needed.
        """
        text = config.get_text_config() if hasattr(config, "get_text_config") else config
        if getattr(config, "is_encoder_decoder", False):
            raise UnsupportedKV(
                "the model is an encoder-decoder: its KV depends on the encoder's input and not only on the tokens "
                "before it; use a decoder-only model"
            )
        refuse_unstorable_layers(text)
        name = str(dtype if dtype is not None else getattr(text, "dtype", None)).removeprefix("torch.")
        if name not in ITEMSIZE:
            raise ConfigError(f"dtype of the KV cache is {name}; pass dtype= one of {', '.join(ITEMSIZE)}")
        layers = text.num_hidden_layers
        rank = getattr(text, "kv_lora_rank", None)
        if rank:
            return cls(layers, 1, rank + text.qk_rope_head_dim, name, block_tokens=block_tokens, mla=True)
        return cls(
            layers,
            _hf_kv_heads(text),
            getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads,
            name,
            block_tokens=block_tokens,
        )


def _hf_kv_heads(text_config: Any) -> int:
    # Falcon and GPT-BigCode say multi-query by a flag; Falcon's newer layout ignores it.
    if getattr(text_config, "multi_query", False) and not getattr(text_config, "new_decoder_architecture", False):
        return 1
    for name in ("num_key_value_heads", "num_kv_heads", "num_attention_heads"):
        heads = getattr(text_config, name, None)
        if heads:
            return int(heads)
    raise ConfigError("the model configuration has no num_attention_heads; make the KVSpec by hand")


def refuse_unstorable_layers(text_config: Any) -> None:
    """Raise `UnsupportedKV` unless every layer keeps one KV entry for every token."""
    kinds = getattr(text_config, "layer_types", None) or []
    other = sorted({kind for kind in kinds if kind != "full_attention"})
    if other:
        where = [i for i, kind in enumerate(kinds) if kind != "full_attention"]
        raise UnsupportedKV(
            f"layers {where[:4]}{'...' if len(where) > 4 else ''} are {', '.join(other)}: they do not keep one KV "
            "entry a token, so their blocks cannot be shared by prefix; use a model whose layers are all full_attention"
        )
    window = getattr(text_config, "sliding_window", None)
    if window and getattr(text_config, "use_sliding_window", True) and not kinds:
        raise UnsupportedKV(
            f"the model attends through a sliding window of {window} tokens: older KV is gone, so a prefix cannot be "
            "stored; use a model with full attention"
        )
