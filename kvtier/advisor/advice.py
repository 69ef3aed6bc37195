"""From a question about memory to its answer: what KV takes, what fits, and what to do about it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from msgspec import to_builtins

from kvtier.advisor.footprint import LONGEST, NATIVE, Footprint, Storage
from kvtier.advisor.models import spec_of
from kvtier.advisor.recommend import Advice, Verdict, recommend
from kvtier.advisor.strategies import Measured, read_measured
from kvtier.errors import ConfigError
from kvtier.spec import KVSpec

BLOCK_TOKENS = 64
"""Tokens that are encoded together."""
LENGTHS = (1_000, 10_000, 100_000)
"""At which native and other storage is compared."""

MEASURED = ("model", "date", "context", "tokens", "texts", "speed")
"""What machines are told of a measurement, beside its strategies."""


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked.

    Attributes:
        model: name or path, as for `spec_of`.
        context: tokens of each sequence.
        batch: sequences at a time.
        memory: bytes for KV; None when that is open.
        accuracy: as for `recommend`.
        storages: ways to hold the KV that are shown beside the native one, by name.
        page_tokens: tokens of a page.
        measured: file of a measurement; kvtier's own unless given.
    """

    model: str
    context: int = 32_768
    batch: int = 1
    memory: int | None = None
    accuracy: str | float = "good"
    storages: tuple[tuple[str, Storage], ...] = ()
    page_tokens: int = 16
    measured: Path | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """One way to hold the KV.

    Attributes:
        name: of it.
        footprint: its bytes.
        held: bytes of a sequence.
        most: the most that it holds on the way there.
        waste: bytes of it in pages that no token has.
        bits: of an element that is kept.
        share: of the bytes of the whole KV as it is.
        lengths: bytes of a sequence of each of `LENGTHS`.
        longest: tokens that so many sequences could have in the memory; None when any number fits, or none is given.
        sequences: of the context's length, that the memory has room for; None when none is given.
    """

    name: str
    footprint: Footprint
    held: int
    most: int
    waste: int
    bits: float
    share: float
    lengths: tuple[int, ...]
    longest: int | None
    sequences: int | None


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of a question.

    Attributes:
        question: it.
        spec: of the model's KV.
        rows: what the KV takes, native first.
        measured: what losses are known.
        advice: what to do.
    """

    question: Question
    spec: KVSpec
    rows: tuple[Row, ...]
    measured: Measured
    advice: Advice


def advise(question: Question) -> Answer:
    """Say what the KV takes, what fits, and which measured strategies to take.

    Raises:
        ConfigError: no such model, plan or accuracy; a number out of range; a bad file of measurements.
        UnsupportedKV: the model does not keep one KV entry for every token.
    """
    if not 1 <= question.context <= LONGEST or not 1 <= question.batch <= LONGEST:
        raise ConfigError(
            f"context is {question.context} and batch {question.batch}; write 1 to {LONGEST:,} tokens, and as many "
            "sequences"
        )
    spec = spec_of(question.model, BLOCK_TOKENS)
    measured = read_measured(question.measured)
    native = Storage(NATIVE.plan, page_tokens=question.page_tokens)
    advice = recommend(
        question.context,
        question.memory,
        question.accuracy,
        model=spec,
        batch=question.batch,
        page_tokens=question.page_tokens,
        measured=measured,
    )
    rows = [
        _row(name, Footprint(spec, storage), question) for name, storage in (("native", native), *question.storages)
    ]
    return Answer(question, spec, tuple(rows), measured, advice)


def _row(name: str, footprint: Footprint, question: Question) -> Row:
    context, memory = question.context, question.memory
    return Row(
        name,
        footprint,
        held=footprint.held(context),
        most=footprint.most(context),
        waste=footprint.waste(context),
        bits=footprint.bits(context),
        share=footprint.share(context),
        lengths=tuple(footprint.held(length) for length in LENGTHS),
        longest=None if memory is None else footprint.longest(memory, question.batch),
        sequences=None if memory is None else footprint.sequences(memory, context),
    )


def as_dict(answer: Answer) -> dict[str, Any]:
    """All of it as plain values, bytes as integers."""
    question, spec, advice = answer.question, answer.spec, answer.advice
    return {
        "model": question.model,
        "spec": {name: getattr(spec, name) for name in ("layers", "kv_heads", "head_dims", "dtype", "mla")},
        "token_nbytes": spec.token_nbytes,
        "context": question.context,
        "batch": question.batch,
        "page_tokens": question.page_tokens,
        "memory": question.memory,
        "storage": [_row_dict(row, question) for row in answer.rows],
        "accuracy": advice.bound,
        "recommended": [_verdict(verdict) for verdict in advice.ranked],
        "ruled_out": [_verdict(verdict) for verdict in advice.ruled_out],
        "nearest": list(advice.nearest),
        "measured": {name: to_builtins(getattr(answer.measured, name)) for name in MEASURED},
    }


def _row_dict(row: Row, question: Question) -> dict[str, Any]:
    names = ("name", "held", "most", "waste", "bits", "share", "longest", "sequences")
    return {name: getattr(row, name) for name in names} | {
        "plan": row.footprint.storage.plan,
        "batch": question.batch * row.held,
        "layers": row.footprint.layers(question.context),
        "kept": row.footprint.kept(question.context),
        "lengths": dict(zip(LENGTHS, row.lengths, strict=True)),
    }


def _verdict(verdict: Verdict) -> dict[str, Any]:
    one = asdict(verdict)
    candidate = one.pop("candidate")
    strategy = to_builtins(verdict.candidate.strategy)
    return one | {name: value for name, value in candidate.items() if name != "strategy"} | {"strategy": strategy}
