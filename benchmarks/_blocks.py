"""The two block sizes that the client benchmarks use, and sequences made of them."""

from __future__ import annotations

import torch

from kvtier import KVSpec

TOTAL = 256 << 20
"""Logical bytes of one sequence."""
SPECS = {
    "32MiB": KVSpec(32, 8, 128, "bfloat16", block_tokens=256),
    "256KiB": KVSpec(4, 8, 128, "bfloat16", block_tokens=16),
}
"""A Llama-3-8B's blocks of 256 tokens; those of a small model, as long as an engine's page."""


def kv_tensor(spec: KVSpec, total: int) -> torch.Tensor:
    """Random KV `[layers, 2, tokens, kv_heads, head_dim]` of `total` bytes, its pages touched."""
    tokens = total // spec.token_nbytes
    return torch.randn(spec.layers, 2, tokens, spec.kv_heads, spec.head_dim, dtype=torch.bfloat16)
