"""What `kvtier advise` shows: the advisor's answer, with recipes of kvtier.flow beside it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from kvtier.errors import ConfigError

if TYPE_CHECKING:
    from kvtier.advisor.advice import Question
    from kvtier.advisor.footprint import Storage
    from kvtier.advisor.strategies import Strategy

LEAST_MEMORY = 1 << 20


def show(question: Question, *, plot: Path | None, json: bool) -> None:
    """Answer a question on the terminal, and with a picture if one is wanted.

    Raises:
        ConfigError: a question that has no answer; a picture that cannot be drawn.
    """
    from kvtier.advisor import advice

    if question.memory and question.memory < LEAST_MEMORY:
        raise ConfigError(f"a memory of {question.memory} bytes holds nothing; write it with its unit, as 24GiB")
    answer = advice.advise(question)
    if plot is not None:
        from kvtier.advisor.pictures import draw

        draw(answer, plot)
    if json:
        from json import dumps

        typer.echo(dumps(advice.as_dict(answer)))
        return
    from rich.console import Console

    from kvtier.advisor.page import WIDTH, page_of

    console = Console(highlight=False, markup=False, emoji=False, width=max(WIDTH, Console().width))
    console.print(page_of(answer))
    if answer.advice.ranked:
        best = answer.advice.ranked[0].candidate.strategy
        blocks = "" if best.policy else f'; for blocks that are shared: cache.keyspace(..., plan="{best.plan}")'
        console.print(f'The first of them: Flow(model, "{recipe_of(best)}"){blocks}', soft_wrap=True)


def recipe_of(strategy: Strategy) -> str:
    """The shortest text by which kvtier.flow does what was measured."""
    from kvtier.flow.recipe import parse_recipe

    try:
        parse_recipe(strategy.name)
    except ConfigError:
        return f"{strategy.plan}*{strategy.policy}"
    return strategy.name


def fused(text: str, model: str, page_tokens: int) -> tuple[str, Storage]:
    """How a recipe of kvtier.flow holds the KV of a model, with a name."""
    from kvtier.advisor.advice import BLOCK_TOKENS
    from kvtier.advisor.footprint import Storage
    from kvtier.advisor.models import spec_of
    from kvtier.codecs.plan import canonical
    from kvtier.flow.recipe import NAMED, parse_recipe

    recipe = parse_recipe(text)
    layers = recipe.resolve(spec_of(model, BLOCK_TOKENS))
    storage = Storage(
        canonical(tuple(layer.plan for layer in layers)),
        tuple(layer.policy or 1.0 for layer in layers),
        recent=recipe.recent,
        page_tokens=page_tokens,
        every=recipe.every,
    )
    return f"fused ({text})" if text in NAMED else "fused", storage
