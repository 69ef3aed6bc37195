"""Every text, every plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.quality.interval import Mean, mean
from benchmarks.quality.loss import Loss, loss
from benchmarks.quality.passage import read
from benchmarks.quality.stored import stored
from benchmarks.quality.texts import Text
from benchmarks.quality.unusable import Unusable
from kvtier.codecs.plan import parse_plan
from kvtier.connectors.transformers import spec_for


@dataclass(frozen=True)
class Result:
    """One plan, over all texts.

    Attributes:
        name: what it was asked for by: the name of a plan, or its text.
        plan: its canonical text.
        bits: bits a value, all overhead included.
        losses: by text.
        kinds: of the texts.
    """

    name: str
    plan: str
    bits: float
    losses: tuple[Loss, ...]
    kinds: tuple[str, ...]

    def mean(self, metric: str, kind: str | None = None) -> Mean:
        """One metric over all texts, or over those of one kind."""
        of = zip(self.losses, self.kinds, strict=True)
        return mean([getattr(one, metric) for one, its in of if kind in (None, its)])


def measure(
    model: Any,
    tokenizer: Any,
    plans: Sequence[str],
    texts: Sequence[Text],
    *,
    context: int,
    tokens: int,
    say: Callable[[str], None],
) -> list[Result]:
    """Read each text once and again over what every plan gives back.

    Raises:
        Unusable: a text is too short, the context is not of whole blocks, or a plan cannot represent the KV.
    """
    spec = replace(spec_for(model), dtype="bfloat16")
    if context < 1 or context % spec.block_tokens:
        raise Unusable(f"--context {context} is not of whole blocks: pass a multiple of {spec.block_tokens}")
    losses: dict[str, list[Loss]] = {plan: [] for plan in plans}
    bits = dict.fromkeys(plans, 0.0)
    for number, text in enumerate(texts, 1):
        say(f"text {number} of {len(texts)}: {text.name}, {text.kind}")
        passage = read(model, tokenizer, text, context, tokens)
        for plan in plans:
            try:
                given, bits[plan] = stored(passage.kv, spec, plan)
            except ValueError as exc:
                raise Unusable(f"{text.name}: {exc}; leave that plan out") from exc
            losses[plan].append(loss(model, passage, given))
    kinds = tuple(text.kind for text in texts)
    return [Result(plan, str(parse_plan(plan)), bits[plan], tuple(losses[plan]), kinds) for plan in plans]
