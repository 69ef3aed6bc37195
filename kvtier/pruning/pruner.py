"""One sequence that is pruned as it grows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from kvtier.errors import ConfigError, CorruptPayload, KVMismatch, UsageError
from kvtier.pruning.kept import Kept, every
from kvtier.pruning.layer import FOLD, Layer, last
from kvtier.pruning.policy import Policy
from kvtier.pruning.rope import Rope

Part = tuple[torch.Tensor, torch.Tensor]
"""K and V of a layer, `[kv_heads, tokens, head_dim]`."""


class Pruner:
    """What a policy needs to know of one sequence, from its first token on. For one thread.

    Whoever runs the model calls `observe` for each layer of each forward, if the policy looks at attention
    (`kvtier.pruning.watched` does so for transformers), and `prune` when `due`.

    Args:
        policy: what stays; or one for each layer, None where everything does.
        layers: of the model.
        rope: of the model; for policies with `compact`.

    Attributes:
        policies: of each layer.
        policy: the first of them.

    Raises:
        ConfigError: not one policy for each layer; compact without a rope, or in some layers and not in others.
    """

    def __init__(self, policy: Policy | Sequence[Policy | None], layers: int, *, rope: Rope | None = None) -> None:
        self.policies = (policy,) * layers if isinstance(policy, Policy) else tuple(policy)
        if len(self.policies) != layers or not any(self.policies):
            raise ConfigError(f"{len(self.policies)} policies for {layers} layers; give each one, and not all None")
        self.policy = next(each for each in self.policies if each is not None)
        compact = {each is not None and each.compact for each in self.policies}
        if len(compact) > 1:
            raise ConfigError("positions are closed up in all layers or in none: set compact alike, in each layer")
        self.compact = compact.pop()
        if self.compact and rope is None:
            raise ConfigError("the policy closes positions up: give rope=Rope.of(model), or set compact=False")
        self.rope = rope
        self._every = min(each.every for each in self.policies if each is not None)
        self._layers = [Layer(each) for each in self.policies]
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
        return self.length - self._pruned >= self._every

    def positions(self, layer: int) -> torch.Tensor:
        """Where the tokens that a layer holds stood in the sequence, `[kv_heads, tokens]`, int32; -1 for none."""
        return self._layers[layer].held()

    @property
    def nbytes(self) -> int:
        """Bytes of the memory of all tables."""
        tables = (table for state in self._layers for table in state.tables())
        memory = {table.data_ptr(): table.untyped_storage() for table in tables if table.numel()}
        return sum(each.nbytes() for each in memory.values())

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
        state, policy = self._layers[layer], self.policies[layer]
        if queries.shape[0] % keys.shape[0] or queries.shape[2] != keys.shape[2] or queries.shape[1] > keys.shape[1]:
            raise KVMismatch(
                f"queries {list(queries.shape)} do not belong to keys {list(keys.shape)}: heads are a multiple of KV "
                "heads, and the keys of the queries' own tokens are among the keys"
            )
        state.grow(keys)
        if policy is None:
            return
        state.scale = scale or keys.shape[2] ** -0.5
        if policy.scorer.window:
            state.queries = last(state.queries, queries, policy.scorer.window)
        if policy.scorer.accumulates:
            state.pending = last(state.pending, queries, FOLD + queries.shape[1])
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
        if self.compact and self.rope is not None:
            pruned = self._closed_up(self.rope, chosen, kv, pruned)
        for state, kept in zip(self._layers, chosen, strict=True):
            state.move(kept)
        self._pruned = self.length
        return pruned

    def decide(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> Kept:
        """Choose what stays of one layer, and take it that the caller drops the rest.

        For caches that have one layer's KV at a time; every layer that has a policy is decided, one after the other.

        Args:
            layer: its number.
            keys: what it holds, `[kv_heads, tokens, head_dim]`.
            values: likewise.

        Raises:
            UsageError: the policy closes positions up, for which all layers are needed; or as `prune`.
        """
        if self.compact:
            raise UsageError("positions are closed up in all layers at once: use prune()")
        kept = self._chosen(layer, keys, values)
        self._layers[layer].move(kept)
        self._pruned = self.length
        return kept

    def state(self) -> dict[str, Any]:
        """All that is known of the sequence, as tensors and numbers; `take` makes it that again."""
        return {"shift": self._shift, "pruned": self._pruned, "layers": [vars(state).copy() for state in self._layers]}

    def take(self, state: Mapping[str, Any], head_dim: int) -> None:
        """Go on with the sequence that another pruner, of the same policies, was of.

        Args:
            state: what that one's `state` said.
            head_dim: of the model's keys.

        Raises:
            CorruptPayload: it says no such thing; what is known then is undefined.
        """
        shift, pruned, layers = (state.get(name) for name in ("shift", "pruned", "layers"))
        if type(shift) is not int or type(pruned) is not int or type(layers) is not list:
            raise CorruptPayload("the state is not one of a pruner")
        if len(layers) != len(self._layers):
            raise CorruptPayload(f"the state is of {len(layers)} layers, the pruner of {len(self._layers)}")
        self._shift, self._pruned = shift, pruned
        for layer, known in zip(self._layers, layers, strict=True):
            layer.take(known, head_dim)

    def _chosen(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> Kept:
        state, policy = self._layers[layer], self.policies[layer]
        state.grow(keys)
        if policy is None:
            return every(state.held())
        return policy.choose(state.evidence(keys, values), layer=layer, layers=len(self._layers))

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
        return [self._chosen(layer, keys, values) for layer, (keys, values) in enumerate(kv)]
