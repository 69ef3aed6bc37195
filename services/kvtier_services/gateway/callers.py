"""Who calls, and what that tenant has, may see and may take. Everything here runs on the door's loop."""

from __future__ import annotations

import hashlib
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from msgspec import structs

from kvtier.block import PAGE, SPACE_NBYTES
from kvtier.errors import OverQuota, Unauthenticated
from kvtier.hierarchy import retention
from kvtier.hierarchy.accounts import Share
from kvtier.hierarchy.cache import Hierarchy
from kvtier.keys import DOMAIN
from kvtier.tiers.base import OWN, TierNumber
from kvtier_services.gateway.tokens import Quota

KEYSPACES = 4096
"""That one tenant may use on a host."""
UNDER_WAY = 64
"""Calls of one tenant at a time."""
SESSIONS_AT_MOST = 256
"""Of one tenant."""
HEADROOM = 20
"""A part of a quota's bytes, one in so many, that is freed at once when it is used up."""
_TENANT = DOMAIN + struct.pack("<I", 6) + b"tenant"


class Tenant:
    """One tenant, as long as the host runs.

    Args:
        name: for people.
        salt: of its keys.
        quota: what it may have.
        clock: monotonic seconds.

    Attributes:
        spaces: its keyspaces, by the first half of their roots.
        sessions: how many there are.
        refused: what it was refused, by what there was too much of.
    """

    def __init__(self, name: str, salt: bytes, quota: Quota, clock: Callable[[], float] = time.monotonic) -> None:
        self.name, self.salt, self.quota = name, salt, quota
        self.spaces: dict[bytes, None] = {}
        self.sessions: set[int] = set()
        self.refused: Counter[str] = Counter()
        self._clock = clock
        self._under_way = 0
        self._tokens, self._filled = max(1.0, quota.requests), clock()

    def claim(self, keyspace: bytes) -> None:
        """Take note of a keyspace, given as its canonical encoding, which proves whose it is: the salt is in it.

        Raises:
            Unauthenticated: the salt in it is not this tenant's.
            OverQuota: it uses too many.
        """
        salt = self.salt.hex().encode()
        front = keyspace[: len(_TENANT)], keyspace[len(_TENANT) + 4 : len(_TENANT) + 4 + len(salt)]
        if front != (_TENANT, salt):
            raise Unauthenticated(f"that keyspace is not one of tenant {self.name}: its salt is not in it")
        space = hashlib.sha256(keyspace).digest()[:SPACE_NBYTES]
        if space not in self.spaces and len(self.spaces) >= KEYSPACES:
            raise self._over("keyspaces", f"{KEYSPACES} keyspaces")
        self.spaces[space] = None

    @contextmanager
    def calling(self) -> Iterator[None]:
        """One call, if there may be one more now.

        Raises:
            OverQuota: too many a second, or at once.
        """
        rate = self.quota.requests
        if rate:
            now = self._clock()
            self._tokens = min(max(1.0, rate), self._tokens + (now - self._filled) * rate)
            self._filled = now
            if self._tokens < 1.0:
                raise self._over("requests", f"{rate:g} requests a second")
            self._tokens -= 1.0
        if self._under_way >= UNDER_WAY:
            raise self._over("calls", f"{UNDER_WAY} calls at a time")
        self._under_way += 1
        try:
            yield
        finally:
            self._under_way -= 1

    def enter(self, session: int) -> None:
        """A session begins.

        Raises:
            OverQuota: there are too many.
        """
        if len(self.sessions) >= SESSIONS_AT_MOST:
            raise self._over("sessions", f"{SESSIONS_AT_MOST} sessions")
        self.sessions.add(session)

    def allowance(self, hierarchy: Hierarchy, wanted: int, chain: Sequence[bytes]) -> int | None:
        """Bytes of slots that may be reserved now; None for no limit.

        Makes room among the tenant's own blocks if need be, but for those of the chain that is saved.
        """
        quota, state = self.quota.cpu, hierarchy.state
        if not quota:
            return None
        with state.lock:
            spaces = self._numbers(hierarchy)
            left = quota - state.accounts.held(TierNumber.CPU, spaces) - self._reserved(hierarchy)
            if left < wanted <= quota:
                spared = frozenset(state.rows(chain))
                left += retention.shed(state, spaces, max(wanted - left, quota // HEADROOM), spared)
        if left < wanted:
            self.refused["cpu"] += 1
        return max(0, left)

    def loadable(self, hierarchy: Hierarchy, keys: Sequence[bytes]) -> int:
        """How many blocks of a chain, from the first on, may be in the CPU tier at once: those that are, and some more.

        Makes room for those that must come up, as `allowance` does. What is on its way for other calls, and what nobody
        here knows yet, is counted when it has come.
        """
        quota, state = self.quota.cpu, hierarchy.state
        if not quota:
            return len(keys)
        with state.lock:
            table = state.table
            known = table.prefix(keys)
            sizes = -(-table.nbytes[known] // PAGE) * PAGE
            rows = known[: int(np.searchsorted(np.cumsum(sizes), quota, side="right"))]
            coming = np.cumsum(np.where(table.offset[rows] < 0, sizes[: len(rows)], 0))
            wanted, spaces = int(coming[-1]) if len(rows) else 0, self._numbers(hierarchy)
            left = quota - state.accounts.held(TierNumber.CPU, spaces) - self._reserved(hierarchy)
            if left < wanted:
                spared = frozenset(rows.tolist())
                left += retention.shed(state, spaces, max(wanted - left, quota // HEADROOM), spared)
            fit = int(np.searchsorted(coming, max(0, left), side="right"))
        if fit == len(known):
            return len(keys)
        self.refused["cpu"] += 1
        return fit

    def share(self, hierarchy: Hierarchy) -> Share:
        """Its keyspaces, and what they may take of the NVMe tier; with the lock held."""
        return self._numbers(hierarchy), self.quota.nvme

    def pinnable(self, hierarchy: Hierarchy) -> Callable[[], int] | None:
        """Tells, with the lock held, how many bytes may be pinned besides what is; None for no limit."""
        if not self.quota.pinned:
            return None
        return lambda: self.quota.pinned - self._pinned(hierarchy)

    def status(self, hierarchy: Hierarchy) -> dict[str, Any]:
        """What it has, as plain values; on any thread."""
        state = hierarchy.state
        with state.lock:
            spaces = self._numbers(hierarchy)
            held = {tier.name.lower(): state.accounts.held(tier, spaces) for tier in OWN}
            return {
                "tenant": self.name,
                "nbytes": held,
                "pinned_nbytes": self._pinned(hierarchy),
                "reserved_nbytes": self._reserved(hierarchy),
                "sessions": len(self.sessions),
                "keyspaces": len(self.spaces),
                "quota": structs.asdict(self.quota),
                "refused": dict(self.refused),
            }

    def owns(self, hierarchy: Hierarchy, keys: Sequence[bytes]) -> int:
        """How many of the keys, from the first on, are not known to be somebody else's blocks.

        What only other hosts have has no keyspace here yet: it is looked at again when it has come.
        """
        state = hierarchy.state
        with state.lock:
            table = state.table
            rows = np.fromiter((table.rows.get(key, -1) for key in keys), np.int64, len(keys))
            there = np.flatnonzero(rows >= 0)
            there = there[table.tiers[rows[there]] != 1 << TierNumber.PEER]
            foreign = there[~np.isin(table.space[rows[there]], list(self._numbers(hierarchy)))]
        return int(foreign[0]) if foreign.size else len(keys)

    def _over(self, what: str, limit: str) -> OverQuota:
        self.refused[what] += 1
        return OverQuota(f"quota: tenant {self.name} may have {limit}; ask for fewer, or have its quota raised")

    def _numbers(self, hierarchy: Hierarchy) -> frozenset[int]:
        table = hierarchy.state.table
        return frozenset(number for space in list(self.spaces) if (number := table.known_space(space)) >= 0)

    def _reserved(self, hierarchy: Hierarchy) -> int:
        sessions = hierarchy.state.ledger.sessions
        return sum(sessions[number].reserved_nbytes for number in list(self.sessions) if number in sessions)

    def _pinned(self, hierarchy: Hierarchy) -> int:
        return sum(hierarchy.state.ledger.pinned[space] for space in self._numbers(hierarchy))


@dataclass(frozen=True, slots=True)
class Caller:
    """Who makes a call.

    Attributes:
        name: of the token, for people.
        tenant: that it belongs to; None for an engine of this host, which may do everything.
        admin: whether it may do what touches others.
        fingerprint: of the token.
    """

    name: str = "local"
    tenant: Tenant | None = None
    admin: bool = True
    fingerprint: str = field(default="", repr=False)

    @property
    def narrow(self) -> Tenant | None:
        """The tenant that it is confined to; None for one that may see everything."""
        return None if self.admin else self.tenant

    def own(self, hierarchy: Hierarchy, keys: list[bytes]) -> list[bytes]:
        """The keys up to the first that is somebody else's block."""
        tenant = self.narrow
        return keys if tenant is None else keys[: tenant.owns(hierarchy, keys)]

    def loadable(self, hierarchy: Hierarchy, keys: list[bytes]) -> list[bytes]:
        """The keys of its own blocks that may come up to the CPU tier, up to the first that may not."""
        tenant = self.narrow
        if tenant is None:
            return keys
        with hierarchy.state.lock:
            own = self.own(hierarchy, keys)
            return own[: tenant.loadable(hierarchy, own)]

    def may_have(self, space: bytes) -> bool:
        """Whether blocks of this keyspace are the caller's to read and write. Thread-safe."""
        tenant = self.narrow
        return tenant is None or space in tenant.spaces

    def needs_admin(self, what: str) -> None:
        """Refuse what touches others.

        Raises:
            Unauthenticated: it may not do that.
        """
        if not self.admin:
            raise Unauthenticated(f"{what} needs an admin token; {self.name} is none (`kvtier token add NAME --admin`)")


ENGINE = Caller()
"""An engine of this host."""
