"""A fleet on trial: prefixes that are followed from host to host, and a load that checks every byte."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import kvtier
from kvtier.client.scope import Chain
from kvtier.errors import SessionError
from tests.cluster.engines import BRANCH, GUARDED, IDLE, STEM, Shelf, served, shelves, starting
from tests.cluster.fleet import Fleet, Host
from tests.cluster.kit import within

WHOLE = STEM + BRANCH
PATIENCE = 120.0
LOOKUP = 2.0
"""Seconds within which a lookup of what cannot be reached must have said so, on a machine that does much else."""
documents = itertools.count(GUARDED)


class Trial:
    """A running fleet, an engine's view of each host, and prefixes that nobody but the test uses."""

    def __init__(self, running: Fleet, folder: Path, say: Callable[[str], None]) -> None:
        self.fleet = running
        self._folder = folder
        self.say = say

    def __getitem__(self, name: str) -> Host:
        return self.fleet[name]

    @contextmanager
    def shelf(self, name: str) -> Iterator[Shelf]:
        """What an engine of that host sees; of 256 KiB blocks."""
        with ExitStack() as stack:
            cache = within(PATIENCE, lambda: self._connected(name))
            stack.enter_context(cache)
            yield shelves(cache)[1]

    def save(self, name: str, *, to_nvme: bool = False) -> tuple[int, int]:
        """Let a host compute a new prefix."""
        document = next(documents)
        with self.shelf(name) as shelf:
            chain = shelf.chain(document, 0)
            within(PATIENCE, lambda: self._kept(shelf, chain, to_nvme=to_nvme))
        return document, 0

    def served(self, name: str, prefix: tuple[int, int], wait: float = 10.0) -> int:
        """How many blocks of a prefix a host's engine gets."""
        with self.shelf(name) as shelf:
            return served(shelf, shelf.chain(*prefix), wait)

    def back(self, what: str, name: str, prefix: tuple[int, int], began: float) -> None:
        """Wait until a prefix is whole again on a host, and say how long after `began` that was."""
        within(PATIENCE, lambda: self.served(name, prefix) == WHOLE, every=0.05)
        self.say(f"{what}: hits on {name} are back after {time.monotonic() - began:.1f} s")

    def quick(self, name: str, prefix: tuple[int, int]) -> int:
        """The same as `served`, without waiting for anything; it must not take long."""
        with self.shelf(name) as shelf:
            began = time.monotonic()
            got = served(shelf, shelf.chain(*prefix), wait=0.0)
            assert time.monotonic() - began < LOOKUP
            return got

    def serves_itself(self, name: str, prefix: tuple[int, int]) -> None:
        """A host serves what it has, whoever else is dead: at once, unless the machine is too busy for a call."""
        within(10.0, lambda: self.quick(name, prefix) == WHOLE, every=0.05)

    def host(self, name: str) -> dict:
        """Of the status."""
        return next(host for host in self.fleet.hosts[0].status()["hosts"] if host["host"] == name)

    def life(self, name: str) -> int:
        """Incarnation of a host; 0 when it does not serve."""
        host = self.host(name)
        return host["hierarchy"]["index"]["incarnation"] if host.get("serving") else 0

    @contextmanager
    def load(self, what: str) -> Iterator[None]:
        """An engine on every host, reading and saving whatever happens; no byte is wrong, and no request fails."""
        with ExitStack() as stack:
            engines = []
            for host in self.fleet.hosts:
                folder = self._folder / f"{what}-{host.name}"
                folder.mkdir()
                engines.append(stack.enter_context(starting(host.socket, folder))())
            for engine in engines:  # the first one imports a lot
                within(PATIENCE, lambda: engine.doing != IDLE, every=0.002)  # noqa: B023
            yield
            said = [engine.end() for engine in engines]
        counts = ", ".join(f"{h.name} {s['loaded']}" for h, s in zip(self.fleet.hosts, said, strict=True))
        self.say(f"{what}: blocks loaded and compared: {counts}")
        assert sum(one["loaded"] for one in said) > 0, "no load was on it"

    def _connected(self, name: str) -> kvtier.Cache | None:
        try:
            return kvtier.connect(self[name].socket)
        except SessionError:
            return None

    def _kept(self, shelf: Shelf, chain: Chain, *, to_nvme: bool) -> bool:
        saved = shelf.space.save(chain, shelf.computed(chain)).result()
        there = served(shelf, chain) == WHOLE or saved.blocks == WHOLE
        return there and (not to_nvme or shelf.space.move(chain, "nvme", wait=10.0) == WHOLE)
