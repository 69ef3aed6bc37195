"""Which plan and which pruning for so much context in so much memory.

A strategy is recommended when

    batch x (the most bytes that one sequence of max_len tokens holds) <= memory
    KL, mean + half of its 95 % interval                              <= the bound of the accuracy

and no other one of these loses no more and takes no more bytes. They are ranked by that KL, to two significant digits;
of equals the one with fewer bytes, then the faster decode, comes first. Strategies that may lose more than was measured
(`Candidate.cautions`) come last, and rule out no others. Bytes are exact for the model that is asked
about; KL is that of the model that was measured. With more memory, or a looser bound, none that was recommended leaves.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Sequence
from dataclasses import dataclass

from kvtier.advisor.footprint import LONGEST, Footprint, Storage
from kvtier.advisor.models import spec_of
from kvtier.advisor.report import nbytes
from kvtier.advisor.strategies import Measured, Strategy, read_measured
from kvtier.errors import ConfigError
from kvtier.spec import KVSpec

ACCURACY = {"exact": 0.0, "high": 0.001, "good": 0.01, "low": 0.1}
"""Nats a token that the predictions may move. `docs/advisor.md` has how often the most probable token then stays the
same."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A strategy, for what was asked.

    Attributes:
        strategy: as it was measured.
        nbytes: the most that all sequences hold.
        held: that they hold at the end.
        prompt: that they hold while the last one's prompt of this length is computed, whose KV is whole until then.
        share: that is of the whole KV as it is.
        longest: tokens that so many sequences could have in the memory; None when any number fits, or none was given.
        decode: speed, as `Speed` has it; None when it was not measured.
        cautions: why it may lose more than was measured.
    """

    strategy: Strategy
    nbytes: int
    held: int
    prompt: int
    share: float
    longest: int | None
    decode: float | None
    cautions: tuple[str, ...]

    @property
    def loss(self) -> float:
        """What it is compared by."""
        return self.strategy.loss

    @property
    def rank(self) -> tuple[bool, float, int, float]:
        """The smaller, the better."""
        return bool(self.cautions), float(f"{self.loss:.1e}"), self.nbytes, -(self.decode or 0.0)

    @property
    def cost(self) -> tuple[float, int, bool]:
        """What it loses, what it takes, and whether it may lose more."""
        return self.loss, self.nbytes, bool(self.cautions)

    def beats(self, other: Candidate) -> bool:
        """It costs no more in anything, and less in something."""
        return self.cost != other.cost and all(mine <= its for mine, its in zip(self.cost, other.cost, strict=True))


@dataclass(frozen=True, slots=True)
class Verdict:
    """A candidate, and why it is where it is.

    Attributes:
        candidate: of which this is said.
        why: "best", "choice", "memory", "loss" or "dominated".
        reason: in words.
    """

    candidate: Candidate
    why: str
    reason: str


@dataclass(frozen=True, slots=True)
class Advice:
    """What is recommended, and what is not.

    Attributes:
        max_len, batch, memory, bound: what was asked; memory is None when there is no limit.
        ranked: the best first.
        ruled_out: all others, as the table has them.
        nearest: when nothing is recommended, what to change.
    """

    max_len: int
    batch: int
    memory: int | None
    bound: float
    ranked: tuple[Verdict, ...]
    ruled_out: tuple[Verdict, ...]
    nearest: tuple[str, ...]


def recommend(
    max_len: int,
    memory: int | None,
    accuracy: str | float = "good",
    *,
    model: str | KVSpec = "llama-3.1-8b",
    batch: int = 1,
    page_tokens: int = 16,
    measured: Measured | None = None,
) -> Advice:
    """Rank the measured strategies that fit and are accurate enough; see the module.

    Args:
        max_len: tokens that each sequence may have, prompt and answer.
        memory: bytes for KV; None for no limit.
        accuracy: a word of `ACCURACY`, or the greatest KL in nats a token.
        model: whose KV it is, as for `spec_of`, or its spec.
        batch: sequences at a time.
        page_tokens: tokens of a page.
        measured: what is known; kvtier's own measurement unless given.

    Raises:
        ConfigError: an argument out of range, or no such model or word.
    """
    for name, value in {"max_len": max_len, "batch": batch, "memory": 1 if memory is None else memory}.items():
        if value < 1:
            raise ConfigError(f"{name} is {value}; it must be 1 or more")
    for name, value in {"max_len": max_len, "batch": batch}.items():
        if value > LONGEST:
            raise ConfigError(f"{name} is {value}; it must be {LONGEST:,} or less")
    spec = spec_of(model, 64) if isinstance(model, str) else model
    measured, bound = measured or read_measured(), bound_of(accuracy)
    whole = Footprint(spec, Storage(page_tokens=page_tokens)).held(max_len)

    def candidate(strategy: Strategy) -> Candidate:
        try:
            footprint = Footprint(spec, strategy.storage(spec.layers, page_tokens))
        except ConfigError as exc:
            raise ConfigError(f"strategy {strategy.name!r} does not suit this model: {exc}") from exc
        speed = measured.speed_of(strategy.plan)
        most = footprint.most(max_len)
        return Candidate(
            strategy,
            nbytes=batch * most,
            held=batch * footprint.held(max_len),
            prompt=(batch - 1) * most + max(most, whole),
            share=footprint.share(max_len),
            longest=None if memory is None else footprint.longest(memory, batch),
            decode=speed.decode if speed else None,
            cautions=_cautions(footprint, max_len, measured),
        )

    candidates = [candidate(strategy) for strategy in measured.strategies]
    limit = math.inf if memory is None else memory
    allowed = [one for one in candidates if one.nbytes <= limit and one.loss <= bound]
    front = sorted(_front(allowed), key=lambda one: one.rank)
    ruled_out = [_ruled_out(one, front, memory, bound) for one in candidates if one not in front]
    nearest = () if front else _nearest(candidates, limit, batch, bound)
    return Advice(max_len, batch, memory, bound, _ranked(front, limit), tuple(ruled_out), nearest)


def bound_of(accuracy: str | float) -> float:
    """Turn a word of `ACCURACY`, or a number, into the greatest KL in nats a token.

    Raises:
        ConfigError: neither a word nor a number from 0.
    """
    if accuracy in ACCURACY:
        return ACCURACY[str(accuracy)]
    try:
        bound = float(accuracy)
    except ValueError as exc:
        near = difflib.get_close_matches(str(accuracy), ACCURACY, 1, 0)[0]
        raise ConfigError(
            f"no accuracy {accuracy!r}; did you mean {near!r}? Write one of {', '.join(ACCURACY)}, or the greatest KL "
            "in nats a token, as in 0.005"
        ) from exc
    if not 0 <= bound < math.inf:
        raise ConfigError(f"accuracy is {accuracy}; the greatest KL is 0 or more, in nats a token")
    return bound


def _cautions(footprint: Footprint, max_len: int, measured: Measured) -> tuple[str, ...]:
    keys = {plan.schemes[0] for plan in footprint.plans}
    said = []
    if any(key.bits and key.granularity != "channel" for key in keys):
        said.append("K per token breaks some models, measure yours")
    if footprint.spec.mla and (any(key.bits for key in keys) or footprint.storage.keep != 1.0):
        said.append("measured on K and V of heads, not on a latent")
    recent = footprint.recent
    if recent and max_len > measured.context:
        said.append(f"measured with {recent:,} of {measured.context:,} tokens as they are")
    return tuple(said)


def _front(allowed: Sequence[Candidate]) -> list[Candidate]:
    """Those that no other one beats; of several that cost the same, the fastest."""
    fastest: dict[tuple[float, int, bool], Candidate] = {}
    for one in allowed:
        if one.cost not in fastest or one.rank < fastest[one.cost].rank:
            fastest[one.cost] = one
    return [one for one in fastest.values() if not any(other.beats(one) for other in allowed)]


def _ranked(front: Sequence[Candidate], memory: float) -> tuple[Verdict, ...]:
    verdicts = []
    sure = all(front[0].loss <= one.loss for one in front)
    for place, one in enumerate(front):
        best = "loses least of what fits" if sure else "loses least of what fits and needs no caution"
        why, what = ("choice", _compared(one, front[0])) if place else ("best", best)
        reason = f"{what}: KL up to {nats(one.loss)}"
        prompt = [f"{nbytes(one.prompt)} while a prompt that long is computed"] if one.prompt > memory else []
        verdicts.append(Verdict(one, why, "; ".join((reason, *prompt, *one.cautions))))
    return tuple(verdicts)


def _compared(one: Candidate, best: Candidate) -> str:
    memory = one.nbytes / best.nbytes - 1
    return f"{100 * abs(memory):.0f} % {'more' if memory > 0 else 'less'} memory than the first"


def _ruled_out(one: Candidate, front: Sequence[Candidate], memory: int | None, bound: float) -> Verdict:
    reasons = {}
    if memory is not None and one.nbytes > memory:
        reasons["memory"] = f"needs {nbytes(one.nbytes)}, and there is {nbytes(memory)}"
    if one.loss > bound:
        reasons["loss"] = f"KL up to {nats(one.loss)}, and {bound:g} is allowed"
    if not reasons:
        by = next(other for other in front if other.beats(one) or other.cost == one.cost)
        how = "costs the same, and is faster" if by.cost == one.cost else "loses no more and takes no more"
        reasons["dominated"] = f"{by.strategy.name} {how}"
    return Verdict(one, next(iter(reasons)), "; ".join(reasons.values()))


def _nearest(candidates: Sequence[Candidate], memory: float, batch: int, bound: float) -> tuple[str, ...]:
    said = []
    accurate = [one for one in candidates if one.loss <= bound]
    if accurate:
        one = min(accurate, key=lambda one: (one.nbytes, one.rank))
        sequences = int(memory * batch // one.nbytes)
        less = f", or at most {one.longest:,} tokens" if one.longest else ""
        less += f", or at most {sequences} sequence{'s' * (sequences > 1)}" if sequences else ""
        said.append(f"{one.strategy.name} is accurate enough and needs {nbytes(one.nbytes)}: give it that{less}")
    else:
        one = min(candidates, key=lambda one: one.rank)
        said.append(
            f"nothing that was measured loses so little; {one.strategy.name} loses least, KL up to {nats(one.loss)}"
        )
    fitting = [one for one in candidates if one.nbytes <= memory]
    if fitting:
        one = min(fitting, key=lambda one: one.rank)
        said.append(f"{one.strategy.name} fits, and its KL is up to {nats(one.loss)}: allow that as accuracy")
    else:
        one = min(candidates, key=lambda one: one.nbytes)
        said.append(f"nothing that was measured fits; the smallest, {one.strategy.name}, needs {nbytes(one.nbytes)}")
    return tuple(said)


def nats(kl: float) -> str:
    """A divergence in two digits or more, rounded up, so that whoever allows what is said allows it."""
    if kl < 0.001:
        return f"{math.ceil(round(kl * 1e5, 6)) / 1e5:.5f}"
    scale = 10 ** (1 - math.floor(math.log10(kl)))
    return f"{math.ceil(round(kl * scale, 6)) / scale:.2g}"
