"""Ask the controller to end all actors: a process of its own, because a Ray that is half gone may answer never.

python -m kvtier_services.cluster.farewell ADDRESS NAMESPACE FLUSH_SECONDS OWN_ADDRESS [HOST]

With HOST only that one's actors.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from kvtier.errors import KVTierError
from kvtier_services.cluster import actors

MARGIN = 15.0
"""Seconds, besides those of the flush, in which actors end."""
PATIENCE = 5.0


def main(address: str, namespace: str, flush_seconds: float, mine: str, leaves: str = "") -> None:
    """End them politely if they answer, and for certain then; prints what each host said, as JSON."""
    hosts: list[dict[str, Any]] = []
    killed = 0
    with actors.connected(address, namespace, mine):
        controller = actors.ActorCall(actors.CONTROLLER, namespace)
        timeout = flush_seconds + MARGIN
        try:
            if leaves:
                # Handing over may take as long again as writing down.
                hosts = [controller("leave", leaves, flush_seconds, PATIENCE, timeout=flush_seconds + timeout + 1)]
            else:
                hosts = controller("stop", flush_seconds, timeout, timeout=timeout + 1)
        except (KVTierError, OSError) as exc:
            hosts = [{"fault": str(exc)}]
        if not leaves:
            killed = actors.kill_all(namespace)
    sys.stdout.write(json.dumps({"hosts": hosts, "killed": killed}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]), *sys.argv[4:])
