"""What is asked for most often."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtier.hierarchy.state import State
from kvtier.hierarchy.table import BlockTable
from kvtier.tiers.base import OWN

SHOWN = 8
"""Prefixes that are shown."""
AMONG = 4096
"""Blocks with the most hits that are looked at."""
LONGEST = 1 << 14
"""Blocks of a prefix that are counted, 15 ms of Python; the table may change while it is walked through."""


def hottest(state: State) -> list[dict[str, Any]]:
    """The most hit prefixes, as plain values; most of it is read without the lock, and may be a moment old.

    A prefix ends where none of its continuations is hit half as often: a system prompt, say, before the questions.
    """
    table = state.table
    found = [(row, int(table.life[row]), _walk(table, row)) for row in _ends(table)]
    with state.lock:
        spaces = table.space_names()
        return [
            {
                "key": table.keys[row][:8].hex(),
                "keyspace": spaces[int(table.space[row])][:8].hex(),
                "blocks": len(rows),
                "tokens": int(table.tokens[rows].sum()),
                "nbytes": int(table.nbytes[rows].sum()),
                "hits": int(table.hits[row]),
                "tiers": [tier.name.lower() for tier in OWN if table.has(row, tier)],
                "last_access": float(table.used[row]),
            }
            for row, life, rows in found
            if table.life[row] == life
        ]


def _ends(table: BlockTable) -> list[int]:
    """Rows of the last blocks of the most hit prefixes."""
    hits, parent, tiers = table.hits, table.parent, table.tiers
    end = min(len(table.keys), len(hits), len(parent), len(tiers))
    rows = np.flatnonzero(hits[:end] * (tiers[:end] > 0))
    if len(rows) > AMONG:
        rows = rows[np.argpartition(hits[rows], -AMONG)[-AMONG:]]
    rows.sort()
    above = parent[rows]
    children = np.flatnonzero((above >= 0) & (table.life[above] == table.parent_life[rows]))
    at = np.minimum(np.searchsorted(rows, above[children]), len(rows) - 1)
    there = rows[at] == above[children]
    most = np.zeros(len(rows), np.int64)
    np.maximum.at(most, at[there], hits[rows[children[there]]])
    ends = rows[2 * most < hits[rows]]
    order = np.lexsort((-table.used[ends], -hits[ends]))[:SHOWN]
    last: list[int] = ends[order].tolist()
    return last


def _walk(table: BlockTable, row: int) -> NDArray[np.int64]:
    """Rows of the block and of its ancestors, as far as they are known."""
    rows: list[int] = []
    at: int | None = row
    while at is not None and len(rows) < LONGEST:
        rows.append(at)
        at = table.parent_of(at)
    return np.array(rows, np.int64)
