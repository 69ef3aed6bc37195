"""What is known of one layer's KV when it is decided what stays."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvtier.errors import UsageError


@dataclass(frozen=True, slots=True, eq=False)
class Evidence:
    """One layer of one sequence.

    KV heads may hold different numbers of tokens: tables are as wide as the longest, and whoever has fewer has -1 in
    `positions` in front.

    Attributes:
        keys: `[kv_heads, tokens, head_dim]`, rotated, as the cache holds them.
        values: `[kv_heads, tokens, v_head_dim]`.
        positions: where each token stood in the sequence, ascending, `[kv_heads, tokens]`, int32.
        length: tokens of the sequence, those included that were dropped.
        scale: what logits are multiplied with before the softmax.
        queries: of the youngest tokens, rotated, `[heads, queries, head_dim]`; None when none were seen.
        mass: attention weights that each token received, summed over queries, mean over the heads that share a KV head.
        seen: by how many queries each token could be seen, of those that `mass` sums over.
    """

    keys: torch.Tensor
    values: torch.Tensor
    positions: torch.Tensor
    length: int
    scale: float
    queries: torch.Tensor | None = None
    mass: torch.Tensor | None = None
    seen: torch.Tensor | None = None

    @property
    def held(self) -> torch.Tensor:
        """Where there is a token, `[kv_heads, tokens]`."""
        return self.positions >= 0

    def protected(self, sinks: int, recent: int) -> torch.Tensor:
        """Where the first `sinks` and the last `recent` tokens of the sequence are, `[kv_heads, tokens]`."""
        return self.held & ((self.positions < sinks) | (self.positions >= self.length - recent))

    def asked(self) -> torch.Tensor:
        """The queries.

        Raises:
            UsageError: none were observed.
        """
        if self.queries is None or not self.queries.shape[1]:
            raise UsageError("no queries were observed; run the model inside kvtier.pruning.watched(model, pruner)")
        return self.queries

    def received(self) -> tuple[torch.Tensor, torch.Tensor]:
        """`mass` and `seen`.

        Raises:
            UsageError: no queries were observed.
        """
        if self.mass is None or self.seen is None:
            raise UsageError("no queries were observed; run the model inside kvtier.pruning.watched(model, pruner)")
        return self.mass, self.seen
