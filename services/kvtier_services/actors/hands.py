"""The other tiers' processes of one host, seen from the CPU tier's."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from kvtier.errors import TierUnavailable
from kvtier.hierarchy import stock
from kvtier.hierarchy.cache import Hierarchy
from kvtier.hierarchy.state import State
from kvtier.tiers.base import Tier, TierNumber
from kvtier.tiers.several import Several
from kvtier_services.actors.fence import arena_mark, fence, lock_path
from kvtier_services.actors.reconcile import reconcile
from kvtier_services.actors.remote import Call, RemoteTier

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Hand:
    """A tier in another process, or one device of a tier that has several.

    Attributes:
        name: of the process; each of a host has another one.
        label: for people.
        call: reaches the process.
        device: which one, where a tier has several.
    """

    name: str
    label: str
    call: Call
    device: str = ""


@dataclass(frozen=True, slots=True)
class Held:
    """A hand, and the way to it."""

    tier: TierNumber
    hand: Hand
    remote: RemoteTier


class Hands:
    """The processes that serve one hierarchy. Thread-safe.

    Attributes:
        held: all of them.
        tiers: what the hierarchy sees: one for each tier, however many devices it has.
    """

    def __init__(self, hands: Mapping[TierNumber, Sequence[Hand]], arena_dir: Path, hello: float) -> None:
        """Connect to those that are there.

        When it returns, it is certain that no process still copies for a hierarchy before this one.

        Args:
            hands: of each tier.
            arena_dir: folder of the arena.
            hello: seconds that each of them may take to answer.
        """
        mark = arena_mark(arena_dir)

        def held(tier: TierNumber, hand: Hand) -> Held:
            cut_off = partial(fence, lock_path(arena_dir, hand.name))
            return Held(tier, hand, RemoteTier(hand.name, hand.call, label=hand.label, arena=mark, fence=cut_off))

        self.held = [held(tier, hand) for tier, some in hands.items() for hand in some]
        with ThreadPoolExecutor(len(self.held) or 1) as threads:
            list(threads.map(lambda held: held.remote.connect(hello), self.held))
        self.tiers: dict[TierNumber, Tier] = {tier: self._tier(tier) for tier in hands}

    def status(self) -> list[dict[str, Any]]:
        """How each of them fares, as plain values."""
        return [
            {
                "tier": held.hand.name,
                "label": held.hand.label,
                "device": held.hand.device,
                "pid": held.remote.pid,
                "connected": held.remote.connected,
                "connects": held.remote.connects,
                "fault": held.remote.fault,
                "notes": list(held.remote.notes),
                "overweight": dict(held.remote.overweight),
            }
            for held in self.held
        ]

    def look_after(self, held: Held, state: State) -> None:
        """See whether a process still serves; when it was away, take it up again. May take minutes."""
        if held.remote.connected:
            held.remote.usage()
        elif held.remote.connect():
            with suppress(TierUnavailable):
                has, lost = self._take_up(held, state)
                log.warning(
                    "tier back: tier=%s pid=%d blocks=%d forgotten=%d", held.hand.name, held.remote.pid, has, lost
                )

    def _tier(self, number: TierNumber) -> Tier:
        mine = [held for held in self.held if held.tier is number]
        if len(mine) == 1:
            return mine[0].remote
        return Several(number.name.lower(), {held.hand.device: held.remote for held in mine})

    def _take_up(self, held: Held, state: State) -> tuple[int, int]:
        """Make the block table say of it what it says of itself; how many blocks it has, and how many it lost."""
        tier = self.tiers[held.tier]
        if not isinstance(tier, Several):
            return reconcile(state, held.tier)
        with stock.stocktaking(state, held.tier) as dropped:
            has, gone = tier.returned(held.hand.device)
            stock.take_stock(state, held.tier, has, dropped, gone)
        return len(has), len(gone)


def status_of(hierarchy: Hierarchy) -> dict[str, Any]:
    """A hierarchy's status, with each device of the tiers that have several."""
    status = hierarchy.status()
    for about in status["tiers"]:
        tier = hierarchy.state.tiers.get(TierNumber[about["tier"].upper()])
        said = tier.devices if isinstance(tier, Several) else {}
        about["devices"] = [{"device": device, **asdict(usage)} for device, usage in said.items()]
    return status
