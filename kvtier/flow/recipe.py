"""What becomes of a sequence's KV: which layers lose precision, which lose tokens, and what is too young for either.

    recipe := NAME | what | what;recent:N|SHARE;every:N
    what   := plan | policy | plan*policy | layers(RANGE:plan*policy;RANGE:plan...)

`plan` is one of `kvtier.codecs.plan`, `policy` one of `kvtier.pruning.text`, RANGE as in plans:

    layers(0-40/128:int4*snap_kv(0.6);40/128-88/128:int8*snap_kv(0.8);88/128-1:raw);recent:64

Exact first tokens are those of the plan. `recent`: youngest tokens of a head that stay in 16 bits, a number or a share
of what it holds. `every`: prune when so many tokens came.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import groupby
from typing import Any

from kvtier.codecs.plan import ByAge, ByLayer, LayerPlan, Plan, Sinks, Uniform, canonical, parse_plan, resolve
from kvtier.codecs.ranges import bounds, range_text, ranged, split
from kvtier.errors import ConfigError
from kvtier.pruning.policy import Policy
from kvtier.pruning.text import is_policy, parse_policy
from kvtier.spec import KVSpec

RECENT, EVERY = 64, 100
NAMED = {
    "default": "int4;recent:128",
    "mixed": "int4;recent:128",
    "split": "layers(0-40/128:int4*snap_kv(0.6);40/128-88/128:int8*snap_kv(0.8);88/128-1:raw)",
}
"""Recipes for people; `docs/flow.md` has what each saves and costs."""
ALL = Fraction(0), Fraction(1)


@dataclass(frozen=True, slots=True)
class Stage:
    """Some layers: the first, the one after the last (numbers, or fractions of all), their plan, and what stays."""

    first: int | Fraction
    stop: int | Fraction
    plan: Plan
    policy: Policy | None = None

    def __str__(self) -> str:
        return str(self.plan) if self.policy is None else f"{self.plan}*{self.policy}"


@dataclass(frozen=True, slots=True)
class LayerRecipe:
    """One layer: how what has aged is stored, and which tokens stay; None for all."""

    plan: LayerPlan
    policy: Policy | None

    @property
    def exact(self) -> bool:
        """Nothing loses precision beyond 16 bits."""
        return all(scheme.precision == "raw" for scheme in self.plan.schemes)


@dataclass(frozen=True, slots=True)
class Recipe:
    """What becomes of a sequence's KV; `str()` of it is its text.

    Attributes:
        stages: which layers are stored how; each layer is in one.
        recent: youngest tokens of a head that stay in 16 bits: a number, or a share of what it holds.
        every: prune when so many tokens came; it counts in place of the policies' own.

    Raises:
        ConfigError: what is no number or no share; a policy that closes up positions.
    """

    stages: tuple[Stage, ...]
    recent: int | float = RECENT
    every: int = EVERY

    def __post_init__(self) -> None:
        if not _whole(self.every) or self.every < 1:
            raise ConfigError(f"every is {self.every!r}; it is a number of tokens, 1 or more")
        if not (_share(self.recent) or (_whole(self.recent) and self.recent >= 0)):
            raise ConfigError(f"recent is {self.recent!r}; it is a number of tokens, as 64, or a share of them, as 0.1")
        for stage in self.stages:
            if stage.policy is not None and stage.policy.compact:
                raise ConfigError(
                    f"{stage.policy} closes positions up: keys that were quantised would be turned and quantised anew; "
                    "use compact=False"
                )
            if isinstance(stage.plan, ByAge):
                raise ConfigError(f"{stage.plan}: a recipe says itself what is recent; write {stage.plan.old};recent:N")
        timed = tuple(
            replace(stage, policy=stage.policy and replace(stage.policy, every=self.every)) for stage in self.stages
        )
        object.__setattr__(self, "stages", timed)

    def __str__(self) -> str:
        alone = len(self.stages) == 1 and (self.stages[0].first, self.stages[0].stop) == ALL
        ranges = (f"{range_text(stage.first, stage.stop)}:{stage}" for stage in self.stages)
        what = str(self.stages[0]) if alone else f"layers({';'.join(ranges)})"
        return f"{what};recent:{self.recent!r};every:{self.every}"

    def resolve(self, spec: KVSpec) -> tuple[LayerRecipe, ...]:
        """Say for each layer of a model what becomes of it.

        Raises:
            ConfigError: a layer in no stage or in two.
        """
        plans = resolve(ByLayer(tuple((stage.first, stage.stop, stage.plan) for stage in self.stages)), spec)
        policies: list[Policy | None] = [None] * spec.layers
        for stage in self.stages:
            low, high = bounds(stage.first, stage.stop, spec.layers)
            policies[low:high] = [stage.policy] * (high - low)
        return tuple(LayerRecipe(plan, policy) for plan, policy in zip(plans, policies, strict=True))

    def canonical(self, spec: KVSpec) -> Recipe:
        """The one recipe of what becomes of this model's KV, whatever it was asked by: ranges are layers."""
        runs = [(layer, (canonical((each.plan,)), each.policy)) for layer, each in enumerate(self.resolve(spec))]
        stages = []
        for (plan, policy), run in groupby(runs, lambda each: each[1]):
            layers = [layer for layer, _ in run]
            stages.append(Stage(layers[0], layers[-1] + 1, parse_plan(plan), policy))
        return replace(self, stages=tuple(stages))

    def text(self, spec: KVSpec, context: bytes) -> str:
        """Text for `Keyspace.recipe` of KV that became of a context.

        Args:
            spec: of the model.
            context: SHA-256 of all its tokens, and of where turns ended if there were several: what stays, and what is
                recent, depends on all of them.

        Raises:
            ConfigError: the digest is too short.
        """
        if len(context) < 32:
            raise ConfigError(f"the context's digest has {len(context)} bytes; give the 32 of a SHA-256")
        return f"flow/1({self.canonical(spec)})@{context.hex()}"


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _share(value: Any) -> bool:
    return isinstance(value, float) and 0 <= value <= 1


def parse_recipe(text: str) -> Recipe:
    """Read a recipe: see the module.

    Raises:
        ConfigError: what is wrong with the text, and what to write.
    """
    if not isinstance(text, str):
        raise ConfigError(f"the recipe is a {type(text).__name__}; pass its name or text, such as 'int4*snap_kv(0.7)'")
    name, *options = split(text.strip())
    what, *usual = split(NAMED.get(name.strip(), name.strip()))
    known = _options(usual, text) | _options(options, text)
    return Recipe(_stages(what), known.get("recent", RECENT), _every(known, text))


def _options(options: list[str], text: str) -> dict[str, float]:
    known: dict[str, float] = {}
    for option in options:
        name, value = _option(option, text)
        if name in known:
            raise ConfigError(f"{text!r} says {name} twice")
        known[name] = value
    return known


def _every(known: dict[str, float], text: str) -> int:
    every = known.get("every", EVERY)
    if not isinstance(every, int):
        raise ConfigError(f"{text!r}: every is a number of tokens, as every:100")
    return every


def _option(option: str, text: str) -> tuple[str, float]:
    found = re.fullmatch(r"\s*(recent|every)\s*:\s*(\d{1,9}|\d*\.\d+(?:e-\d+)?|\d+e-\d+)\s*", option)
    if not found:
        raise ConfigError(f"{text!r}: {option!r} is no option; write ;recent:64 or ;recent:0.1, and ;every:100")
    name, number = found.groups()
    return name, int(number) if number.isdigit() else float(number)


def _stages(what: str) -> tuple[Stage, ...]:
    plan, policy = _parts(what)
    if policy is None and plan.startswith("layers(") and plan.endswith(")"):
        ranges = [ranged(part, what) for part in split(plan[len("layers(") : -1])]
        return tuple(_stage(first, stop, *_parts(inner), what) for first, stop, inner in ranges)
    parsed, stays = parse_plan(plan), None if policy is None else parse_policy(policy)
    if isinstance(parsed, ByLayer):
        return tuple(Stage(first, stop, inner, stays) for first, stop, inner in parsed.ranges)
    return (Stage(*ALL, parsed, stays),)


def _stage(first: int | Fraction, stop: int | Fraction, plan: str, policy: str | None, what: str) -> Stage:
    parsed = parse_plan(plan)
    if not isinstance(parsed, Uniform | Sinks) or (isinstance(parsed, Sinks) and not isinstance(parsed.plan, Uniform)):
        raise ConfigError(f"{what!r}: {plan} differs by layer or age itself; give a range a plan such as int4")
    return Stage(first, stop, parsed, None if policy is None else parse_policy(policy))


def _parts(text: str) -> tuple[str, str | None]:
    """Plan and policy, at the first star that is in no bracket."""
    depth = 0
    for at, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if letter == "*" and not depth:
            return text[:at].strip(), text[at + 1 :]
    return ("raw", text) if is_policy(text) else (text.strip(), None)
