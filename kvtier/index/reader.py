"""The lookup side of the Redis index."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvtier.index.base import Life, Node, Replica
from kvtier.index.breaker import Breaker
from kvtier.index.entry import LiveReplicas
from kvtier.index.find import FAULTS
from kvtier.index.lookups import Lookups

NEWCOMERS_LIMIT = 1024


class Reader:
    """Looks blocks up, against the node table that it was last shown. `match` runs in any thread.

    Attributes:
        breaker: open while Redis does not answer in time.
        lookups: calls of `match`.
        round_trips: those that asked Redis.
        unasked: those that did not, because the breaker was open.
        unanswered: these, and those that failed.
        errors: those that got no answer.
        fault: the last error.
    """

    def __init__(self, lookups: Lookups, breaker: Breaker, wake: Callable[[], None], own: Life) -> None:
        """Take whom to ask, what wakes the background thread, and whom it reads for."""
        self.breaker = breaker
        self.lookups = self.round_trips = self.unasked = self.unanswered = self.errors = 0
        self.fault = ""
        self.look = True
        """Whether the node table should be looked at soon."""
        self._lookups = lookups
        self._wake = wake
        self._newcomers: set[tuple[int, int]] = set()
        self._nodes: list[Node] = []
        self._replicas = LiveReplicas({own.node: own.incarnation}, self._newcomer)

    @property
    def live(self) -> dict[int, int]:
        """Incarnation of each live node."""
        return self._replicas.live

    @property
    def nodes(self) -> list[Node]:
        """The node table as last shown."""
        return self._nodes

    def match(self, keys: Sequence[bytes]) -> list[tuple[Replica, ...]] | None:
        """Live replicas of each key, by one round trip; None when there is no answer in time."""
        self.lookups += 1
        if not keys:
            return []
        if not self.breaker.closed:
            self.unasked += 1
            self.unanswered += 1
            return None
        self.round_trips += 1
        try:
            values = self._lookups.get(keys)
        except FAULTS as exc:
            self._failed(exc)
            self.unanswered += 1
            return None
        self.breaker.succeeded()
        replicas = self._replicas
        return [replicas[value] for value in values]

    def tend(self) -> None:
        """Open connections that are wanted and, when it is time, ask whether lookups may go on; in the background."""
        probe = self.breaker.due()
        if not (probe or self.breaker.closed):
            return
        try:
            if probe:
                self._lookups.ping()
            else:
                self._lookups.open()
        except FAULTS as exc:
            self._failed(exc)
        else:
            if probe:
                self.breaker.succeeded()

    def show(self, nodes: list[Node], own: Life | None) -> None:
        """Take a new node table; `own` is live whatever it says."""
        live = {node.node: node.incarnation for node in nodes if node.alive}
        if own:
            live[own.node] = own.incarnation
        self._nodes = nodes
        if live != self._replicas.live:
            self._replicas = LiveReplicas(live, self._newcomer)

    def _failed(self, exc: Exception) -> None:
        self.errors += 1
        self.fault = f"lookup: {exc}"
        self.breaker.failed()
        self._wake()

    def _newcomer(self, node: int, incarnation: int) -> None:
        """A value names a life that the table does not know: look, once for each such life."""
        if (node, incarnation) in self._newcomers:
            return
        if len(self._newcomers) >= NEWCOMERS_LIMIT:
            self._newcomers.clear()
        self._newcomers.add((node, incarnation))
        self.look = True
        self._wake()
