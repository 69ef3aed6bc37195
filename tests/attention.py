"""What stored KV does to attention, on KV and queries of real models."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from kvtier.spec import KVSpec

DATA = Path(__file__).parent / "data"
MODELS = ("smollm2", "qwen25coder05")


class Recorded(NamedTuple):
    """One model's context: KV as pairs `[tokens, kv_heads, head_dim]`, and the queries of the tokens that follow."""

    spec: KVSpec
    kv: list[tuple[torch.Tensor, torch.Tensor]]
    queries: torch.Tensor


class Error(NamedTuple):
    """Means over layers, heads and queries.

    Attributes:
        kl: divergence of the attention weights, nats.
        output: distance of the outputs, relative to the exact one's length.
        shrinkage: how much shorter the output is along the exact one; negative: longer.
    """

    kl: float
    output: float
    shrinkage: float


def recorded(model: str) -> Recorded:
    with np.load(DATA / f"kv_{model}.npz") as file:
        k, v, q = (torch.from_numpy(file[name].view(np.int16)).view(torch.bfloat16) for name in "kvq")
    kv = [(keys.transpose(0, 1), values.transpose(0, 1)) for keys, values in zip(k, v, strict=True)]
    return Recorded(KVSpec(len(kv), k.shape[1], k.shape[3], "bfloat16"), kv, q)


def attention_error(context: Recorded, given: list[tuple[torch.Tensor, torch.Tensor]]) -> Error:
    """Softmax attention over the given KV against that over the recorded one."""
    found = []
    for queries, exact, lossy in zip(context.queries, context.kv, given, strict=True):
        weights, output = _attend(queries, *exact)
        lossy_weights, lossy_output = _attend(queries, *lossy)
        length = output.norm(dim=-1)
        divergence = (weights.exp() * (weights - lossy_weights)).sum(-1)
        distance = (lossy_output - output).norm(dim=-1) / length
        along = (lossy_output * output).sum(-1) / length**2
        found.append(torch.stack([divergence, distance, 1 - along]))
    return Error(*torch.stack(found).mean(dim=(0, 2, 3)).tolist())


def _attend(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Logarithms of the weights, and the output; heads of queries share the KV heads in order."""
    shared = queries.shape[0] // keys.shape[1]
    keys, values = (part.transpose(0, 1).double().repeat_interleave(shared, 0) for part in (keys, values))
    logits = queries.double() @ keys.transpose(1, 2) / keys.shape[2] ** 0.5
    weights = logits.log_softmax(-1)
    return weights, weights.exp() @ values
