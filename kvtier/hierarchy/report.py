"""What a host tells people about its blocks and tiers."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import numpy as np

from kvtier.errors import ClosedError, TierUnavailable
from kvtier.hierarchy.ledger import PEERS
from kvtier.hierarchy.state import State
from kvtier.tiers.base import OWN, Tier, TierNumber, TierUsage

HELD = 16
"""Leases, reservations and pins that are shown, the oldest first."""
BACK = "is back, and its blocks are being counted"


def inspect(state: State, keys: Sequence[bytes]) -> list[dict[str, Any] | None]:
    """See `Session.inspect`."""
    table = state.table

    def describe(row: int) -> dict[str, Any]:
        return {
            "tiers": [_name(tier) for tier in OWN if table.has(row, tier)],
            "nbytes": int(table.nbytes[row]),
            "codec": int(table.codec[row]),
            "created": float(table.created[row]),
            "last_access": float(table.used[row]),
            "hits": int(table.hits[row]),
            "leased": table.has(row, TierNumber.CPU) and state.pinned(row),
        }

    with state.lock:
        rows = map(state.row, keys)
        return [None if row is None or table.keys[row] in state.abroad else describe(row) for row in rows]


def status(state: State) -> dict[str, Any]:
    """Tiers, counters, sessions and index of this host, as plain values."""
    now = state.clock()
    peers = _peers(state)
    usages = {number: _usage(tier) for number, tier in state.tiers.items() if number in OWN}
    with state.lock:
        masks = state.table.tiers[list(state.table.rows.values())] if state.table.rows else np.zeros(0, np.uint8)
        usages[TierNumber.CPU] = state.cpu.usage()
        return {
            "epoch": state.cpu.arena.epoch,
            "tiers": [
                {
                    "tier": _name(number),
                    "label": getattr(state.tiers.get(number), "label", _name(number)),
                    "capacity": usage.capacity,
                    "used": usage.used,
                    "blocks": int((masks >> np.uint8(number) & 1).sum()),
                    "fault": usage.fault or (BACK if state.uncertain[number] else ""),
                    "counters": usage.counters,
                }
                for number, usage in sorted(usages.items())
            ],
            "blocks": len(state.table) - len(state.abroad),
            "sessions": sum(number < PEERS for number in state.ledger.sessions),
            "leases": len(state.ledger.leases),
            "leased_nbytes": sum(h.leased_nbytes for h in state.ledger.sessions.values()),
            "reservations": len(state.ledger.reservations),
            "pins": len(state.ledger.pins),
            "pinned_nbytes": state.ledger.pinned_nbytes,
            "held": [asdict(held) for held in state.ledger.held(now)[:HELD]],
            "bandwidth": {_name(t): 1 / slow for t in TierNumber if (slow := state.pace.slowness(t, now))},
            "admission": {"selective": state.admission.selective, "refused": dict(state.admission.refused)},
            "peers": peers,
            "index": state.index.status(),
            "events": state.publishing() if state.publishing else None,
            **state.stats.as_dict(),
        }


def _peers(state: State) -> dict[str, Any] | None:
    """What was fetched from other hosts, and how each of them fares; None where there can be none."""
    others = state.others
    if others is None:
        return None
    usage, hosts = _usage(others), []
    with suppress(ClosedError):
        hosts = [asdict(host) for host in others.status()]
    return {"fault": usage.fault, "counters": usage.counters, "hosts": hosts}


def _usage(tier: Tier) -> TierUsage:
    try:
        return tier.usage()
    except (TierUnavailable, ClosedError) as exc:
        return TierUsage(0, 0, 0, str(exc))


def _name(tier: int) -> str:
    return TierNumber(tier).name.lower()
