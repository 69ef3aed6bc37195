"""What plans and pruning were measured to cost: a table that a benchmark writes and the recommender reads.

    {"format": 1, "model": ..., "date": "2026-11-30", "context": 1024, "tokens": 256,
     "texts": [{"name": ..., "kind": ...}],
     "strategies": [{"name": ..., "plan": ..., "canonical": ..., "policy": ..., "preset": ..., "keep": 0.5,
                     "bits": 4.5, "share": 0.14, "kl": [mean, half], "dnll": [mean, half], "top1": [mean, half]}],
     "speed": [{"plan": ..., "encode": 0.6, "decode": 1.9, "block_nbytes": ..., "what": ...}]}

`python -m benchmarks.quality --save FILE` writes it for any model that transformers loads.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from kvtier.advisor.footprint import Storage
from kvtier.codecs.plan import parse_plan
from kvtier.errors import ConfigError

FORMAT = 1
DEFAULT = Path(__file__).parent / "measured" / "smollm2-135m.json"
"""Of SmolLM2-135M-Instruct."""
NOISE = 0.001
"""Nats a token that rounding may take a divergence below 0."""
AGAIN = "write one with: python -m benchmarks.quality --save FILE"

Share = Annotated[float, Meta(gt=0, le=1)]
Positive = Annotated[float, Meta(gt=0)]
Count = Annotated[int, Meta(gt=0)]
Interval = tuple[float, float | None]
"""A mean, and half the width of its 95 % interval; None when there was one text."""


class Text(msgspec.Struct, frozen=True):
    """That was read.

    Attributes:
        name: of the text.
        kind: prose, code and so on.
    """

    name: str
    kind: str


class Speed(msgspec.Struct, frozen=True):
    """Of a plan's codec, as multiples of the speed of copying the block as it is: more is faster.

    Attributes:
        plan: its name or text.
        encode, decode: each way.
        block_nbytes: of the encoded block.
        what: what it was compared with, and on what.
    """

    plan: str
    encode: Positive
    decode: Positive
    block_nbytes: Count
    what: str


class Strategy(msgspec.Struct, frozen=True):
    """Which tokens stay, how they are stored, and what that costs.

    Attributes:
        name: for people.
        plan: precision plan, a name or text.
        canonical: the plan's text for the measured model.
        policy: text of the pruning policy; None when all tokens stay.
        preset: what makes that policy.
        keep: share of the tokens that stayed, the mean over layers.
        bits: of an element that stayed, everything counted.
        share: bytes held, of those of the whole KV in 16 bits.
        kl: divergence of the predictions from those over the whole KV, nats a token.
        dnll: how much less the text's own next token is expected, nats a token.
        top1: how often the most probable token is the same, 0 to 1.
        keep_layers: share that stayed of each layer of the measured model; when not given, `keep` of each.
    """

    name: str
    plan: str
    canonical: str
    policy: str | None
    preset: str | None
    keep: Share
    bits: Positive
    share: Positive
    kl: Interval
    dnll: Interval
    top1: Interval
    keep_layers: list[Share] | None = None

    @property
    def loss(self) -> float:
        """KL at the upper end of its interval: what it is compared by, never below 0."""
        mean, half = self.kl
        return max(0.0, mean + (half or 0.0))

    def storage(self, layers: int, page_tokens: int = 16) -> Storage:
        """As a model of so many layers would hold it: each keeps what the one as deep in the measured model kept."""
        if not self.keep_layers:
            return Storage(self.plan, float(self.keep), page_tokens=page_tokens)
        measured = self.keep_layers
        keeps = (float(measured[layer * len(measured) // layers]) for layer in range(layers))
        return Storage(self.plan, tuple(keeps), page_tokens=page_tokens)


class Measured(msgspec.Struct, frozen=True):
    """All that was measured of one model.

    Attributes:
        format: of this table.
        model: its name.
        date: of the measurement.
        context: tokens that were stored.
        tokens: that were predicted after them.
        texts: that were read.
        strategies: what each costs.
        speed: of the plans' codecs.
    """

    format: int
    model: str
    date: str
    context: Count
    tokens: Count
    texts: Annotated[list[Text], Meta(min_length=1)]
    strategies: list[Strategy]
    speed: list[Speed]

    def speed_of(self, plan: str) -> Speed | None:
        """Of the codec of this plan; None when it was not measured."""
        return next((speed for speed in self.speed if speed.plan == plan), None)

    @property
    def source(self) -> str:
        """What was measured, on one line."""
        kinds = ", ".join(dict.fromkeys(text.kind for text in self.texts))
        texts = f"{len(self.texts)} text{'s' * (len(self.texts) != 1)} ({kinds})"
        return f"{self.model} over {texts}, {self.tokens} tokens after {self.context:,}, on {self.date}"


def read_measured(path: Path | None = None) -> Measured:
    """Read the table of a measurement, kvtier's own unless another is given.

    Raises:
        ConfigError: the file cannot be read or is none; what is wrong with it, and where.
    """
    path = path or DEFAULT
    try:
        raw = path.read_bytes()
    except OSError as exc:
        raise ConfigError(f"{path} cannot be read ({exc.strerror}); {AGAIN}") from exc
    try:
        measured = msgspec.json.decode(raw, type=Measured)
    except msgspec.DecodeError as exc:
        raise ConfigError(f"{path} is no table of measured strategies: {exc}; {AGAIN}") from exc
    problem = _problem(measured)
    if problem:
        raise ConfigError(f"{path}: {problem}; {AGAIN}")
    return measured


def _problem(measured: Measured) -> str | None:
    if measured.format != FORMAT:
        return f"its format is {measured.format}, and this version reads {FORMAT}"
    if not measured.strategies:
        return "there are no strategies in it"
    names: set[str] = set()
    for strategy in measured.strategies:
        if strategy.name in names:
            return f"there are two strategies {strategy.name!r}"
        names.add(strategy.name)
        wrong = _wrong(strategy)
        if wrong:
            return f"strategy {strategy.name!r}: {wrong}"
    return None


def _wrong(strategy: Strategy) -> str | None:
    for metric in ("kl", "dnll", "top1"):
        mean, half = getattr(strategy, metric)
        if not math.isfinite(mean) or not math.isfinite(half or 0.0) or (half or 0.0) < 0:
            return f"{metric} is {mean}, {half}; it is a mean and half of its interval"
    if strategy.kl[0] < -NOISE:
        return f"kl is {strategy.kl[0]}; a divergence is not below 0"
    if not 0 <= strategy.top1[0] <= 1:
        return f"top1 is {strategy.top1[0]}; it is a share, from 0 to 1"
    try:
        parse_plan(strategy.plan)
    except ConfigError as exc:
        return str(exc)
    return None
