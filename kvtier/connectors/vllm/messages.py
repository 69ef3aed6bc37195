"""What the scheduler's process and the workers' tell each other, in vLLM's own messages; plain data that is pickled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvtier.client.cache import Cache
from kvtier.client.space import Space
from kvtier.spec import KVSpec

GONE = -1
"""In place of a page that the engine does not have: of layers with a window, one that the window has passed."""


@dataclass(frozen=True)
class Recipe:
    """How to open a keyspace: the same in all processes of an engine.

    Attributes:
        spec: shape of the KV of one rank.
        overrides: what else changes the KV, by name, sorted.
        parts: the other arguments of `Cache.keyspace`, by name, sorted; all but the rank.
    """

    spec: KVSpec
    overrides: tuple[tuple[str, str], ...]
    parts: tuple[tuple[str, Any], ...]

    def but(self, *, overrides: Mapping[str, str] | None = None, **parts: Any) -> Recipe:
        """The same with some of it changed or added."""
        both = dict(self.overrides) | dict(overrides or {}), dict(self.parts) | parts
        return Recipe(self.spec, tuple(sorted(both[0].items())), tuple(sorted(both[1].items())))

    def open(self, cache: Cache, rank: int) -> Space:
        """Open the keyspace for one rank; see `Cache.keyspace`."""
        return cache.keyspace(self.spec, rank=rank, overrides=dict(self.overrides), **dict(self.parts))


@dataclass(frozen=True)
class Blocks:
    """Blocks of one request in the engine's pages.

    Attributes:
        recipe: their keyspace; None while that is not known: then nothing is loaded or saved.
        keys: 32 bytes for each block of the sequence, from its first to the last of these.
        start: the first token that is meant; for a save a multiple of the block, for a load of the page.
        pages: for each group of layers the engine's pages from that of token `origin` on; `GONE` for one that the
            engine has let go, or does not want.
        origin: the token that the first of `pages` begins with: `start`, down to a whole block.
    """

    recipe: Recipe | None
    keys: tuple[bytes, ...] = field(repr=False)
    start: int
    pages: tuple[tuple[int, ...], ...] = field(repr=False)
    origin: int


@dataclass(frozen=True)
class Load:
    """What a request was promised."""

    request: str
    blocks: Blocks
    layerwise: bool


@dataclass(frozen=True)
class Save:
    """Blocks that are complete when the step is done; their pages are held until every rank has answered."""

    number: int
    blocks: Blocks


@dataclass(frozen=True)
class Step:
    """What the workers have to do in a step.

    Attributes:
        loads: to be done, or begun.
        saves: to be begun when the step is done.
        computes: whether the model runs in it.
        number: of the step, from 1 on.
    """

    loads: tuple[Load, ...] = ()
    saves: tuple[Save, ...] = ()
    computes: bool = True
    number: int = 0


@dataclass
class Outcome:
    """What became of loads and saves, from one rank or, merged, from several.

    Attributes:
        loaded: request -> ranks that answered, and the token up to which all of them have loaded.
        saved: number of the save -> ranks that answered, and the blocks that all of them have stored, from its first.
        step: number of the last step in which the model has run; 0 for none since the last outcome.
    """

    loaded: dict[str, tuple[int, int]] = field(default_factory=dict)
    saved: dict[int, tuple[int, int]] = field(default_factory=dict)
    step: int = 0

    def __bool__(self) -> bool:
        return bool(self.loaded or self.saved or self.step)

    def merge(self, other: Outcome) -> Outcome:
        """Both, with the lesser of what each achieved."""
        return Outcome(_merged(self.loaded, other.loaded), _merged(self.saved, other.saved), max(self.step, other.step))


def _merged(one: Mapping[Any, tuple[int, int]], two: Mapping[Any, tuple[int, int]]) -> dict[Any, tuple[int, int]]:
    both = dict(one)
    for name, (ranks, least) in two.items():
        had = both.get(name)
        both[name] = (ranks, least) if had is None else (had[0] + ranks, min(had[1], least))
    return both
