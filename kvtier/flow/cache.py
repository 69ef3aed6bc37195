"""A cache of transformers for one sequence, whose layers age and lose tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer

from kvtier.errors import CorruptPayload, UnsupportedKV, UsageError
from kvtier.flow.pieces import PIECE, codec_of
from kvtier.flow.recipe import LayerRecipe, Recipe, parse_recipe
from kvtier.flow.report import Report
from kvtier.flow.rows import Part
from kvtier.flow.state import part
from kvtier.flow.store import Scratch, Store
from kvtier.pruning.pruner import Pruner
from kvtier.spec import KVSpec


class FlowCache(Cache):
    """KV of one sequence under a recipe, in place of a DynamicCache. For inference, on a CPU; one thread at a time.

    Until `prompt` tokens are there everything is held as it came, so that a prompt is computed on exact KV. From the
    forward after that on, what is old is encoded, and every `recipe.every` tokens layers lose what their policies drop.
    Where there are policies, run the model inside `kvtier.pruning.watched(model, cache.pruner)`.

    Args:
        model: a decoder-only model for causal language modelling.
        recipe: a `Recipe`, its name or its text.
        prompt: tokens that are computed on exact KV; those of the first forward unless given.

    Attributes:
        recipe: the recipe.
        spec: of the KV in the model's dtype.
        pruner: observes attention and prunes; None when no layer loses tokens.
        stores: of each layer.
        before_settling: called once, with the prompt computed and everything as it came.

    Raises:
        ConfigError: no such recipe, or none for this model.
        UnsupportedKV: a model on a GPU, or whose layers do not keep one K and V for every token.
    """

    def __init__(self, model: Any, recipe: Recipe | str = "default", *, prompt: int = 1) -> None:
        self.recipe = parse_recipe(recipe) if isinstance(recipe, str) else recipe
        self.spec = flow_spec(model)
        held = "bfloat16" if self.spec.dtype == "float32" else self.spec.dtype
        layers = self.recipe.resolve(KVSpec.from_hf(model.config, dtype=held, block_tokens=PIECE))
        policies = [each.policy for each in layers]
        self.pruner = Pruner(policies, len(layers)) if any(policies) else None
        one_head = KVSpec(1, 1, self.spec.head_dim, self.spec.dtype, v_head_dim=self.spec.v_head_dim)
        self._scratch = Scratch(self.spec.kv_heads, one_head)
        self.stores = [self._store(each, held) for each in layers]
        self.prompt, self.before_settling = prompt, _nothing
        self._peak = 0
        self._own = [FlowLayer(store, self.spec) for store in self.stores]
        super().__init__(layers=[*self._own])

    def _store(self, layer: LayerRecipe, held: str) -> Store:
        dims = self.spec.head_dim, self.spec.v_head_dim
        codec = None if layer.exact else codec_of(layer.plan.schemes, dims, held, self.spec.dtype)
        dtype = getattr(torch, held)
        return Store(self._scratch, codec, dtype, exact=layer.plan.sinks, recent=self.recipe.recent)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if layer_idx == 0:
            self.upkeep()
        keys, values = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        return keys, values

    def upkeep(self) -> None:
        """Encode and drop what is due. The next forward does so by itself; call it to have it done now.

        Raises:
            UsageError: there are policies, and the model was not watched.
            UnsupportedKV: KV with NaN or Inf.
        """
        if self.tokens == 0 or self.tokens < self.prompt:
            return
        first, due = not self.stores[0].settled, self.pruner is not None and self._due(self.pruner)
        if not (first or due):
            return
        self._peak = self.report.peak
        if first:
            # Whatever it refers to is not needed any more.
            settling, self.before_settling = self.before_settling, _nothing
            settling()
        for number, store in enumerate(self.stores):
            pruner = self.pruner if due else None
            kept = None
            if pruner is not None and pruner.policies[number] is not None:
                kept = pruner.decide(number, *store.read())
            if first:
                store.settle(kept)
            elif kept is not None:
                store.keep(kept)

    def _due(self, pruner: Pruner) -> bool:
        if pruner.length != self.tokens:
            raise UsageError(
                f"the cache has {self.tokens} tokens, and attention of {pruner.length} was seen: run the model inside "
                "kvtier.pruning.watched(model, cache.pruner), if its attention is one of transformers' own interface"
            )
        return pruner.due

    @property
    def tokens(self) -> int:
        """That came, dropped ones included."""
        return self._own[-1].tokens

    @property
    def settled(self) -> bool:
        """Whether what is held is not exact any more, or may not be."""
        return self.stores[0].settled

    @property
    def report(self) -> Report:
        """What all this takes now."""
        spec, regions = self.spec, [store.nbytes for store in self.stores]
        element = sum(spec.head_dims) * 2
        rows = {name: sum(each[name] for each in regions) for name in ("exact", "aged", "recent")}
        left = sum(int(store.tokens.sum()) for store in self.stores)
        made = Report(
            tokens=self.tokens,
            native=self.tokens * spec.layers * spec.kv_heads * element,
            pruned=left * element,
            scratch=self._scratch.nbytes,
            pruner=0 if self.pruner is None else self.pruner.nbytes,
            peak=0,
            **rows,
        )
        return replace(made, peak=max(self._peak, made.held))

    def load(self, parts: list[Part]) -> None:
        """Begin with exact KV of a prefix, `[kv_heads, tokens, dim]` a layer, in the model's dtype.

        Raises:
            UsageError: something is there already.
        """
        if self.tokens:
            raise UsageError(f"the cache has {self.tokens} tokens; a prefix can only be its beginning")
        for layer, (keys, values) in zip(self._own, parts, strict=True):
            layer.update(keys[None], values[None])

    def state(self) -> dict[str, Any]:
        """All of the sequence, as tensors and numbers; `take` makes it that again.

        Raises:
            UsageError: it is not settled, so there is nothing that another recipe would not have.
        """
        if not self.settled:
            raise UsageError("the prompt is not over: its KV is exact, and belongs into a space")
        known = None if self.pruner is None else self.pruner.state()
        return {"tokens": self.tokens, "stores": [store.state() for store in self.stores], "pruner": known}

    def take(self, state: Mapping[str, Any]) -> None:
        """Begin as what the `state` of a cache of the same model and recipe says.

        Raises:
            UsageError: something is there already.
            CorruptPayload: it says no such thing; what this cache holds then is undefined.
        """
        if self.tokens:
            raise UsageError(f"the cache has {self.tokens} tokens; a state can only be its beginning")
        tokens, stores = state.get("tokens"), state.get("stores")
        if type(tokens) is not int or tokens < 1 or not isinstance(stores, list) or len(stores) != len(self.stores):
            raise CorruptPayload(f"the state is not one of {len(self.stores)} layers")
        for layer, store, known in zip(self._own, self.stores, stores, strict=True):
            store.take(part({"store": known}, "store"))
            layer.tokens = tokens
        if self.pruner is not None:
            self.pruner.take(part(state, "pruner"), self.spec.head_dim)
        for number, store in enumerate(self.stores):
            places = torch.arange(tokens).expand(self.spec.kv_heads, -1)
            if self.pruner is not None:
                places = self.pruner.positions(number) if self.pruner.length == tokens else places[:, :0]
            if store.columns != places.shape[1] or store.tokens.tolist() != (places >= 0).sum(1).tolist():
                raise CorruptPayload(f"layer {number} holds {store.tokens.tolist()} of {tokens} tokens")

    def exact(self) -> list[Part]:
        """All KV as it came, `[kv_heads, tokens, dim]` a layer.

        Raises:
            UsageError: it is not held any more.
        """
        if self.settled:
            raise UsageError("the prompt is over: what is held is no longer exact")
        return [store.read() for store in self.stores]

    def reset(self) -> None:
        raise UsageError("a FlowCache is of one sequence; make another one")

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove:
            raise UsageError("tokens that came have aged or were dropped, and cannot be taken back; make another cache")


class FlowLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """One layer of a `FlowCache`.

    Attributes:
        tokens: that came.
    """

    is_croppable = False
    is_sliding = False
    supports_early_init = False

    def __init__(self, store: Store, spec: KVSpec) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._store, self._spec = store, spec
        self.tokens, self.is_initialized = 0, True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        pass

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if key_states.shape[0] != 1:
            raise UsageError(f"a FlowCache is for one sequence, and was given {key_states.shape[0]}")
        spec, found = self._spec, (key_states.shape[1], key_states.shape[3], value_states.shape[3])
        if found != (spec.kv_heads, *spec.head_dims):
            raise UnsupportedKV(
                f"the model gives KV of {found} heads and elements of K and V, and its configuration says "
                f"{(spec.kv_heads, *spec.head_dims)}: a flow goes by that"
            )
        keys, values = self._store.append((key_states[0].detach(), value_states[0].detach()))
        self.tokens += key_states.shape[2]
        # What was read is in the scratch, or in tensors of its own: ageing makes new ones.
        self._store.age()
        return keys[None], values[None]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        # As if those that were dropped stood in front: the new ones end at their true place.
        held = self._store.columns
        return held + query_length, self.tokens - held

    def get_seq_length(self) -> int:
        return self.tokens

    def get_max_length(self) -> int:
        return -1


def flow_spec(model: Any) -> KVSpec:
    """The shape of a model's KV, in its dtype.

    Raises:
        UnsupportedKV: as for `FlowCache`.
    """
    if model.device.type != "cpu":
        raise UnsupportedKV(f"the model is on {model.device}; a flow is for models on a CPU: model.to('cpu')")
    spec = KVSpec.from_hf(model.config, dtype=model.dtype, block_tokens=PIECE)
    config = model.config.get_text_config(decoder=True)
    kinds = {type(layer) for layer in DynamicCache(config=config).layers}
    if spec.mla or kinds != {DynamicLayer}:
        names = ", ".join(sorted(kind.__name__ for kind in kinds))
        raise UnsupportedKV(f"the model's cache has {names}: a flow is for layers that keep K and V of every token")
    return spec


def _nothing() -> None: ...
