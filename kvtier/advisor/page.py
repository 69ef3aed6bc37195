"""An answer about memory, as a page for a terminal."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvtier.advisor.advice import LENGTHS, Answer, Row
from kvtier.advisor.recommend import Candidate, Verdict
from kvtier.advisor.report import nbytes, short

WIDTH = 130
"""Columns that a page needs; tables are cut in less."""
NAME = 40
"""Columns that a name may take; longer ones go on below."""
BECAUSE = "because"
SHOWN = 5
"""Recommendations."""
WHY = {"memory": "too large", "loss": "loss too great", "dominated": "no better than another"}


def page_of(answer: Answer) -> RenderableType:
    """What a person reads."""
    parts: list[RenderableType] = [Text(line) for line in _head(answer)]
    parts += [Text(), _memory(answer), *map(Text, _prompt(answer)), Text()]
    parts += [_recommended(answer)] if answer.advice.ranked else []
    parts += [Text(line) for line in _below(answer)]
    return Group(*parts)


def _head(answer: Answer) -> Iterator[str]:
    question, spec = answer.question, answer.spec
    shape = (
        f"a latent of {spec.head_dim}"
        if spec.mla
        else f"{spec.kv_heads} KV head{'s' * (spec.kv_heads > 1)} of {spec.head_dim}"
    )
    yield (
        f"{question.model}: {spec.layers} layers, {shape}, {spec.dtype}: {nbytes(spec.token_nbytes)} a token, "
        f"{nbytes(spec.token_nbytes / spec.layers)} of it in each layer"
    )
    pages = f"pages of {_count(question.page_tokens, 'token')}"
    yield f"{_count(question.context, 'token')}, {_count(question.batch, 'sequence')}, {pages}"


def _count(count: int, what: str) -> str:
    return f"{count:,} {what}{'s' * (count != 1)}"


def _memory(answer: Answer) -> Table:
    question = answer.question
    columns = ["bits", "a token", "a sequence", *([_count(question.batch, "sequence")] if question.batch > 1 else [])]
    columns += [f"{length:,}" for length in LENGTHS]
    if question.memory is not None:
        columns += [f"in {nbytes(question.memory)}", "or"]
    table = _table("KV", *columns)
    for row in answer.rows:
        table.add_row(row.name, *_cells(row, answer))
    return table


def _cells(row: Row, answer: Answer) -> Iterator[str]:
    question = answer.question
    yield f"{row.bits:.2f}"
    yield nbytes(row.held / question.context)
    yield nbytes(row.held)
    if question.batch > 1:
        yield nbytes(question.batch * row.held)
    yield from map(nbytes, row.lengths)
    if question.memory is not None:
        yield "any length" if row.longest is None else _count(row.longest, "token")
        yield _count(row.sequences or 0, "sequence")


def _prompt(answer: Answer) -> Iterator[str]:
    held, memory = answer.rows[0].held, answer.question.memory
    if memory is not None and held > memory:
        yield (
            f"A prompt of that length takes {nbytes(held)} while it is computed, and there is {nbytes(memory)}: what "
            "fits is for sequences that grow to it."
        )
    elif len(answer.rows) > 1:
        yield f"A prompt of that length takes {nbytes(held)} while it is computed, and then what its row says."


def _recommended(answer: Answer) -> Table:
    speeds = _speeds(answer)
    columns = ("take", "memory", "of native", "KL, nats a token", "same top token")
    table = _table(*columns, *(["decode"] * speeds), BECAUSE)
    for verdict in answer.advice.ranked[:SHOWN]:
        one = verdict.candidate
        strategy = one.strategy
        cells = (strategy.name, nbytes(one.nbytes), f"{100 * one.share:.0f} %", _interval(strategy.kl, "{:.5f}"))
        top1 = _interval(tuple(None if value is None else 100 * value for value in strategy.top1), "{:.1f}")
        table.add_row(*cells, f"{top1} %", *([_speed(one)] * speeds), verdict.reason)
    return table


def _speeds(answer: Answer) -> bool:
    return any(verdict.candidate.decode for verdict in answer.advice.ranked[:SHOWN])


def _interval(interval: tuple[float | None, ...], form: str) -> str:
    return " ± ".join(form.format(value) for value in interval if value is not None)


def _speed(one: Candidate) -> str:
    return "" if one.decode is None else f"{one.decode:.2f}"


def _below(answer: Answer) -> Iterator[str]:
    advice = answer.advice
    if not advice.ranked:
        yield "Nothing that was measured fits and is accurate enough:"
        yield from (f"  {line}" for line in advice.nearest)
    left = len(advice.ranked) - SHOWN
    if left > 0:
        yield f"{left} more: --json has them"
    yield from _ruled_out(advice.ruled_out)
    yield ""
    if _speeds(answer):
        yield "Decode: so many times the speed of copying the KV as it is."
    yield f"Loss is that of {answer.measured.source}; yours may lose more or less."
    yield "Measure it: python -m benchmarks.quality --model FOLDER --save FILE, then --measured FILE."


def _ruled_out(verdicts: tuple[Verdict, ...]) -> Iterator[str]:
    for why, name in WHY.items():
        those = [verdict for verdict in verdicts if verdict.why == why]
        if those:
            nearest = min(those, key=lambda verdict: _far(verdict.candidate, why))
            yield f"{len(those)} ruled out, {name}; {short(nearest.candidate.strategy.name, NAME)}: {nearest.reason}"


def _far(one: Candidate, why: str) -> float:
    return one.loss if why == "loss" else one.nbytes


def _table(first: str, *others: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(first, overflow="fold", max_width=NAME)
    for name in others:
        words = name == BECAUSE
        table.add_column(name, justify="left" if words else "right", no_wrap=not words)
    return table
