"""Attention weights from queries and keys, a piece at a time.

What is computed is what the model computes: a softmax over what each query may see, in float32. The queries are those
of the last tokens that are held, so that query i of q sees the first `tokens - q + i + 1` columns:

                 tokens - q      q
    query 0   |  seen         | x . . |
    query 1   |  seen         | x x . |
    query 2   |  seen         | x x x |
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

PIECE = 1 << 22
"""Weights that are there at once, over all heads: 16 MiB."""


def window_mean(queries: torch.Tensor, keys: torch.Tensor, scale: float, held: torch.Tensor) -> torch.Tensor:
    """Mean weight that each token receives from these queries, over them and the heads of a KV head.

    Args:
        queries: `[heads, queries, head_dim]`.
        keys: `[kv_heads, tokens, head_dim]`.
        scale: of the logits.
        held: where there is a token, `[kv_heads, tokens]`.

    Returns:
        `[kv_heads, tokens]`, float32.
    """
    return column_sums(queries, keys, scale, held) / queries.shape[1]


def column_sums(queries: torch.Tensor, keys: torch.Tensor, scale: float, held: torch.Tensor) -> torch.Tensor:
    """Sum of the weights that each token receives from these queries, mean over the heads of a KV head.

    Takes what `window_mean` does; the full matrix is never there.
    """
    kv_heads, tokens, _ = keys.shape
    sums = torch.zeros(kv_heads, tokens, dtype=torch.float32, device=keys.device)
    grouped = queries.float().unflatten(0, (kv_heads, -1))
    columns = keys.float().transpose(1, 2)
    gone = None if bool(held.all()) else ~held
    for first, stop in pieces(queries.shape[1], queries.shape[0] * tokens):
        sees = tokens - queries.shape[1] + stop
        logits = torch.einsum("hgqd,hdt->hgqt", grouped[:, :, first:stop], columns[:, :, :sees]).mul_(scale)
        if gone is not None:
            logits.masked_fill_(gone[:, None, None, :sees], -torch.inf)
        own = logits[..., sees - (stop - first) :]
        own.masked_fill_(torch.ones(own.shape[-2:], dtype=torch.bool, device=own.device).triu_(1), -torch.inf)
        sums[:, :sees] += logits.softmax(-1).sum(2).mean(1)
    return sums


def sights(queries: int, tokens: int, device: torch.device) -> torch.Tensor:
    """By how many of the queries of the last tokens each token is seen, `[tokens]`, float32."""
    return (tokens - torch.arange(tokens, device=device)).clamp_(max=queries).float()


def pieces(queries: int, width: int) -> Iterator[tuple[int, int]]:
    """Cut queries so that a piece has at most `PIECE` weights; `width` is how many one query has."""
    step = max(1, PIECE // max(width, 1))
    for first in range(0, queries, step):
        yield first, min(first + step, queries)
