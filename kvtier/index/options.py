"""How the Redis index paces itself."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RedisIndexOptions:
    """Paces and bounds of a `RedisIndex`; times in seconds.

    Attributes:
        lookup_timeout: what a lookup may take; `connect` gives it to the sockets.
        update_timeout: what a batch of updates may take in the background.
        heartbeat: between two heartbeats, and between two looks at the node table.
        dead_after: without a heartbeat for this long a host is dead.
        batch: updates told in one script.
        linger: how long the first update of a batch waits for others.
        publish_rate: entries of a publication told a second.
        sweep_every: seconds between two rounds through the whole index, by any host of the fleet.
        sweep_rate: keys of a round looked at a second.
        bury_after: without a heartbeat for this long a host's entries are swept, and then its record.
        max_pending: updates kept while Redis is away.
        failures: lookups that fail in a row before the breaker opens.
        pause: the breaker's first pause.
        longest_pause: its longest.
    """

    lookup_timeout: float = 0.02
    update_timeout: float = 1.0
    heartbeat: float = 1.0
    dead_after: float = 10.0
    batch: int = 512
    linger: float = 0.003
    publish_rate: float = 50_000
    sweep_every: float = 600.0
    sweep_rate: float = 20_000
    bury_after: float = 3600.0
    max_pending: int = 65_536
    failures: int = 3
    pause: float = 0.1
    longest_pause: float = 5.0
