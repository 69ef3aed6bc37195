"""Send each prompt to the host that has most of it: a small prefix-aware router.

    python examples/router.py KEYSPACE.json box1=tcp://box1:5557 box2=tcp://box2:5557

KEYSPACE.json is what an engine wrote by `space.describe().write("KEYSPACE.json")`; behind each host's name is its
`events.endpoint`. Prompts are lines of token ids on the standard input; each answer is a host, and how many of the
prompt's tokens it has. A router that runs on a host of the fleet can ask instead of following: `space.where(tokens)`.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Sequence

from kvtier.client.description import Description
from kvtier.events import Subscriber, View

TOKENS_PER_REQUEST = 512
"""So many cached tokens outweigh one request more under way on a host: set it by what your engines prefill while they
answer one."""


class Followed:
    """One host, followed on a thread of its own."""

    def __init__(self, endpoint: str) -> None:
        self._view, self._lock = View(), threading.Lock()
        self._subscriber = Subscriber(endpoint)
        self.ready = threading.Event()
        threading.Thread(target=self._follow, daemon=True).start()

    def prefix(self, blocks: Sequence[bytes]) -> int:
        """Blocks that the host has of a prompt; a host that does not answer has none."""
        with self._lock:
            return 0 if self._subscriber.fault else self._view.prefix(blocks)

    def _follow(self) -> None:
        for batch in self._subscriber:
            with self._lock:
                self._view.apply(batch)
            if self._subscriber.whole:
                self.ready.set()


class Router:
    """Chooses among hosts by what they have and what is under way there."""

    def __init__(self, keyspace: Description, endpoints: dict[str, str]) -> None:
        self._keyspace = keyspace
        self._hosts = {name: Followed(endpoint) for name, endpoint in endpoints.items()}
        self._under_way: Counter[str] = Counter()

    def wait(self, seconds: float) -> None:
        """Until all hosts have told what they have, at most this long."""
        for host in self._hosts.values():
            host.ready.wait(seconds)

    def choose(self, token_ids: Sequence[int]) -> tuple[str, int]:
        """The host for a prompt, and how many of its tokens are there; say `done` when it has answered."""
        blocks = self._keyspace.addresses(token_ids)
        tokens = {name: host.prefix(blocks) * self._keyspace.block_tokens for name, host in self._hosts.items()}
        best = max(tokens, key=lambda name: tokens[name] - TOKENS_PER_REQUEST * self._under_way[name])
        self._under_way[best] += 1
        return best, tokens[best]

    def done(self, host: str) -> None:
        """A request on this host was answered."""
        self._under_way[host] -= 1


def main() -> None:
    """Say for each prompt where it would go."""
    if len(sys.argv) < 3 or not all("=" in host for host in sys.argv[2:]):
        sys.exit("usage: python examples/router.py KEYSPACE.json HOST=ENDPOINT ...")
    keyspace, *hosts = sys.argv[1:]
    router = Router(Description.read(keyspace), dict(host.split("=", 1) for host in hosts))
    router.wait(5.0)
    for line in sys.stdin:
        prompt = [int(word) for word in line.replace(",", " ").split()]
        host, tokens = router.choose(prompt)
        print(f"{host}: {tokens} of {len(prompt)} tokens are there", flush=True)
        router.done(host)  # here the request would be sent, and this said when it is answered


if __name__ == "__main__":
    main()
