"""One answer of the model."""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache

from kvtier.client.save import Saved
from kvtier.client.space import Space
from kvtier.connectors.transformers import prefill

WAIT = 30.0
"""Seconds that a prompt may wait for blocks that come up from another tier; what it took is in the measured time."""


@dataclass(frozen=True)
class Begun:
    """A prompt whose first token is known.

    Attributes:
        seconds: from the prompt's token ids to that token.
        logits: it was chosen from, `[vocabulary]`.
        cache: KV of the prompt.
        loaded: tokens that came from kvtier.
        computed: tokens that the model computed.
        tiers: loaded tokens by tier.
        saved: what became of the save.
    """

    seconds: float
    logits: torch.Tensor
    cache: Any
    loaded: int
    computed: int
    tiers: Mapping[str, int]
    saved: Future[Saved] | None

    @property
    def token(self) -> int:
        """The first token."""
        return int(self.logits.argmax())


@torch.no_grad()
def begin(model: Any, prompt: list[int], space: Space | None = None, *, save: bool = False) -> Begun:
    """Compute the first token of an answer, with kvtier or without."""
    began = time.perf_counter()
    if space is not None:
        done = prefill(model, prompt, space, wait=WAIT, save=save)
        int(done.logits.argmax())
        seconds = time.perf_counter() - began
        return Begun(seconds, done.logits, done.cache, done.loaded, done.computed, done.tiers, done.saved)
    cache: Any = DynamicCache(config=model.config)
    logits = model(input_ids=torch.tensor([prompt]), cache=cache, logits_to_keep=1).logits[0, -1]
    int(logits.argmax())
    return Begun(time.perf_counter() - began, logits, cache, 0, len(prompt), {}, None)


@torch.no_grad()
def go_on(model: Any, begun: Begun, tokens: int) -> tuple[list[int], torch.Tensor]:
    """The most probable token again and again, whatever it is; tokens and the logits `[tokens, vocabulary]`."""
    answer, logits = [begun.token], [begun.logits]
    while len(answer) < tokens:
        out = model(input_ids=torch.tensor([answer[-1:]]), cache=begun.cache)
        logits.append(out.logits[0, -1])
        answer.append(int(logits[-1].argmax()))
    return answer, torch.stack(logits)


@torch.no_grad()
def follow(model: Any, begun: Begun, answer: list[int]) -> torch.Tensor:
    """The logits `[tokens, vocabulary]` at each position of an answer that is given (teacher forcing)."""
    if len(answer) < 2:
        return begun.logits[None]
    out = model(input_ids=torch.tensor([answer[:-1]]), cache=begun.cache)
    return torch.cat([begun.logits[None], out.logits[0]])
