"""One sequence from its prompt to its end, over codecs, pruning and what others have computed."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any

import torch

from kvtier.client.hit import Hit
from kvtier.client.save import Saved
from kvtier.client.space import Space
from kvtier.errors import ClosedError, KVMismatch, UsageError
from kvtier.flow.cache import FlowCache
from kvtier.flow.recipe import Recipe, parse_recipe
from kvtier.flow.report import Report
from kvtier.pruning.models import watched
from kvtier.spec import KVSpec

CACHE_NAMES = ("cache", "past_key_values")
"""What models call their cache: since transformers 5.20, and before."""
REFUSED = frozenset(
    (
        *CACHE_NAMES,
        "assistant_early_exit",
        "assistant_model",
        "attention_mask",
        "cache_implementation",
        "inputs_embeds",
        "position_ids",
        "prompt_lookup_num_tokens",
        "token_healing",
        "use_mtp",
    )
)
"""Arguments of `model.generate` that bring a cache of their own, or another sequence than the tokens."""


class Flow:
    """Generates one sequence, whose KV ages and loses tokens as its recipe says.

        prompt    the longest prefix that the space has is loaded, the rest computed, all of it exact; saved
        settled   tokens leave, layer by layer; old ones are encoded, once
        step      a layer is decoded into a scratch, attended to, and a token appended; old tokens age
        every N   tokens leave, layer by layer

    Calls go on with the sequence when they begin with all that is held; else they begin anew. What is computed once
    anything is approximate is approximate, and is not saved. One thread at a time.

    Args:
        model: a decoder-only model of transformers in `eval` mode, on a CPU.
        recipe: a `Recipe`, its name or its text.
        space: where exact KV of prompts is kept, made for this model by `kvtier.connectors.transformers.space_for`.
        wait: seconds that a prompt may wait for blocks that must first be brought up from another tier.

    Attributes:
        cache: of the sequence; None before the first.
        loaded: tokens of the last prompt that came from the space.
        saved: what becomes of the last prompt's blocks; None when none were to be saved.

    Raises:
        ConfigError: no such recipe, or none for this model.
        UnsupportedKV: a model on a GPU, or whose layers do not keep one K and V for every token.
        KVMismatch: a space of another model's shape.
        UsageError: a space whose KV is not exact.
    """

    def __init__(
        self, model: Any, recipe: Recipe | str = "default", *, space: Space | None = None, wait: float = 0.0
    ) -> None:
        self.recipe = parse_recipe(recipe) if isinstance(recipe, str) else recipe
        self.cache: FlowCache | None = FlowCache(model, self.recipe)
        self.loaded = 0
        self.saved: Future[Saved] | None = None
        self._model, self._space, self._wait = model, space, wait
        self._ids = torch.empty(0, dtype=torch.long)
        self._after: Hit | None = None
        if space is not None:
            _require(model, space)

    def __enter__(self) -> Flow:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def generate(self, input_ids: Any, **options: Any) -> Any:
        """Answer a prompt as `model.generate` does.

        Args:
            input_ids: the whole sequence, history included: `[tokens]` or `[1, tokens]`.
            **options: for `model.generate`.

        Returns:
            What `model.generate` returns.

        Raises:
            UsageError: no tokens, several sequences, or an option that brings another cache.
            UnsupportedKV: KV with NaN or Inf.
            ClosedError: the flow is closed.
        """
        cache, ids = self._begin(input_ids, options)
        # If this raises, nobody knows what the cache holds.
        self._ids = self._ids[:0]
        with self._watched(cache):
            made = self._model.generate(
                input_ids=ids[None].to(self._model.device),
                attention_mask=torch.ones(1, len(ids), dtype=torch.long),
                **{_cache_name(self._model): cache},
                **options,
            )
        cache.upkeep()
        sequence = (made if isinstance(made, torch.Tensor) else made.sequences)[0]
        self._ids = sequence[: cache.tokens].cpu()
        return made

    @property
    def report(self) -> Report:
        """What the sequence's KV takes.

        Raises:
            ClosedError: the flow is closed.
        """
        if self.cache is None:
            raise ClosedError("this flow is closed; read the report before")
        return self.cache.report

    def close(self) -> None:
        """Let the sequence's KV go; idempotent. What is being saved is saved."""
        self.cache, self._ids, self._after = None, self._ids[:0], None

    def _begin(self, input_ids: Any, options: Mapping[str, Any]) -> tuple[FlowCache, torch.Tensor]:
        if self.cache is None:
            raise ClosedError("this flow is closed; make another one")
        _check(self._model, options)
        ids = torch.as_tensor(input_ids).cpu()
        ids = ids[0] if ids.dim() == 2 and len(ids) == 1 else ids
        if ids.dim() != 1 or not len(ids):
            raise UsageError(f"input_ids has the shape {list(ids.shape)}; pass one sequence, [tokens] or [1, tokens]")
        held = len(self._ids)
        if not held or held >= len(ids) or not torch.equal(self._ids, ids[:held]):
            self.cache = FlowCache(self._model, self.recipe, prompt=len(ids))
            self.loaded, self.saved, self._after = 0, None, None
            if self._space is not None:
                self._load(self._space, self.cache, ids)
        return self.cache, ids

    def _load(self, space: Space, cache: FlowCache, ids: torch.Tensor) -> None:
        """Load what the space has of a prompt, all but its last token at most, and have the rest saved."""
        spec = cache.spec
        with space.match(ids[:-1], wait=self._wait) as hit:
            dtype = getattr(torch, spec.dtype)
            shape = spec.kv_heads, hit.tokens
            parts = [
                (torch.empty(*shape, spec.head_dim, dtype=dtype), torch.empty(*shape, spec.v_head_dim, dtype=dtype))
                for _ in range(spec.layers if hit.tokens else 0)
            ]
            self.loaded = hit.load([(k.transpose(0, 1), v.transpose(0, 1)) for k, v in parts]) if hit.tokens else 0
        if self.loaded:
            cache.load([(keys[:, : self.loaded], values[:, : self.loaded]) for keys, values in parts])
        self._after = hit
        cache.before_settling = lambda: self._save(space, cache, ids)

    def _save(self, space: Space, cache: FlowCache, ids: torch.Tensor) -> None:
        """Save the prompt's KV, which is exact, as it is until the cache settles."""
        kv = [(keys.transpose(0, 1), values.transpose(0, 1)) for keys, values in cache.exact()]
        self.saved = space.save(ids[: cache.tokens], kv, start=self.loaded, after=self._after)

    def _watched(self, cache: FlowCache) -> AbstractContextManager[None]:
        return nullcontext() if cache.pruner is None else watched(self._model, cache.pruner)


def _require(model: Any, space: Space) -> None:
    spec = KVSpec.from_hf(model.config, dtype=model.dtype, block_tokens=space.block_tokens)
    if spec != space.keyspace.spec:
        raise KVMismatch(f"the model's KV is {spec}; the space was made for {space.keyspace.spec}")
    if space.keyspace.plan != "raw" or space.keyspace.recipe:
        raise UsageError(
            f"the space has the plan {space.keyspace.plan!r}, and a flow would quantise again what it gives; make one "
            "with plan='raw'"
        )


def _cache_name(model: Any) -> str:
    parameters = inspect.signature(model.forward).parameters
    return next(name for name in CACHE_NAMES if name in parameters or name == CACHE_NAMES[-1])


def _check(model: Any, options: Mapping[str, Any]) -> None:
    if model.training:
        raise UsageError("the model is in training mode, where dropout changes its KV; call model.eval()")
    if torch.is_autocast_enabled(model.device.type):
        raise UsageError("autocast is on, which changes the KV; load the model in the dtype that it should run in")
    config = options.get("generation_config") or model.generation_config
    for name in REFUSED:
        if options.get(name, getattr(config, name, None)) is not None:
            raise UsageError(f"generate() takes no {name!r} here: it would change the KV or its cache; leave it out")
    for name in ("num_beams", "num_return_sequences"):
        if (options.get(name, getattr(config, name, None)) or 1) > 1:
            raise UsageError(f"{name} is more than 1; a flow generates one sequence")
    if options.get("use_cache", config.use_cache) is False:
        raise UsageError("use_cache is off, and a flow is a cache; set it to True")
