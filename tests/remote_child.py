"""A client in a process of its own, for `tests/integration/test_remote.py`: URL TOKEN FIRST.

Leases blocks 0 to 2, reserves 4 slots from FIRST on, and waits.
"""

from __future__ import annotations

import json
import signal
import sys

from kvtier.client.credentials import Credentials
from kvtier.client.door import DoorSession
from kvtier.client.remote import RemoteWay
from kvtier.testing.session import chain, holds, reserve, states

if __name__ == "__main__":
    url, token, first = sys.argv[1:4]
    session = DoorSession(RemoteWay(url, Credentials.of(token, tls=False)))
    matched = session.match(chain(0, 3), 0.0)
    whole = holds(session, matched, 0)
    with session.writing():
        reserved = reserve(session, int(first), 4)
        sys.stdout.write(json.dumps({"whole": whole, "granted": states(reserved)}) + "\n")
        sys.stdout.flush()
        signal.pause()
