"""Which tokens of a layer stay."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, eq=False)
class Kept:
    """The columns of a layer that stay, in order.

    Heads that keep different numbers of tokens are as wide as the longest, aligned at the end, where new tokens come:

        head 0   |  0  1  5  7  8  9 |
        head 1   | -1 -1  0  2  8  9 |

    Attributes:
        columns: of the layer as it was, ascending, `[kv_heads, widest]`, int64; -1 where a head has none.
        positions: where these tokens stood in the sequence, likewise, int32.
    """

    columns: torch.Tensor
    positions: torch.Tensor

    @property
    def counts(self) -> list[int]:
        """Tokens of each KV head."""
        return [int(count) for count in (self.columns >= 0).sum(1)]

    @property
    def even(self) -> bool:
        """All heads keep the same number of tokens."""
        return bool((self.columns[:, 0] >= 0).all())

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        """What stays of K or V `[kv_heads, tokens, dim]`, `[kv_heads, widest, dim]`; zero where a head has none."""
        # Whole rows of one flat tensor: a fourth to a twentieth of torch.gather's time, less than a loop in numba.
        heads, tokens, dim = part.shape
        begins = torch.arange(heads, device=part.device)[:, None] * tokens
        rows = part.reshape(heads * tokens, dim).index_select(0, (self.columns.clamp(min=0) + begins).flatten())
        rows = rows.view(heads, -1, dim)
        return rows if self.even else rows.masked_fill_((self.columns < 0)[:, :, None], 0)

    def packed(self, part: torch.Tensor) -> torch.Tensor:
        """What stays of K or V without padding, one head's tokens after the other's, `[sum(counts), dim]`."""
        heads, _ = torch.where(self.columns >= 0)
        return part[heads, self.columns[self.columns >= 0]]


def every(positions: torch.Tensor) -> Kept:
    """Everything that is held stays."""
    columns = torch.arange(positions.shape[1], device=positions.device).expand_as(positions)
    return Kept(columns.where(positions >= 0, -1), positions)


def best(ranking: torch.Tensor, counts: torch.Tensor, positions: torch.Tensor) -> Kept:
    """The `counts` best of each KV head.

    Args:
        ranking: `[kv_heads, tokens]`, more is better; of equals the older stays.
        counts: of each head, `[kv_heads]`.
        positions: of the tokens.
    """
    order = ranking.sort(dim=1, descending=True, stable=True).indices
    ordinal = torch.arange(ranking.shape[1], device=ranking.device).expand_as(ranking)
    stays = torch.zeros_like(ranking, dtype=torch.bool).scatter_(1, order, ordinal < counts[:, None])
    widest = int(counts.max())
    columns = ordinal.where(stays, -1).sort(dim=1).values[:, ranking.shape[1] - widest :]
    return Kept(columns, positions.gather(1, columns.clamp(min=0)).where(columns >= 0, -1))
