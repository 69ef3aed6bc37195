"""What the model loses when it reads KV that was stored or pruned."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from benchmarks.quality.passage import Passage, expected, go_on
from benchmarks.quality.pruned import Left
from benchmarks.quality.stored import KV


@dataclass(frozen=True)
class Loss:
    """Means over the scored tokens of one text.

    Attributes:
        kl: divergence of the predictions from those over the exact KV, nats a token.
        dnll: how much less the text's own next token is expected, nats a token; either sign.
        top1: how often the most probable token is the same.
    """

    kl: float
    dnll: float
    top1: float


def loss(model: Any, passage: Passage, kv: KV, left: Left | None = None) -> Loss:
    """Read on from this KV in place of the exact one; `left` says which tokens it holds, when not all."""
    exact, lossy = passage.exact, go_on(model, passage.ids, kv, left)
    truth = passage.ids[1:, None]
    return Loss(
        kl=float((passage.certainty - expected(passage.probabilities, lossy)).mean()),
        dnll=float((exact - lossy).gather(-1, truth).mean()),
        top1=float((exact.argmax(-1) == lossy.argmax(-1)).double().mean()),
    )
