"""A conversation's KV, or that of a batch of prompts, that is loaded and saved as it grows."""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any
from weakref import ref

import torch
from transformers import DynamicCache

from kvtier.client.save import Saved
from kvtier.client.space import Space
from kvtier.connectors.transformers.adapters import Adapters
from kvtier.connectors.transformers.blocks import Blocks, Job, rows_of
from kvtier.connectors.transformers.forward import Call, cache_argument, watch
from kvtier.connectors.transformers.prefix import load, put
from kvtier.connectors.transformers.prompts import Prompts
from kvtier.connectors.transformers.record import Record, Stops
from kvtier.connectors.transformers.storable import require
from kvtier.errors import KVTierError, UsageError


@dataclass(frozen=True)
class Start:
    """Where a prompt's KV came from when its turn began.

    Attributes:
        tokens: of the prompt.
        kept: those that the cache held already.
        loaded: those that came from kvtier.
        tiers: the latter by the tier that served them.
    """

    tokens: int
    kept: int
    loaded: int
    tiers: Mapping[str, int]

    @property
    def computed(self) -> int:
        """Tokens that the model computes."""
        return self.tokens - self.kept - self.loaded


class KVTierCache(DynamicCache):
    """A DynamicCache that begins a turn with what is stored, and stores what the model computes into it.

    It hears from the model which tokens it is computing, so whatever is saved belongs to the tokens it was computed
    from. Each block is saved in the background as soon as it is whole. When the cache is changed by anybody else than
    the model, `turn` or `crop`, what it holds is not saved any more, until the next turn.

    One thread at a time; any number of them may share model and space.

    Args:
        model: a decoder-only model for causal language modelling, in `eval` mode.
        space: where its KV is kept; see `space_for`.
        wait: seconds that a turn may wait for blocks that must first be brought up from another tier.
        save: whether to save what is computed.

    Attributes:
        starts: for each row where its KV came from when the last turn began.

    Raises:
        UnsupportedKV: the model's KV cannot be stored.
        UsageError: a space made for another model, a model in training mode or under autocast.
    """

    def __init__(self, model: Any, space: Space, *, wait: float = 0.0, save: bool = True) -> None:
        require(model, space)
        super().__init__(config=model.config)
        self.space, self.starts = space, tuple[Start, ...]()
        self._model, self._wait, self._save = model, wait, save
        self._began, self._stops, self._adapters = 0.0, Stops.of(model), Adapters(model)
        self._call: Call | None = None
        self._rest: int | None = None
        self._restart(torch.empty(1, 0, dtype=torch.long), (0,))
        watch(model)

    def turn(self, input_ids: Any, attention_mask: Any = None) -> dict[str, Any]:
        """Begin a turn: arguments for `model.generate`, with this cache holding all that can be had of the prompt.

        Of a conversation that goes on, what it has in common with what is held stays, and the rest goes: the history
        may have been edited. Then the longest stored prefix is loaded, all but the prompt's last token at most.

        Args:
            input_ids: the whole prompt, `[1, tokens]`, history included; or several, padded on the left.
            attention_mask: for several: 0 for padding.

        Raises:
            UnsupportedKV: the model's KV cannot be stored any more.
            UsageError: no tokens, or a mask that hides any; or as for the constructor.
        """
        require(self._model, self.space)
        self._adapters = Adapters(self._model)
        prompts = Prompts.of(input_ids, attention_mask)
        chains = [self.space.chain(prompts.row(row)) for row in range(len(prompts.ids))]
        held = self._keep(prompts)
        found = load(self.space, prompts, chains, held=held, wait=self._wait)
        loaded = [0] * len(chains)
        if found is not None:
            end = put(self._model, self.layers, found, prompts)
            self._record = Record(prompts.ids[:, :end], prompts.pads)
            stored = [reached - pad for reached, pad in zip(found.ends, prompts.pads, strict=True)]
            self._blocks.loaded(stored)
            loaded = [max(0, min(own, end - pad) - held) for own, pad in zip(stored, prompts.pads, strict=True)]
            self._look()
        self.starts = tuple(
            Start(chain.tokens, held, own, tiers)
            for chain, own, tiers in zip(chains, loaded, found.tiers if found else [{}] * len(chains), strict=True)
        )
        self._rest = prompts.columns - self._record.columns
        return {
            "input_ids": prompts.ids.to(self._model.device),
            "attention_mask": prompts.padded.to(self._model.device),
            cache_argument(self._model): self,
        }

    @property
    def kept(self) -> int:
        """Tokens of the last turn's prompts that were held already."""
        return sum(start.kept for start in self.starts)

    @property
    def loaded(self) -> int:
        """Tokens of the last turn's prompts that came from kvtier."""
        return sum(start.loaded for start in self.starts)

    @property
    def computed(self) -> int:
        """Tokens of the last turn's prompts that the model computes."""
        return sum(start.computed for start in self.starts)

    def saved(self) -> Future[Saved]:
        """What becomes of all whole blocks that are held now: a future; nobody needs to wait for it."""
        self._doubt_changes()
        self._offer(all_of_them=True)
        return self._blocks.done()

    def before_forward(self, call: Call) -> None:
        """The model begins to compute; see `watch`."""
        rest, self._rest = self._rest, None
        if rest is not None and call.ids is not None:
            self._check(call.ids, rest)
        self._doubt_changes()
        if self._adapters.changed:
            self._record.unknown = self._record.unknown or "adapter"
        if self._record.columns == 0 and call.ids is not None and len(call.ids) != len(self._record.pads):
            self._restart(torch.empty(len(call.ids), 0, dtype=torch.long), (0,) * len(call.ids))
        self._call, self._began = call, time.perf_counter()

    def after_forward(self) -> None:
        """The model has computed; see `watch`."""
        call, self._call = self._call, None
        if call is None:
            return
        self._record.add(call)
        if not self._record.unknown and self.get_seq_length() != self._record.columns:
            self._record.unknown = "changed"
        self._look()
        if call.ids is not None:
            self._report(call.ids)
        self._offer()

    def crop(self, tokens_to_remove: int) -> None:
        intact = self._intact()
        super().crop(tokens_to_remove)
        if intact and not self._record.unknown:
            self._record.cut(self.get_seq_length())
            self._blocks.cut(self._record.lengths)
            self._look()

    def reset(self) -> None:
        """Hold nothing. What is being saved stays as it is."""
        self.layers = DynamicCache(config=self._model.config).layers
        self._restart(torch.empty(1, 0, dtype=torch.long), (0,))

    def __deepcopy__(self, memo: dict[int, Any]) -> KVTierCache:
        made = KVTierCache(self._model, self.space, wait=self._wait, save=self._save)
        made.layers = copy.deepcopy(self.layers, memo)
        known = self._record.known() if self._intact() else None
        if known is not None:
            made._restart(known.clone(), self._record.pads)
            made._blocks = self._blocks.copy()
        return made

    def _check(self, ids: torch.Tensor, rest: int) -> None:
        """Refuse a turn's first call when it is not the one that was prepared: its answer would be wrong."""
        rows = len(self._record.pads)
        if len(ids) != rows:
            raise UsageError(
                f"the turn has {rows} prompts, and {len(ids)} are computed: leave out num_beams and "
                "num_return_sequences"
            )
        if ids.shape[1] > rest:
            raise UsageError(
                f"{ids.shape[1]} tokens are to be computed, and of the turn's prompt {rest} are missing: pass "
                "generate() what turn() returned (not with assisted decoding: it computes prompts from the beginning)"
            )

    def _restart(self, ids: torch.Tensor, pads: tuple[int, ...]) -> None:
        self._record, self._blocks = Record(ids, pads), Blocks(self.space, len(pads))
        self._look()

    def _doubt_changes(self) -> None:
        if not self._intact():
            self._record.unknown = self._record.unknown or "changed"

    def _look(self) -> None:
        """Remember what the cache holds now."""
        self._seen = [(ref(part), _changes(part)) for part in self._parts()]

    def _intact(self) -> bool:
        """Whether it holds what it held when it was looked at."""
        now = self._parts()
        return len(now) == len(self._seen) and all(
            seen() is part and changes == _changes(part) for part, (seen, changes) in zip(now, self._seen, strict=True)
        )

    def _parts(self) -> list[torch.Tensor]:
        """K and V of each layer that has some."""
        layers: list[Any] = self.layers
        filled = [layer for layer in layers if getattr(layer, "is_initialized", False)]
        return [part for layer in filled for part in (layer.keys, layer.values)]

    def _offer(self, *, all_of_them: bool = False) -> None:
        """Save what is whole by now and was not saved."""
        record, blocks = self._record, self._blocks
        due = blocks.due(record.lengths, all_of_them=all_of_them) if self._save and not record.unknown else []
        ids = record.ids() if due else None
        if record.unknown and self._save:
            blocks.stop(f"unknown_{record.unknown}")
        elif ids is not None:
            if len(ids) > 1:
                blocks.end(self._stops.lengths(ids, record.pads))
                due = blocks.due(record.lengths, all_of_them=all_of_them)
            try:
                for row, first, end in due:
                    pad = record.pads[row]
                    chain = self.space.chain(ids[row, pad : pad + end])
                    blocks.add(Job(row, chain, rows_of(self.layers, row, pad + first, pad + end), first))
            except (KVTierError, RuntimeError):  # no token ids, or no memory for a copy
                blocks.stop("kv_mismatch")

    def _keep(self, prompts: Prompts) -> int:
        """Keep what a conversation has in common with its next prompt; how many tokens."""
        held = self._record.known() if self._intact() else None
        if held is None or len(held) != 1 or prompts.pads != (0,) or any(self._record.pads):
            common = 0
        else:
            length = min(held.shape[1], prompts.columns - 1)
            other = (held[0, :length] != prompts.ids[0, :length]).nonzero()
            common = int(other[0]) if len(other) else length
        if common == 0:
            self.reset()
            self._restart(prompts.ids[:, :0], prompts.pads)
        elif common < self._record.columns:
            self.crop(common - self._record.columns)
        self._blocks.again()
        return common

    def _report(self, ids: torch.Tensor) -> None:
        """Tell the space how fast the model computes; its next step needs the result, so that may as well be there."""
        if ids.shape[1] >= self.space.block_tokens:
            if ids.is_cuda:
                torch.cuda.synchronize(ids.device)
            self.space.computed(ids.numel(), time.perf_counter() - self._began)


def _changes(part: torch.Tensor) -> int:
    """How often a tensor was written to, where torch counts it."""
    return 0 if part.is_inference() else int(part._version)  # noqa: SLF001 - torch has no other name for it
