"""What is measured: which tokens stay, and how these are stored.

strategy := PLAN | PRUNING | PRUNING + PLAN
PRUNING  := as in `presets` | PRUNING unrotated
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from benchmarks.quality.presets import policies
from kvtier.codecs.plan import NAMED, parse_plan
from kvtier.codecs.ranges import split
from kvtier.errors import ConfigError
from kvtier.flow.recipe import NAMED as NAMED_RECIPES

BUDGETS = (0.75, 0.5, 0.25, 0.125)
RATIOS = ("h2o", "mean_mass", "snap_kv", "ada_kv", "pyramid_kv", "key_norm")
THRESHOLDS = (0.0002, 0.0005, 0.001)
SPLIT = "split"
"""40:48:40: the bottom pruned hard, the middle less, the top whole; as `kvtier.flow` has it."""
COMBINED = (
    *(f"{plan}*snap_kv(keep={keep})" for keep in (0.75, 0.5, 0.25) for plan in ("int8", "int4", "int3")),
    *(f"{plan}*h2o(keep={keep})" for keep in (0.75, 0.5, 0.25) for plan in ("int4", "int3")),
    SPLIT,
)
RECIPES = (
    "int8/token/sym",
    "K=int8/channel:64/asym,V=int4/token/sym/hadamard/lloyd",
    "layers(0-1/2:int4;1/2-1:k8v4)",
    "sinks:1(K=int4/channel:64/asym,V=int4/token/sym/hadamard/lloyd)",
    "sinks:1(K=int4/channel:64/asym,V=int3/token/sym/hadamard/lloyd)",
    "sinks:1(K=int3/channel:64/asym,V=int3/token/sym/hadamard/lloyd)",
    "sinks:1(K=int3/channel:64/asym/clip,V=int2/token/sym/hadamard/lloyd)",
    "sinks:1(K=int2/channel:64/asym/clip,V=int2/token/sym/hadamard/lloyd)",
)
UNROTATED = " unrotated"
LAYERS = 128
"""Of a model that texts are tried on: fractions of a layer meet, as they may not in a smaller one."""
_PRUNES = re.compile(r"(?:layers\([^:]*:\s*)?(?:prune/1|(?!layers\b)\w+)\(")
PLANS, PRUNED, CONTROLS, COMBINATIONS, OWN = "plans", "pruning", "controls", "combinations", "recipes"


@dataclass(frozen=True)
class Strategy:
    """One way to hold less.

    Attributes:
        name: its text.
        group: in which table it stands.
        plan: the precision plan of what stays.
        pruning: which tokens stay; None for all.
        unrotated: positions are closed up and keys are not turned to them: a mistake, to be seen as one.
    """

    name: str
    group: str
    plan: str
    pruning: str | None = None
    unrotated: bool = False


def parse(text: str, group: str) -> Strategy:
    """Read a strategy: see the module.

    Raises:
        ConfigError: what is wrong with the text, and what to write.
    """
    unrotated = text.endswith(UNROTATED)
    plan, pruning = _parts(NAMED_RECIPES[SPLIT] if text == SPLIT else text.removesuffix(UNROTATED).strip())
    parse_plan(plan)
    if pruning is not None and any(its is not None and its.compact for its in policies(pruning, LAYERS)) and unrotated:
        raise ConfigError(f"{text!r}: compact=True turns the keys; leave it out, or 'unrotated'")
    return Strategy(text, group, plan, pruning, unrotated)


def _parts(text: str) -> tuple[str, str | None]:
    """A plan, and which tokens stay; None for all."""
    if text.startswith("layers(") and "*" in text:
        ranges = [part.partition(":") for part in split(text.removeprefix("layers(").removesuffix(")"))]
        both = [(where, *inner.partition("*")) for where, _, inner in ranges]
        plan = ";".join(f"{where}:{plan}" for where, plan, _, _ in both)
        pruning = ";".join(f"{where}:{pruning}" for where, _, star, pruning in both if star)
        return f"layers({plan})", f"layers({pruning})"
    if _PRUNES.match(text):
        return "raw", text
    plan, star, pruning = text.partition("*")
    return plan, pruning if star else None


def standard(context: int) -> list[Strategy]:
    """All that the tables have, for contexts of so many tokens."""
    texts = {
        PLANS: NAMED,
        OWN: RECIPES,
        PRUNED: [*_pruned(context), *(f"attention_threshold(weight={weight})" for weight in THRESHOLDS)],
        CONTROLS: _controls(context),
        COMBINATIONS: COMBINED,
    }
    return [parse(text, group) for group, those in texts.items() for text in those]


def _pruned(context: int) -> list[str]:
    shares = [f"{preset}(keep={keep})" for preset in RATIOS for keep in BUDGETS]
    return [*shares, *(f"streaming_llm(sinks=4, recent={_recent(context, keep)})" for keep in BUDGETS)]


def _controls(context: int) -> list[str]:
    made = []
    for keep in (0.5, 0.25):
        recent = _recent(context, keep)
        made += [
            f"h2o(keep={keep}, recent_share=0.0)",
            f"streaming_llm(sinks=0, recent={recent + 4})",
            f"streaming_llm(sinks=4, recent={recent}, compact=True)",
            f"streaming_llm(sinks=4, recent={recent}) unrotated",
        ]
    return made


def _recent(context: int, keep: float) -> int:
    return max(1, round(keep * context) - 4)
