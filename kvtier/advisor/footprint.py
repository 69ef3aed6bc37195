"""How many bytes the KV of a sequence takes, under a plan, pruning and pages."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from kvtier.codecs.layout import layout
from kvtier.codecs.plan import ByAge, LayerPlan, parse_plan, resolve
from kvtier.errors import ConfigError
from kvtier.spec import KVSpec

if TYPE_CHECKING:
    from kvtier.pruning import Policy

Keep: TypeAlias = "float | Policy"
LONGEST = 1 << 40
"""Tokens; what fits beyond that fits at any length."""


def _check(keep: Keep) -> None:
    if (
        isinstance(keep, bool)
        or (isinstance(keep, int) and keep < 1)
        or (isinstance(keep, float) and not 0 < keep <= 1)
    ):
        raise ConfigError(f"keep is {keep!r}; write a share of the tokens above 0 and up to 1.0, or a number of them")
    if isinstance(keep, int | float):
        return
    if not keep.budget.mean(1 << 20):
        raise ConfigError(
            f"how much {keep.budget} keeps only a text says; pass the share that it kept of one, as in 0.4"
        )


@dataclass(frozen=True, slots=True)
class Storage:
    """How the KV of a sequence is held.

    Attributes:
        plan: precision plan, a name or text. Tokens are encoded by whole blocks; the rest stay as they are.
        keep: what pruning leaves: a share of the tokens (0.7), a number of them (1024), or a pruning policy; of every
            layer, or a tuple of one for each.
        recent: youngest tokens that are not encoded, a number (64) or a share of what stays (0.1). A plan
            `recent:N(...)` says so itself.
        page_tokens: tokens of a page, of which tokens that are not encoded take whole ones.
        every: tokens between two prunings. A policy says so itself.
    """

    plan: str = "raw"
    keep: Keep | tuple[Keep, ...] = 1.0
    recent: float = 0
    page_tokens: int = 16
    every: int = 100

    def __post_init__(self) -> None:
        for name in ("page_tokens", "every"):
            value = getattr(self, name)
            if not isinstance(value, int) or not 1 <= value <= LONGEST:
                raise ConfigError(f"Storage.{name} is {value!r}; it is a number of tokens, 1 to {LONGEST:,}")
        if not 0 <= self.recent <= (LONGEST if isinstance(self.recent, int) else 1):
            raise ConfigError(f"Storage.recent is {self.recent!r}; write a number of tokens, or a share from 0 to 1.0")
        for keep in self.keep if isinstance(self.keep, tuple) else (self.keep,):
            _check(keep)


NATIVE = Storage()
"""Every token as it is, in pages of 16."""


class Footprint:
    """Bytes of the KV of one model's sequences; all of a length in tokens.

    A layer holds the tokens that pruning left. All but the youngest `recent` of them are encoded, `block_tokens` at a
    time; those and what makes no whole block stay as they are, in pages. Blocks have the codec's exact bytes, without
    headers. A layer whose plan is raw has no blocks, and all tokens in pages.

    Attributes:
        spec: of the model.
        storage: how its KV is held.
        plans: what each layer is stored as.
        recent: youngest tokens that are not encoded, or their share.
    """

    def __init__(self, spec: KVSpec, storage: Storage = NATIVE) -> None:
        """See `Storage`; the spec's `block_tokens` are those that are encoded together.

        Raises:
            ConfigError: no such plan for this spec; another number of layers; a policy whose budget only scores say.
        """
        self.spec, self.storage = spec, storage
        plan = parse_plan(storage.plan)
        plans = self.plans = resolve(plan.old if isinstance(plan, ByAge) else plan, spec)
        self.recent = plan.recent if isinstance(plan, ByAge) else storage.recent
        keeps = storage.keep if isinstance(storage.keep, tuple) else (storage.keep,) * spec.layers
        if len(keeps) != spec.layers:
            raise ConfigError(f"keep= says what {len(keeps)} layers keep; the model has {spec.layers}")
        first, later = (layout(plans, spec, first=place).layers for place in (True, False))
        kept = {(type(keep), keep): _kept(keep) for keep in keeps}
        self._layers = [
            _Layer(
                kept=kept[type(keep), keep],
                whole=_whole(keep),
                every=getattr(keep, "every", storage.every),
                encoded=_encoded(one),
                first=int(first[number + 1] - first[number]),
                later=int(later[number + 1] - later[number]),
                token=spec.token_nbytes // spec.layers,
                block=spec.block_tokens,
                recent=self.recent,
                page=storage.page_tokens,
            )
            for number, (one, keep) in enumerate(zip(plans, keeps, strict=True))
        ]
        self._counts = Counter(self._layers)

    def kept(self, context: int) -> tuple[int, ...]:
        """Tokens that each KV head of each layer holds after pruning; of PyramidKV's the mean over layers."""
        return tuple(layer.kept(context) for layer in self._layers)

    def layers(self, context: int) -> tuple[int, ...]:
        """Bytes of each layer after pruning."""
        return tuple(layer.held(layer.kept(context)) for layer in self._layers)

    def held(self, context: int) -> int:
        """Bytes of one sequence of this length after pruning."""
        return sum(self.layers(context))

    def most(self, context: int) -> int:
        """The most bytes that one sequence holds while it grows to this length; what memory must have for it.

        That is more than `held` by tokens that wait to be pruned or to make a block. Not in it: what a prompt takes
        whose KV is whole until it is computed, which is `held` of `NATIVE`, of one sequence at a time.
        """
        return sum(count * layer.most(context) for layer, count in self._counts.items())

    def waste(self, context: int) -> int:
        """Bytes of `held` in pages that no token has."""
        return sum(layer.waste(layer.kept(context)) for layer in self._layers)

    def bits(self, context: int) -> float:
        """Bits of an element that is kept, everything counted."""
        elements = sum(self.kept(context)) * self.spec.kv_heads * sum(self.spec.head_dims)
        return 8 * self.held(context) / elements

    def share(self, context: int) -> float:
        """Bytes held of those of the whole KV as it is, without pages."""
        return self.held(context) / (self.spec.token_nbytes * context)

    def longest(self, memory: int, sequences: int = 1) -> int | None:
        """The greatest length that so many sequences can have in this memory, in tokens; None when any fits."""

        def fits(context: int) -> bool:
            return sequences * self.most(context) <= memory

        if fits(LONGEST):
            return None
        return _last(fits, LONGEST)

    def sequences(self, memory: int, context: int) -> int:
        """How many sequences of this length fit in this memory."""
        return memory // self.most(context)


@dataclass(frozen=True, slots=True)
class _Layer:
    """One layer; `n` is how many tokens it holds.

    Attributes:
        kept: n after pruning, from the sequence's length.
        whole: sequences of up to so many tokens are not pruned.
        every: tokens between two prunings.
        encoded: there are blocks.
        first, later: bytes of a sequence's first block, and of every other one.
        token: bytes of one as it is.
        block, page: tokens.
        recent: tokens, or a share of n.
    """

    kept: Callable[[int], int]
    whole: int
    every: int
    encoded: bool
    first: int
    later: int
    token: int
    block: int
    recent: float
    page: int

    def blocks(self, n: int) -> int:
        young = self.recent if isinstance(self.recent, int) else math.ceil(self.recent * n)
        return max(0, n - young) // self.block if self.encoded else 0

    def held(self, n: int) -> int:
        blocks = self.blocks(n)
        pages = -(-(n - blocks * self.block) // self.page)
        return (self.first + (blocks - 1) * self.later if blocks else 0) + pages * self.page * self.token

    def waste(self, n: int) -> int:
        return -(n - self.blocks(n) * self.block) % self.page * self.token

    def most(self, context: int) -> int:
        n = max(self.kept(context), min(context, self.whole))
        n = min(context, n + self.every - 1)
        blocks = self.blocks(n)
        if not blocks:
            return self.held(n)
        # The last block was all as it is just before it was whole.
        if isinstance(self.recent, int):
            return max(self.held(n), self.held(self.recent + blocks * self.block - 1))
        return max(self.held(n), self.held(_last(lambda fewer: self.blocks(fewer) < blocks, n)))


def keep_of(text: str) -> float:
    """Read what pruning leaves: "0.7" or "70%" of the tokens, or "1024" of them.

    Raises:
        ConfigError: it is neither.
    """
    try:
        share = float(text[:-1]) / 100 if text.endswith("%") else float(text)
    except ValueError as exc:
        raise ConfigError(f"{text!r} is no share and no number of tokens; write 0.7, 70% or 1024") from exc
    keep = int(share) if share > 1 and share.is_integer() and not text.endswith("%") else share
    _check(keep)
    return keep


def storage_of(plan: str, keep: str, page_tokens: int) -> tuple[str, Storage] | None:
    """What is asked for by a plan's name or text and by `keep_of`, either empty, with a name; None when both are."""
    if not plan and not keep:
        return None
    name = ", keep ".join(filter(None, (plan or "raw", keep)))
    return name, Storage(plan or NATIVE.plan, keep_of(keep) if keep else 1.0, page_tokens=page_tokens)


def _last(fits: Callable[[int], bool], beyond: int) -> int:
    """The last number from 0 that fits, all below it fitting too; `beyond` does not."""
    low = 0
    while beyond - low > 1:
        middle = (low + beyond) // 2
        low, beyond = (middle, beyond) if fits(middle) else (low, middle)
    return low


def _encoded(plan: LayerPlan) -> bool:
    return any(scheme.precision != "raw" for scheme in plan.schemes)


def _kept(keep: Keep) -> Callable[[int], int]:
    if isinstance(keep, int):
        return lambda context: min(keep, context)
    if isinstance(keep, float):
        return lambda context: min(context, max(1, round(keep * context)))

    def by_policy(context: int) -> int:
        if context <= keep.whole:
            return context
        return min(context, max(keep.budget.mean(context), keep.sinks + keep.youngest(context)))

    return by_policy


def _whole(keep: Keep) -> int:
    return 0 if isinstance(keep, int | float) else keep.whole
