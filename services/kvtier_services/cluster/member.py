"""What keeps a joined host's Ray node running: Ray ends a node that was cut off for too long, and it comes back empty.

python -m kvtier_services.cluster.member HEAD OWN_ADDRESS RUN TOKEN TEMP LOG
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from kvtier.errors import ConfigError
from kvtier_services.cluster import node, process

PAUSE, LONGEST_PAUSE = 1.0, 10.0
"""Seconds until a node that has ended is started again; twice as long each time that it ended young."""
YOUNG = 30.0
END_SECONDS = 10.0


def main(head: str, host: str, run: str, token: str, temp: str, log: str) -> None:
    """Start the node, and start it again whenever it ends; never returns."""
    environment = node.environment(os.environ, run, Path(token))
    pause = PAUSE
    while True:
        began = time.monotonic()
        try:
            command = node.command([f"--address={head}"], temp, host, node.free_ports()[1:])
            node.spawn(command, Path(log), environment).wait()
        except (ConfigError, OSError) as exc:
            with Path(log).open("a", encoding="utf-8") as out:
                out.write(f"{exc}\n")
        pause = PAUSE if time.monotonic() - began > YOUNG else min(LONGEST_PAUSE, 2 * pause)
        # Of the node that has ended nothing may be left: its tiers would be there beside their successors.
        process.end(lambda: [one for one in process.marked(node.RUN_ENV, run) if one.pid != os.getpid()], END_SECONDS)
        time.sleep(pause)


if __name__ == "__main__":
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    main(*sys.argv[1:])
