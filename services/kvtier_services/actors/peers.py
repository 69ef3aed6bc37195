"""The other hosts of the fleet, as this host's process reaches them and is reached by them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtier.errors import ConfigError
from kvtier.memory.arena import Arena
from kvtier.peers.base import Lender, Lent
from kvtier.peers.server import PeerServer
from kvtier.peers.tier import PeerTier
from kvtier.peers.tls import TlsFiles
from kvtier_services.settings import Settings, host_name

PATIENCE = 5.0
"""Seconds that a restarted process waits for the port of the one before it."""
POLL = 0.1


class _Late:
    """A lender that is there before its blocks are: until then it has none."""

    lender: Lender | None = None

    def lend(self, peer: str, keys: Sequence[bytes], nbytes: NDArray[np.int64], wait: float) -> Lent:
        return self.lender.lend(peer, keys, nbytes, wait) if self.lender else Lent.nothing(len(keys))

    def give_back(self, lent: Lent) -> None:
        if self.lender:
            self.lender.give_back(lent)

    def offered(self, peer: str, keys: Sequence[bytes], nbytes: NDArray[np.int64], door: str) -> int:
        return self.lender.offered(peer, keys, nbytes, door) if self.lender else 0


class Peers:
    """What fetches from other hosts, and what serves them.

    Attributes:
        tier: all other hosts.
        door: where they reach this one; empty when they cannot.
    """

    def __init__(self, arena: Arena, settings: Settings, address: str, patience: float = PATIENCE) -> None:
        """Listen, and serve nobody yet. A host that cannot listen fetches all the same, and says why others cannot.

        Args:
            arena: of this host.
            settings: of this kvtier.
            address: of this machine.
            patience: seconds that a port may take to become free.

        Raises:
            ConfigError: TLS cannot be used.
        """
        fleet, secret = settings.config.fleet, settings.fleet_secret.text.encode()
        tls = TlsFiles(Path(fleet.cert), Path(fleet.key), Path(fleet.ca)) if fleet.ca else None
        self._late = _Late()
        self._fault = ""
        self._server: PeerServer | None = None
        until = time.monotonic() + patience
        while self._server is None:
            try:
                self._server = PeerServer(self._late, arena, (address, fleet.port), secret, tls=tls)
            except ConfigError as exc:
                self._fault = str(exc)
                if time.monotonic() > until:
                    break
                time.sleep(POLL)
            else:
                self._fault = ""
        at = f"[{address}]" if ":" in address else address
        self.door = f"{at}:{self._server.address[1]}" if self._server else ""
        self.tier = PeerTier(arena, host_name(), self.door, secret, tls=tls)

    def serve(self, lender: Lender) -> None:
        """Lend blocks from now on."""
        self._late.lender = lender

    def status(self) -> dict[str, Any]:
        """How serving them fares, as plain values; how fetching does, says the hierarchy's status."""
        return {
            "door": self.door,
            "fault": self._fault,
            "served": self._server.usage() if self._server else {},
        }

    def close(self) -> None:
        """Serve nobody any more. The tier is closed by the hierarchy that it was given to."""
        if self._server is not None:
            self._server.close()


def open_peers(arena: Arena, settings: Settings, address: str) -> Peers | None:
    """The other hosts; None where there can be none, or they are not wanted.

    Args:
        arena: of this host.
        settings: of this kvtier.
        address: of this machine, where the configuration names none.
    """
    config = settings.config
    alone = settings.redis_url == "local" or not (config.ray.host or config.ray.address)
    if alone or not config.fleet.peers or not settings.fleet_secret:
        return None
    return Peers(arena, settings, config.fleet.address or address)
