"""A host that serves its blocks to others until it is killed; see `test_peers`.

python -m tests.peer_child COUNT NBYTES [HANG_AT]: prints its door; with HANG_AT it prints "hangs" when that block is
asked for, and lends it after a line on stdin.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvtier.peers.base import Lent
from kvtier.testing.payloads import key_of
from kvtier.testing.shelf import Shelf
from tests.peer_fixture import far


class Hanging(Shelf):
    """Hangs when one block is asked for."""

    hang_at = b""

    def lend(self, peer: str, keys: Sequence[bytes], nbytes: NDArray[np.int64], wait: float) -> Lent:
        if self.hang_at in keys:
            say("hangs")
            sys.stdin.readline()
        return super().lend(peer, keys, nbytes, wait)


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> None:
    count, nbytes, *hang_at = map(int, sys.argv[1:])
    Hanging.hang_at = key_of(hang_at[0]) if hang_at else b""
    with far(shelf=Hanging) as host:
        host.put(range(count), nbytes)
        say(host.node.door)
        sys.stdin.read()


if __name__ == "__main__":
    main()
