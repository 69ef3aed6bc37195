"""What a pruner knows of one layer."""

from __future__ import annotations

from typing import Any

import torch

from kvtier.errors import CorruptPayload, UsageError
from kvtier.pruning.attention import column_sums, sights
from kvtier.pruning.evidence import Evidence
from kvtier.pruning.kept import Kept
from kvtier.pruning.policy import Policy

FOLD = 64
"""Queries whose attention is summed in one go: of one at a time the products of matrices are too small."""


class Layer:
    """What is known of one layer; its tables have a column for each that the cache has."""

    def __init__(self, policy: Policy | None) -> None:
        self.whole = policy is None
        self.accumulates = policy is not None and policy.scorer.accumulates
        self.heads = self.length = 0
        self.device = torch.device("cpu")
        self.scale = 0.0
        self.ragged = False
        self.positions = torch.empty(0, 0, dtype=torch.int32)
        self.mass = self.seen = torch.empty(0, 0)
        self.queries = self.pending = torch.empty(0, 0, 0)

    def grow(self, keys: torch.Tensor) -> None:
        """Hear of tokens that came."""
        heads, tokens, dim = keys.shape
        before = self.length if self.whole else self.positions.shape[1]
        new = tokens - before
        if new < 0:
            raise UsageError(
                f"the layer held {before} tokens and now {tokens}: a cache that is pruned must not be "
                "cut by others; begin a sequence with a new Pruner"
            )
        self.scale = self.scale or dim**-0.5
        if self.whole:
            self.heads, self.length, self.device = heads, tokens, keys.device
        elif new:
            fresh = torch.arange(self.length, self.length + new, dtype=torch.int32, device=keys.device).expand(
                heads, new
            )
            self.positions = torch.cat([self.positions, fresh], 1) if self.positions.numel() else fresh.clone()
            if self.accumulates:
                none = torch.zeros(heads, new, device=keys.device)
                self.mass = torch.cat([self.mass, none], 1) if self.mass.numel() else none
                self.seen = torch.cat([self.seen, none], 1) if self.seen.numel() else none
            self.length += new

    def held(self) -> torch.Tensor:
        """Where the tokens stood; where all are held there is no table of it."""
        if not self.whole:
            return self.positions
        return torch.arange(self.length, dtype=torch.int32, device=self.device).expand(self.heads, -1)

    def take(self, known: Any, head_dim: int) -> None:
        """Become what `vars` of another layer, of the same policy, are."""
        if not isinstance(known, dict) or known.keys() != vars(self).keys():
            raise CorruptPayload("the state is not one of a pruner's layer")
        if not all(_alike(known[name], mine) for name, mine in vars(self).items()):
            raise CorruptPayload("the state of a pruner's layer has other kinds of values")
        columns, asked = known["positions"].shape, (known["queries"], known["pending"])
        if (
            any(known[name] != getattr(self, name) for name in ("whole", "accumulates", "device"))
            or (self.accumulates and not columns == known["mass"].shape == known["seen"].shape)
            or any(each.shape[1] and (each.shape[2] != head_dim or each.shape[0] % columns[0]) for each in asked)
        ):
            raise CorruptPayload("the state of a pruner's layer is of another policy, or of another shape")
        vars(self).update(known)

    def tables(self) -> tuple[torch.Tensor, ...]:
        return self.positions, self.mass, self.seen, self.queries, self.pending

    def fold(self, keys: torch.Tensor) -> None:
        """Add up the attention of pending queries."""
        if count := self.pending.shape[1]:
            self.mass = self.mass + column_sums(self.pending, keys, self.scale, self.positions >= 0)
            self.seen = self.seen + sights(count, keys.shape[1], keys.device)
            self.pending = self.pending[:, :0].clone()  # a view would keep the memory of all of them

    def evidence(self, keys: torch.Tensor, values: torch.Tensor) -> Evidence:
        self.fold(keys)
        accumulated = (self.mass, self.seen) if self.accumulates and bool(self.seen.any()) else (None, None)
        queries = self.queries if self.queries.shape[1] else None
        return Evidence(keys, values, self.positions, self.length, self.scale, queries, *accumulated)

    def move(self, kept: Kept) -> None:
        """Hear of what stays."""
        if self.whole:
            return
        gone = kept.columns < 0
        columns = kept.columns.clamp(min=0)
        if self.accumulates:
            self.mass, self.seen = (table.gather(1, columns).masked_fill(gone, 0) for table in (self.mass, self.seen))
        self.positions, self.ragged = kept.positions, not kept.even


def _alike(known: Any, mine: Any) -> bool:
    """Of one type, and as tables of as many dimensions; queries are of the model's own dtype."""
    if not isinstance(mine, torch.Tensor):
        return type(known) is type(mine)
    if not isinstance(known, torch.Tensor) or known.dim() != mine.dim():
        return False
    return known.dtype == mine.dtype or (known.dim() == 3 and known.is_floating_point())


def last(held: torch.Tensor, new: torch.Tensor, count: int) -> torch.Tensor:
    """The last `count` of these queries, in memory of their own."""
    joined = torch.cat([held[:, -count:], new[:, -count:]], 1) if held.shape[1] else new[:, -count:].clone()
    return joined[:, -count:]
