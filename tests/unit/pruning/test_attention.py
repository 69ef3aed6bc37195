"""Sums of attention weights are those of the whole matrix."""

import numpy as np
import pytest
import torch

from kvtier.pruning import attention


def whole_matrix(queries, keys, scale):
    """Weights `[heads, queries, tokens]`, as in a textbook."""
    heads, count, _ = queries.shape
    kv_heads, tokens, _ = keys.shape
    weights = np.zeros((heads, count, tokens))
    for head in range(heads):
        for i in range(count):
            sees = tokens - count + i + 1
            logits = keys[head * kv_heads // heads, :sees] @ queries[head, i] * scale
            exponentials = np.exp(logits - logits.max())
            weights[head, i, :sees] = exponentials / exponentials.sum()
    return weights


def drawn(heads, kv_heads, count, tokens, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(heads, count, 8, generator=generator),
        torch.randn(kv_heads, tokens, 8, generator=generator),
    )


@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (6, 2), (4, 1)])
@pytest.mark.parametrize(("count", "tokens"), [(1, 1), (1, 20), (7, 20), (20, 20)])
@pytest.mark.parametrize("piece", [1 << 22, 100])
def test_column_sums(monkeypatch, heads, kv_heads, count, tokens, piece):
    monkeypatch.setattr(attention, "PIECE", piece)
    queries, keys = drawn(heads, kv_heads, count, tokens)
    sums = attention.column_sums(queries, keys, 0.3, torch.ones(kv_heads, tokens, dtype=torch.bool))
    weights = whole_matrix(queries.numpy(), keys.numpy(), 0.3)
    np.testing.assert_allclose(sums, weights.sum(1).reshape(kv_heads, -1, tokens).mean(1), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(sums.sum(1), count, rtol=1e-5)


def test_nothing_looks_at_where_no_token_is():
    queries, keys = drawn(2, 2, 3, 12)
    held = torch.ones(2, 12, dtype=torch.bool)
    held[1, :5] = False
    sums = attention.column_sums(queries, keys, 0.3, held)
    alone = attention.column_sums(queries[1:], keys[1:, 5:], 0.3, held[1:, 5:])
    torch.testing.assert_close(sums[1, 5:], alone[0])
    assert not sums[1, :5].any()


def test_how_many_queries_see_a_token():
    assert attention.sights(3, 5, torch.device("cpu")).tolist() == [3, 3, 3, 2, 1]
