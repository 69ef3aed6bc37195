"""One sequence from its prompt to its end, over codecs, pruning and what others have computed."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any

import torch

from kvtier.client.pools import Pools
from kvtier.client.save import Saved
from kvtier.client.scope import whole
from kvtier.client.space import Space
from kvtier.errors import ClosedError, CorruptPayload, UsageError
from kvtier.flow.archive import Archive
from kvtier.flow.cache import FlowCache
from kvtier.flow.prefix import load, require, require_shape, save
from kvtier.flow.recipe import Recipe, parse_recipe
from kvtier.flow.report import Report
from kvtier.flow.state import context_of, pack, part, told, unpack
from kvtier.pruning.models import watched

CACHE_NAMES = ("cache", "past_key_values")
"""What models call their cache: since transformers 5.20, and before."""
REFUSED = frozenset(
    (
        *CACHE_NAMES,
        "assistant_early_exit",
        "assistant_model",
        "attention_mask",
        "cache_implementation",
        "guidance_scale",
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
    anything is approximate is approximate, and is not saved. One thread at a time; where layers lose tokens the model's
    attention is watched, so that nobody else may run the model meanwhile.

    Args:
        model: a decoder-only model of transformers in `eval` mode, on a CPU.
        recipe: a `Recipe`, its name or its text.
        space: where exact KV of prompts is kept, made for this model by `kvtier.connectors.transformers.space_for`; or
            `Pools` of such: a public pool, and what only this session finds.
        wait: seconds that a prompt may wait for blocks that must first be brought up from another tier.

    Attributes:
        cache: of the sequence; None before the first.
        loaded: tokens of the last prompt that came from the space.
        saved: what becomes of the last prompt's blocks; of pools, those for everybody first.

    Raises:
        ConfigError: no such recipe, or none for this model.
        UnsupportedKV: a model on a GPU, or whose layers do not keep one K and V for every token.
        KVMismatch: a space of another model's shape.
        UsageError: a space whose KV is not exact.
    """

    def __init__(
        self, model: Any, recipe: Recipe | str = "default", *, space: Space | Pools | None = None, wait: float = 0.0
    ) -> None:
        self.recipe = parse_recipe(recipe) if isinstance(recipe, str) else recipe
        self.cache: FlowCache | None = FlowCache(model, self.recipe)
        self.loaded = 0
        self.saved: list[Future[Saved]] = []
        self._model, self._space, self._wait = model, space, wait
        self._kind = _kind(model)
        self._ids = torch.empty(0, dtype=torch.long)
        self._turns: list[int] = []
        if space is not None:
            require(model, space)

    def __enter__(self) -> Flow:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def generate(self, input_ids: Any, *, public: int = 0, **options: Any) -> Any:
        """Answer a prompt as `model.generate` does.

        Args:
            input_ids: the whole sequence, history included: `[tokens]` or `[1, tokens]`.
            public: with `Pools`, how many first tokens may be shared with everybody: a system prompt, a document.
            **options: for `model.generate`.

        Returns:
            What `model.generate` returns.

        Raises:
            UsageError: no tokens, several sequences, an option that brings another cache, or a model that was changed.
            UnsupportedKV: KV with NaN or Inf.
            ClosedError: the flow is closed.
        """
        cache, ids = self._begin(input_ids, public, options)
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
        self._turns.append(cache.tokens)
        return made

    def keep(self, archive: Archive) -> tuple[bytes, Future[Saved]]:
        """Store what the sequence's KV has become, for its session alone.

        Returns:
            The name of the context, 32 bytes, for `resume`; and what becomes of the state.

        Raises:
            UsageError: there is no sequence yet, or its last turn failed.
            KVMismatch: the archive is of another model's shape.
            ClosedError: the flow is closed.
        """
        cache = self._live()
        require_shape(self._model, archive.spec)
        if not len(self._ids):
            raise UsageError("there is no sequence yet, or its last turn failed: keep what generate() has answered")
        name = context_of(self._ids, self._turns)
        state = {"ids": self._ids, "turns": self._turns, "cache": cache.state()}
        return name, archive.save(self.recipe.text(cache.spec, name), pack(state))

    def resume(self, archive: Archive, name: bytes, *, wait: float = 0.0) -> bool:
        """Go on with a sequence that another flow of the same model and recipe has kept.

        Args:
            archive: of the session.
            name: of its whole context, as `keep` returned it.
            wait: seconds that it may take when the state must first be brought up from another tier.

        Returns:
            Whether it was there; if not, this flow is as it was.

        Raises:
            KVMismatch: the archive is of another model's shape.
            ClosedError: the flow is closed.
        """
        recipe = self.recipe.text(self._live().spec, name)
        require_shape(self._model, archive.spec)
        packed = archive.load(recipe, wait=wait)
        if packed is None:
            return False
        cache = FlowCache(self._model, self.recipe)
        try:
            state = unpack(packed)
            cache.take(part(state, "cache"))
            ids, turns = told(state, name, cache.tokens)
        except CorruptPayload:
            archive.condemn(recipe, "unreadable")
            return False
        self.cache, self._ids, self._turns = cache, ids, turns
        self.loaded, self.saved = 0, []
        return True

    @property
    def report(self) -> Report:
        """What the sequence's KV takes.

        Raises:
            ClosedError: the flow is closed.
        """
        return self._live().report

    def close(self) -> None:
        """Let the sequence's KV go; idempotent. What is being saved is saved."""
        self.cache, self._ids = None, self._ids[:0]

    def _live(self) -> FlowCache:
        if self.cache is None:
            raise ClosedError("this flow is closed; make another one, and read its report before")
        return self.cache

    def _begin(self, input_ids: Any, public: Any, options: Mapping[str, Any]) -> tuple[FlowCache, torch.Tensor]:
        self._live()
        _check(self._model, options)
        if _kind(self._model) != self._kind:
            raise UsageError(
                "the model is not what it was when this flow was made: its dtype, configuration or adapters were "
                "changed, and so is its KV; make another flow, and another space with space_for"
            )
        ids = torch.as_tensor(input_ids).cpu()
        ids = ids[0] if ids.dim() == 2 and len(ids) == 1 else ids
        if ids.dim() != 1 or not len(ids) or ids.is_floating_point():
            raise UsageError(
                f"input_ids are {ids.dtype} {list(ids.shape)}; pass one sequence of integers, [tokens] or [1, tokens]"
            )
        if not 0 <= whole(public, "public") <= len(ids):
            raise UsageError(f"public is {public}; pass how many of the {len(ids)} tokens may be shared")
        held, self._ids = self._ids, self._ids[:0]  # if this turn fails, nobody knows what the cache holds
        if not 0 < len(held) < len(ids) or not torch.equal(held, ids[: len(held)]):
            self.cache = FlowCache(self._model, self.recipe, prompt=len(ids))
            self.loaded, self.saved, self._turns = 0, [], []
            if self._space is not None:
                self._load(self._space, self.cache, ids, public)
        elif chunk := _option(self._model, options, "prefill_chunk_size"):
            self._turns += range(len(held) + chunk, len(ids), chunk)
        self._turns.append(len(ids))
        return self._live(), ids

    def _load(self, source: Space | Pools, cache: FlowCache, ids: torch.Tensor, public: int) -> None:
        """Load what is stored of a prompt, but for the tokens whose attention is needed, and have the rest saved."""
        found, parts = load(source, cache.spec, ids, _loadable(cache, len(ids)), public, self._wait)
        self.loaded = found.tokens
        if parts:
            cache.load(parts)

        def store() -> None:
            # The KV is as it came until the cache settles, and then in tensors that nobody writes to.
            self.saved = save(found, ids[: cache.tokens], cache.exact())

        cache.before_settling = store

    def _watched(self, cache: FlowCache) -> AbstractContextManager[None]:
        return nullcontext() if cache.pruner is None else watched(self._model, cache.pruner)


def _loadable(cache: FlowCache, tokens: int) -> int:
    """How many first tokens of a prompt may be loaded: of the others it is asked what they look at."""
    scorers = [each.scorer for each in cache.pruner.policies if each] if cache.pruner else []
    if any(each.accumulates for each in scorers):
        return 0
    return max(0, tokens - max([1, *(each.window for each in scorers)]))


def _kind(model: Any) -> tuple[Any, ...]:
    """What of a model changes its KV and is changed in place: adapters (PEFT) are switched and scaled so."""
    adapters = [
        (layer._disable_adapters, str(getattr(layer, "_active_adapter", None)), str(getattr(layer, "scaling", None)))  # noqa: SLF001
        for layer in model.modules()
        if hasattr(layer, "_disable_adapters")
    ]
    return model.dtype, model.config.to_json_string(use_diff=False), adapters


def _cache_name(model: Any) -> str:
    parameters = inspect.signature(model.forward).parameters
    return next(name for name in CACHE_NAMES if name in parameters or name == CACHE_NAMES[-1])


def _option(model: Any, options: Mapping[str, Any], name: str) -> Any:
    config = options.get("generation_config") or model.generation_config
    return options.get(name, getattr(config, name, None))


def _check(model: Any, options: Mapping[str, Any]) -> None:
    if model.training:
        raise UsageError("the model is in training mode, where dropout changes its KV; call model.eval()")
    if torch.is_autocast_enabled(model.device.type):
        raise UsageError("autocast is on, which changes the KV; load the model in the dtype that it should run in")
    for name in REFUSED:
        if _option(model, options, name) is not None:
            raise UsageError(f"generate() takes no {name!r} here: it would change the KV or its cache; leave it out")
    for name in ("num_beams", "num_return_sequences"):
        if (_option(model, options, name) or 1) > 1:
            raise UsageError(f"{name} is more than 1; a flow generates one sequence")
    if _option(model, options, "use_cache") is False:
        raise UsageError("use_cache is off, and a flow is a cache; set it to True")
