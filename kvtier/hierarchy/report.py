"""What a host tells people about its blocks and tiers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from kvtier.errors import ClosedError, TierUnavailable
from kvtier.hierarchy.hot import hottest
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
    """Tiers, counters, sessions and index of this host, as plain values.

    The lock is held for copies only, whatever the number of blocks.
    """
    now = state.clock()
    peers = _peers(state)
    usages = {number: _usage(tier) for number, tier in state.tiers.items() if number in OWN}
    index = state.index.status()
    demand = state.demand.status(now)
    hot = hottest(state)
    with state.lock:
        usages[TierNumber.CPU] = state.cpu.usage()
        blocks = list(state.accounts.blocks)
        known = len(state.table) - len(state.abroad)
        uncertain = dict(state.uncertain)
        sessions = sum(number < PEERS for number in state.ledger.sessions)
        ledger = state.ledger.snapshot()
        bandwidth = {_name(t): 1 / slow for t in TierNumber if (slow := state.pace.slowness(t, now))}
        stats = state.stats.as_dict()
        condemned = state.stats.condemned
        refused = dict(state.admission.refused)
    leased = {_name(tier): nbytes for tier, nbytes in ledger.leased.items()}
    return {
        "epoch": state.cpu.arena.epoch,
        "started": state.started,
        "arena_missing": state.cpu.arena.capacity - state.cpu.arena.ready,
        "draining": state.draining,
        "tiers": [
            {
                "tier": _name(number),
                "label": getattr(state.tiers.get(number), "label", _name(number)),
                "capacity": usage.capacity,
                "used": usage.used,
                "blocks": blocks[number],
                "fault": usage.fault or (BACK if uncertain.get(number) else ""),
                "counters": usage.counters,
            }
            for number, usage in sorted(usages.items())
        ],
        "blocks": known,
        "sessions": sessions,
        "leases": len(ledger.leases),
        "leased": leased,
        "leased_nbytes": sum(leased.values()),
        "reservations": len(ledger.reservations),
        "pins": len(ledger.pins),
        "pinned_nbytes": ledger.pinned_nbytes,
        "held": [asdict(held) for held in ledger.held(now)[:HELD]],
        "oldest": ledger.oldest(now),
        "stuck": ledger.stuck(now),
        "bandwidth": bandwidth,
        "admission": {"selective": state.admission.selective, "refused": refused},
        "checksum_failures": _checksum_failures(condemned, usages, peers),
        "hot": hot,
        "peers": peers,
        "index": index,
        "events": state.publishing() if state.publishing else None,
        **stats,
        **demand,
    }


def _checksum_failures(
    condemned: int, usages: Mapping[TierNumber, TierUsage], peers: Mapping[str, Any] | None
) -> dict[str, int]:
    """Payloads that were not what was stored: found by readers in memory, and when they came from a tier."""
    said = {_name(number): usage.counters.get("corrupt", 0) for number, usage in usages.items()}
    said |= {"peer": peers["counters"].get("corrupt", 0)} if peers else {}
    return said | {"cpu": condemned}


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
