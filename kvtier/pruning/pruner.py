"""One sequence that is pruned as it grows."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvtier.errors import ConfigError, KVMismatch, UsageError
from kvtier.pruning.attention import column_sums, sights
from kvtier.pruning.evidence import Evidence
from kvtier.pruning.kept import Kept
from kvtier.pruning.policy import Policy
from kvtier.pruning.rope import Rope

FOLD = 64
"""Queries whose attention is summed in one go: of one at a time the products of matrices are too small."""
Part = tuple[torch.Tensor, torch.Tensor]
"""K and V of a layer, `[kv_heads, tokens, head_dim]`."""


class Pruner:
    """What a policy needs to know of one sequence, from its first token on. For one thread.

    Whoever runs the model calls `observe` for each layer of each forward, if the policy looks at attention
    (`kvtier.pruning.watched` does so for transformers), and `prune` when `due`.

    Args:
        policy: what stays.
        layers: of the model.
        rope: of the model; for policies with `compact`.

    Raises:
        ConfigError: compact without a rope.
    """

    def __init__(self, policy: Policy, layers: int, *, rope: Rope | None = None) -> None:
        if policy.compact and rope is None:
            raise ConfigError("the policy closes positions up: give rope=Rope.of(model), or set compact=False")
        self.policy = policy
        self.rope = rope
        self._layers = [_Layer(accumulates=policy.scorer.accumulates) for _ in range(layers)]
        self._shift = 0
        self._pruned = 0

    @property
    def length(self) -> int:
        """Tokens of the sequence so far, those included that were dropped."""
        return self._layers[-1].length

    @property
    def next_position(self) -> int:
        """Position that the next token is to be computed at."""
        return self.length - self._shift

    @property
    def due(self) -> bool:
        """So many tokens came since the last pruning, or since the prompt began, that it is time."""
        return self.length - self._pruned >= self.policy.every

    def positions(self, layer: int) -> torch.Tensor:
        """Where the tokens that a layer holds stood in the sequence, `[kv_heads, tokens]`, int32; -1 for none."""
        return self._layers[layer].positions

    def ragged(self, layer: int) -> bool:
        """Whether KV heads of a layer hold different numbers of tokens, so that some columns must be masked."""
        return self._layers[layer].ragged

    def observe(self, layer: int, queries: torch.Tensor, keys: torch.Tensor, *, scale: float | None = None) -> None:
        """Look at the attention of some new tokens.

        Args:
            layer: number of the layer.
            queries: of the new tokens, rotated, `[heads, queries, head_dim]`.
            keys: all that the layer holds, the new tokens last, `[kv_heads, tokens, head_dim]`.
            scale: of the logits; 1 / sqrt(head_dim) unless given.

        Raises:
            UsageError: the layer holds fewer tokens than before.
            KVMismatch: shapes that do not belong together.
        """
        state, scorer = self._layers[layer], self.policy.scorer
        if queries.shape[0] % keys.shape[0] or queries.shape[2] != keys.shape[2] or queries.shape[1] > keys.shape[1]:
            raise KVMismatch(
                f"queries {list(queries.shape)} do not belong to keys {list(keys.shape)}: heads are a multiple of KV "
                "heads, and the keys of the queries' own tokens are among the keys"
            )
        state.grow(keys)
        state.scale = scale or keys.shape[2] ** -0.5
        if scorer.window:
            state.queries = _last(state.queries, queries, scorer.window)
        if scorer.accumulates:
            state.pending = _last(state.pending, queries, FOLD + queries.shape[1])
            if state.pending.shape[1] >= FOLD:
                state.fold(keys)

    def prune(self, kv: Sequence[Part]) -> list[Part]:
        """Drop what the policy drops.

        Args:
            kv: what each layer holds.

        Returns:
            What stays, in tensors of its own.

        Raises:
            UsageError: the policy looks at attention, and none was observed.
        """
        chosen = self.choose(kv)
        pruned = [(kept.gather(keys), kept.gather(values)) for kept, (keys, values) in zip(chosen, kv, strict=True)]
        if self.policy.compact and self.rope is not None:
            pruned = self._closed_up(self.rope, chosen, kv, pruned)
        for state, kept in zip(self._layers, chosen, strict=True):
            state.move(kept)
        self._pruned = self.length
        return pruned

    def _closed_up(self, rope: Rope, chosen: Sequence[Kept], kv: Sequence[Part], pruned: Sequence[Part]) -> list[Part]:
        """Turn what stays to positions without gaps.

        The columns of a layer always stand one after the other up to the next token's position, which is the same for
        all layers; so those with fewer columns begin later:

            layer 0   | 0 1 2 3 4 5 | next: 6
            layer 1   |     2 3 4 5 | next: 6
        """
        end = max(kept.columns.shape[1] for kept in chosen)
        turned = []
        for state, kept, (keys, _), (left, values) in zip(self._layers, chosen, kv, pruned, strict=True):
            count = kept.columns.shape[1]
            now = torch.arange(end - count, end, device=keys.device)
            before = self.next_position - keys.shape[1] + kept.columns
            turned.append((rope.turn(left, (now - before).masked_fill(kept.columns < 0, 0)), values))
            if state.queries.shape[1]:
                by = torch.full(state.queries.shape[1:2], end - self.next_position, device=keys.device)
                state.queries = rope.turn(state.queries, by)
        self._shift = self.length - end
        return turned

    def choose(self, kv: Sequence[Part]) -> list[Kept]:
        """What `prune` would keep of each layer.

        Raises:
            UsageError: as there.
        """
        if len(kv) != len(self._layers):
            raise KVMismatch(f"{len(kv)} layers were given; the pruner was made for {len(self._layers)}")
        chosen = []
        for layer, (state, (keys, values)) in enumerate(zip(self._layers, kv, strict=True)):
            state.grow(keys)
            chosen.append(self.policy.choose(state.evidence(keys, values), layer=layer, layers=len(kv)))
        return chosen


class _Layer:
    """What is known of one layer; its tables have a column for each that the cache has."""

    def __init__(self, *, accumulates: bool) -> None:
        self.accumulates = accumulates
        self.length = 0
        self.scale = 0.0
        self.ragged = False
        self.positions = torch.empty(0, 0, dtype=torch.int32)
        self.mass = self.seen = torch.empty(0, 0)
        self.queries = self.pending = torch.empty(0, 0, 0)

    def grow(self, keys: torch.Tensor) -> None:
        """Hear of tokens that came."""
        heads, tokens, dim = keys.shape
        new = tokens - self.positions.shape[1]
        if new < 0:
            raise UsageError(
                f"the layer held {self.positions.shape[1]} tokens and now {tokens}: a cache that is pruned must not be "
                "cut by others; begin a sequence with a new Pruner"
            )
        self.scale = self.scale or dim**-0.5
        if new:
            fresh = torch.arange(self.length, self.length + new, dtype=torch.int32, device=keys.device).expand(
                heads, new
            )
            self.positions = torch.cat([self.positions, fresh], 1) if self.positions.numel() else fresh.clone()
            if self.accumulates:
                none = torch.zeros(heads, new, device=keys.device)
                self.mass = torch.cat([self.mass, none], 1) if self.mass.numel() else none
                self.seen = torch.cat([self.seen, none], 1) if self.seen.numel() else none
            self.length += new

    def fold(self, keys: torch.Tensor) -> None:
        """Add up the attention of pending queries."""
        if count := self.pending.shape[1]:
            self.mass = self.mass + column_sums(self.pending, keys, self.scale, self.positions >= 0)
            self.seen = self.seen + sights(count, keys.shape[1], keys.device)
            self.pending = self.pending[:, :0]

    def evidence(self, keys: torch.Tensor, values: torch.Tensor) -> Evidence:
        self.fold(keys)
        accumulated = (self.mass, self.seen) if self.accumulates and bool(self.seen.any()) else (None, None)
        queries = self.queries if self.queries.shape[1] else None
        return Evidence(keys, values, self.positions, self.length, self.scale, queries, *accumulated)

    def move(self, kept: Kept) -> None:
        """Hear of what stays."""
        gone = kept.columns < 0
        columns = kept.columns.clamp(min=0)
        if self.accumulates:
            self.mass, self.seen = (table.gather(1, columns).masked_fill(gone, 0) for table in (self.mass, self.seen))
        self.positions, self.ragged = kept.positions, not kept.even


def _last(held: torch.Tensor, new: torch.Tensor, count: int) -> torch.Tensor:
    """The last `count` of these queries, in memory of their own."""
    joined = torch.cat([held[:, -count:], new[:, -count:]], 1) if held.shape[1] else new[:, -count:].clone()
    return joined[:, -count:]
