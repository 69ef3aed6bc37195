"""Parts of layers that are stored alike, as one table that one launch works through."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from kvtier.codecs.gpu.tiles import group_tile
from kvtier.codecs.gpu.traits import Stored, traits
from kvtier.codecs.layout import Field, Kind, Layout
from kvtier.spec import KVSpec

Layouts = tuple[Layout, Layout]
"""Of the first block of a sequence, and of the others."""
Entry = dict[Field, int]
COLUMNS = (Field.OFFSET, Field.SINKS, Field.CODES, Field.SCALES, Field.ZEROS, Field.END, Field.NBYTES)
"""What a kernel is told of a part, behind its number: see `places.work_of`."""
PLACES = (Field.OFFSET, Field.CODES, Field.SCALES, Field.ZEROS)


@dataclass(frozen=True, slots=True, eq=False)
class Jobs:
    """Parts that one kernel, compiled once, can work on.

    Attributes:
        parts: what they have in common.
        table: int64 `[2, jobs, 8]` on the device, first blocks and others: the number of the part, and `COLUMNS`.
        layers: the layer of each, ascending.
    """

    parts: Stored
    table: torch.Tensor
    layers: NDArray[np.int64]

    def within(self, layers: range) -> tuple[int, int]:
        """The first job of these layers, and how many there are."""
        first, stop = np.searchsorted(self.layers, [layers.start, layers.stop])
        return int(first), int(stop - first)


def quantised(layouts: Layouts, spec: KVSpec, device: torch.device) -> list[Jobs]:
    """What is stored as codes.

    Raises:
        ConfigError: something for which the GPU has no kernel.
    """
    found = _jobs(layouts, spec, device, lambda entry: entry if entry[Field.KIND] != Kind.RAW else None)
    for each in found:
        if each.parts.granularity == "row":
            group_tile(each.parts)
    return found


def raw(layouts: Layouts, spec: KVSpec, device: torch.device) -> list[Jobs]:
    """What is stored as it is: all tokens are exact."""
    exact = {Field.SINKS: spec.block_tokens}
    return _jobs(layouts, spec, device, lambda entry: entry | exact if entry[Field.KIND] == Kind.RAW else None)


def sinks(layouts: Layouts, spec: KVSpec, device: torch.device) -> list[Jobs]:
    """The exact tokens of what is stored as codes."""
    places = (Field.OFFSET, Field.SINKS)
    nothing = dict.fromkeys(Field, 0)
    return _jobs(
        layouts,
        spec,
        device,
        lambda entry: nothing | {place: entry[place] for place in places} if entry[Field.KIND] != Kind.RAW else None,
        only=lambda first: first[Field.SINKS] > 0,
    )


def _jobs(
    layouts: Layouts,
    spec: KVSpec,
    device: torch.device,
    of: Callable[[Entry], Entry | None],
    *,
    only: Callable[[Entry], bool] = lambda first: True,
) -> list[Jobs]:
    """Gather what `of` makes of the parts of all layers, if it is not None, and `only` if the first block's is such."""
    found: dict[Stored, list[tuple[int, list[list[int]], int]]] = {}
    for layer in range(spec.layers):
        for part, dim in enumerate(spec.head_dims):
            entries = [of(dict(zip(Field, table.table[layer, part].tolist(), strict=True))) for table in layouts]
            first, later = entries
            if first is None or later is None or not only(first):
                continue
            number = layer * len(spec.head_dims) + part
            rows = [[number, *(entry[column] for column in COLUMNS)] for entry in (first, later)]
            aligned = math.gcd(16, *(entry[place] for entry in (first, later) for place in PLACES))
            found.setdefault(traits(later, spec, dim), []).append((layer, rows, aligned))
    return [
        Jobs(
            replace(kind, aligned=math.gcd(*(aligned for _, _, aligned in each))),
            torch.tensor([rows for _, rows, _ in each]).transpose(0, 1).contiguous().to(device),
            np.array([layer for layer, _, _ in each]),
        )
        for kind, each in found.items()
    ]
