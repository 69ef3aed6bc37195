"""Which host holds how much of a chain, for routers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from kvtier.hierarchy.answers import Place, Placement
from kvtier.hierarchy.seeking import MOST
from kvtier.hierarchy.state import State
from kvtier.index.base import Replica
from kvtier.tiers.base import OWN, TierNumber


def where(state: State, keys: Sequence[bytes]) -> Placement:
    """See `Session.where`: what this host's table says of it, and the index of all others.

    Nothing is leased, moved, touched or counted. May take as long as the index's time-out; not for the door's loop.
    """
    index = state.index
    names = {node.node: node.host for node in index.nodes() if node.alive or node.node == index.node}
    tiers = {index.node: _mine(state, keys)}
    complete = True
    if keys and index.others():
        found, complete = _found(state, keys)
        tiers |= _theirs(found, index.node)
    places = [
        Place(names[node], node == index.node, sum(counts.values()), _named(counts))
        for node, counts in tiers.items()
        if counts and node in names
    ]
    return Placement(tuple(sorted(places, key=lambda place: (-place.blocks, not place.here, place.host))), complete)


def _mine(state: State, keys: Sequence[bytes]) -> Counter[int]:
    """How many blocks of the prefix are best in each tier of this host."""
    table = state.table
    with state.lock:
        rows = table.prefix(keys)
        best = table.best_of(rows[: table.alive(rows, state.clock())]).tolist()
    abroad = next((i for i, tier in enumerate(best) if tier not in OWN), len(best))
    return Counter(best[:abroad])


def _found(state: State, keys: Sequence[bytes]) -> tuple[list[tuple[Replica, ...]], bool]:
    """Replicas of a chain, as far as another host has its blocks, and whether the index always answered."""
    index, found = state.index, list[tuple[Replica, ...]]()
    for at in range(0, len(keys), MOST):
        part = index.match(keys[at : at + MOST])
        found += part or []
        if part is None or all(replica.node == index.node for replica in part[-1]):
            return found, part is not None
    return found, True


def _theirs(found: Sequence[tuple[Replica, ...]], mine: int) -> dict[int, Counter[int]]:
    """The same of each other host, by the number of its node."""
    prefixes: dict[int, Counter[int]] = {}
    going: set[int] | None = None
    for replicas in found:
        here = {replica.node: replica.tier for replica in replicas if replica.node != mine}
        going = set(here) if going is None else going & set(here)
        if not going:
            break
        for node in going:
            prefixes.setdefault(node, Counter())[here[node]] += 1
    return prefixes


def _named(counts: Counter[int]) -> dict[str, int]:
    return {TierNumber(tier).name.lower(): counts[tier] for tier in sorted(counts)}
