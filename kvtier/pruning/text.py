"""Policies as text: what people write, and what `str` of a policy says.

policy    := PRESET | PRESET(ARGUMENT, ...) | canonical
ARGUMENT  := NUMBER | NAME=NUMBER, as the preset takes them: snap_kv(0.6), snap_kv(keep=0.6, window=16)
canonical := prune/1(SCORER*BUDGET,sinks:N,recent:N/SHARE,every:N,whole:N,positions:kept|compact)
"""

from __future__ import annotations

import ast
import difflib
import inspect
import re
from collections.abc import Callable

from kvtier.errors import ConfigError
from kvtier.pruning.budgets import Budget, ByHead, Length, Pyramid, Ratio, Threshold
from kvtier.pruning.policy import Policy
from kvtier.pruning.presets import attention_threshold, h2o, pyramid_kv, snap_kv, streaming_llm
from kvtier.pruning.scorers import KeyNorm, Mass, Recency, Scorer, Window

PRESETS: dict[str, Callable[..., Policy]] = {
    each.__name__: each for each in (attention_threshold, h2o, pyramid_kv, snap_kv, streaming_llm)
}
_CANONICAL = re.compile(
    r"prune/1\((.+),sinks:(\d+),recent:(\d+)/([^,]+),every:(\d+),whole:(\d+),positions:(kept|compact)\)", re.DOTALL
)
_SCORERS: dict[str, Scorer] = {str(each): each for each in (Recency(), KeyNorm(), Mass(), Mass(mean=True))}
_WINDOW = re.compile(r"window:(\d+)/(max|mean):(\d+)")
_NESTED = re.compile(r"(pyramid|byhead):([^(]+)\((.+)\)", re.DOTALL)
LONGEST = 1000
"""Characters of a policy's text."""
MOST = 999_999_999
"""Tokens that a policy can speak of."""


def is_policy(text: str) -> bool:
    """Whether a text is meant to be a policy, right or wrong."""
    name = text.partition("(")[0].strip()
    return name in PRESETS or name == "prune/1"


def parse_policy(text: str) -> Policy:
    """Read a policy: see the module.

    Raises:
        ConfigError: what is wrong with the text, and what to write.
    """
    text = text.strip()
    if len(text) > LONGEST:
        raise ConfigError(f"a policy of {len(text):,} characters is too long; write a preset, as snap_kv(keep=0.7)")
    if found := _CANONICAL.fullmatch(text):
        what, sinks, recent, share, every, whole, positions = found.groups()
        scorer, star, budget = what.partition("*")
        if not star:
            raise ConfigError(f"{text!r} has no budget; write SCORER*BUDGET, as window:32/max:7*ratio:0.7")
        return Policy(
            _scorer(scorer),
            _budget(budget),
            sinks=_whole(sinks),
            recent=_whole(recent),
            recent_share=_number(share),
            every=_whole(every),
            whole=_whole(whole),
            compact=positions == "compact",
        )
    return _preset(text)


def _preset(text: str) -> Policy:
    name, bracket, _ = text.partition("(")
    if name.strip() not in PRESETS:
        near = difflib.get_close_matches(name, PRESETS, 1, 0)[0]
        raise ConfigError(f"no pruning policy {text!r}; did you mean {near}()? Presets: {', '.join(PRESETS)}")
    preset = PRESETS[name.strip()]
    try:
        args, named = _arguments(text if bracket else f"{text}()")
        return preset(*args, **named)
    except (SyntaxError, ValueError, TypeError) as exc:
        takes = inspect.signature(preset)
        raise ConfigError(f"{text!r} cannot be read ({exc}); write it as {name.strip()}{takes}") from exc


def _arguments(text: str) -> tuple[list[float], dict[str, float]]:
    """Of a call that is written out; ValueError where one is no number."""
    call = ast.parse(text, mode="eval").body
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
        raise ValueError("it is no call")  # noqa: TRY004 it is the text that is wrong
    args = [ast.literal_eval(each) for each in call.args]
    named = {str(each.arg): ast.literal_eval(each.value) for each in call.keywords}
    if len(named) < len(call.keywords):
        raise ValueError("an argument stands there twice")
    for name, value in (*(("", value) for value in args), *named.items()):
        if not isinstance(value, int | float) or isinstance(value, bool) != (name == "compact"):
            raise ValueError(f"{value!r} is no {'True or False' if name == 'compact' else 'number'}")
        if abs(value) > MOST:
            raise ValueError(f"{value!r} is more than {MOST:,}")
    return args, named


def _scorer(text: str) -> Scorer:
    if text in _SCORERS:
        return _SCORERS[text]
    if found := _WINDOW.fullmatch(text):
        window, pool, kernel = found.groups()
        return Window(_whole(window), _whole(kernel), "max" if pool == "max" else "mean")
    raise ConfigError(f"no scorer {text!r}; write {', '.join(_SCORERS)} or window:32/max:7")


def _budget(text: str) -> Budget:
    if found := _NESTED.fullmatch(text):
        name, number, inner = found.groups()
        within = _budget(inner)
        if name == "pyramid" and isinstance(within, Length | Ratio):
            return Pyramid(within, _whole(number))
        if name == "byhead" and isinstance(within, Length | Ratio | Pyramid):
            return ByHead(within, _number(number))
        raise ConfigError(f"{text!r}: a {name} shares out another budget than {within}; write {name}:N(ratio:0.7)")
    name, _, number = text.partition(":")
    match name:
        case "length":
            return Length(_whole(number))
        case "ratio":
            return Ratio(_number(number))
        case "threshold":
            return Threshold(_number(number))
    raise ConfigError(f"no budget {text!r}; write length:1024, ratio:0.7, threshold:0.001, pyramid:20(...)")


def _whole(text: str) -> int:
    if not re.fullmatch(r"\d{1,9}", text):
        raise ConfigError(f"{text!r} is no number of tokens; write digits, 9 at most")
    return int(text)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError as exc:
        raise ConfigError(f"{text!r} is no number; write it as 0.7") from exc
