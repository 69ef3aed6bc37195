"""What of a Hugging Face configuration can change a model's KV."""

from __future__ import annotations

import hashlib
import json
from typing import Any

NEUTRAL = frozenset(
    (
        "_attn_implementation",
        "_model_name_or_path",
        "_name_or_path",
        "architectures",
        "bos_token_id",
        "dtype",
        "eos_token_id",
        "id2label",
        "label2id",
        "output_attentions",
        "output_hidden_states",
        "pad_token_id",
        "problem_type",
        "return_dict",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    )
)
"""Fields of a configuration that cannot change the KV, or that the spec has already."""


def config_digest(config: Any) -> str:
    """SHA-256 of everything in a configuration that may change the KV, as hexadecimal text."""
    text = json.dumps(_bare(config.to_dict()), sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def _bare(value: Any) -> Any:
    if isinstance(value, dict):
        kept = {str(k): v for k, v in value.items() if k not in NEUTRAL}
        return {k: v if k == "quantization_config" else _bare(v) for k, v in kept.items()}
    return [_bare(v) for v in value] if isinstance(value, list | tuple) else value
