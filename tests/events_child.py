"""A host of its own that publishes events, to be killed: `python -m tests.events_child FIRST COUNT ENDPOINT`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from kvtier.events.publisher import Publisher, next_to

ROOT = Path(__file__).parent.parent


class Publishing:
    """That process, from outside."""

    def __init__(self, *, first: int, count: int, at: str = "tcp://127.0.0.1:0") -> None:
        command = [sys.executable, "-m", "tests.events_child", str(first), str(count), at]
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "services")])}
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environ)
        said = json.loads(self._process.stdout.readline())
        self.pid = self._process.pid
        self.endpoint, self.replay_endpoint = said["endpoint"], said["replay_endpoint"]

    def close(self) -> None:
        self._process.kill()
        self._process.wait(10.0)
        self._process.stdout.close()


def main(first: int, count: int, endpoint: str) -> None:
    from tests.hierarchy_fixture import Host, save

    with Host() as host:
        # A port of one's own, and its neighbour, so that the next life can have them too.
        publisher = Publisher(host.state, endpoint)
        while endpoint.endswith(":0"):
            bound = publisher.status()["endpoint"]
            publisher.close()
            publisher = Publisher(host.state, bound)
            endpoint = "tcp://127.0.0.1:0" if publisher.fault else bound
            publisher = publisher if not publisher.fault else Publisher(host.state, endpoint)
        save(host.session(), range(first, first + count))
        assert not publisher.fault, publisher.fault
        where = publisher.status()
        assert where["replay_endpoint"] == next_to(where["endpoint"])
        sys.stdout.write(json.dumps(where) + "\n")
        sys.stdout.flush()
        signal.pause()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
