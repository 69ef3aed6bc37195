"""What is said of a metric."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal

from kvtier.tiers.base import TierNumber

Status = Mapping[str, Any]
Labels = tuple[str, ...]
Values = Mapping[Labels, Any]
TIERS = tuple(tier.name.lower() for tier in TierNumber)


@dataclass(frozen=True, slots=True)
class Described:
    """One metric.

    Attributes:
        name: of the metric; of a counter without `_total`.
        kind: its type.
        text: its help.
        read: gives of a status its values by the values of its labels; of a histogram each as the status has it. None
            where there is no such thing on this host: then there is no series.
        labels: their names.
        known: values of the labels that are 0 until something happens.
    """

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    text: str
    read: Callable[[Status], Values | None]
    labels: Labels = ()
    known: Sequence[Labels] = ()


def one(*path: str) -> Callable[[Status], Values | None]:
    """The number at a place of a status; None when it is not there."""

    def read(status: Status) -> Values | None:
        found = _at(status, path)
        return None if found is None else {(): float(found)}

    return read


def several(*path: str, apart: str = "") -> Callable[[Status], Values | None]:
    """The numbers at a place of a status, by their names; `apart` is between the parts of a name."""

    def read(status: Status) -> Values | None:
        found = _at(status, path)
        return None if found is None else {_labels(name, apart): value for name, value in found.items()}

    return read


def each(field: str, *path: str) -> Callable[[Status], Values | None]:
    """A field of each of the things at a place of a status, by their names."""

    def read(status: Status) -> Values | None:
        found = _at(status, path)
        return None if found is None else {(name,): value[field] for name, value in found.items()}

    return read


def alone(*labels: Sequence[str]) -> list[Labels]:
    """All combinations of values of labels."""
    return list(product(*labels))


def _at(status: Status, path: Sequence[str]) -> Any:
    found: Any = status
    for name in path:
        found = None if found is None else found.get(name)
    return found


def _labels(name: str, apart: str) -> Labels:
    return tuple(name.split(apart)) if apart else (name,)
