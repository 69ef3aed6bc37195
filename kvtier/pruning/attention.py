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
"""Weights that are there at once: 16 MiB."""


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
    sums = torch.zeros(held.shape, dtype=torch.float32, device=keys.device)
    gone = None if bool(held.all()) else ~held
    grouped = queries.unflatten(0, (keys.shape[0], -1))
    for head, (asked, columns) in enumerate(zip(grouped, keys, strict=True)):
        _add(sums[head], asked.float() * scale, columns.float(), None if gone is None else gone[head])
    return sums.div_(grouped.shape[1])


def _add(sums: torch.Tensor, queries: torch.Tensor, keys: torch.Tensor, gone: torch.Tensor | None) -> None:
    """Add the weights that some heads' queries give to one KV head's tokens.

    Exponentials in place, and one product with the rows' denominators in place of a softmax and a sum.
    """
    heads, count, dim = queries.shape
    tokens = len(keys)
    for first, stop in pieces(count, heads * tokens):
        sees = tokens - count + stop
        logits = queries[:, first:stop].reshape(-1, dim) @ keys[:sees].T
        if gone is not None:
            logits.masked_fill_(gone[:sees], -torch.inf)
        own = logits.view(heads, stop - first, sees)[..., sees - (stop - first) :]
        own.masked_fill_(torch.ones(own.shape[1:], dtype=torch.bool, device=own.device).triu_(1), -torch.inf)
        logits.sub_(logits.amax(1, keepdim=True)).exp_()
        sums[:sees] += logits.sum(1).reciprocal_() @ logits


def sights(queries: int, tokens: int, device: torch.device) -> torch.Tensor:
    """By how many of the queries of the last tokens each token is seen, `[tokens]`, float32."""
    return (tokens - torch.arange(tokens, device=device)).clamp_(max=queries).float()


def pieces(queries: int, width: int) -> Iterator[tuple[int, int]]:
    """Cut queries so that a piece has at most `PIECE` weights; `width` is how many one query has."""
    step = max(1, PIECE // max(width, 1))
    for first in range(0, queries, step):
        yield first, min(first + step, queries)
