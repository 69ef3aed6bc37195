"""A host tells its changes to whoever follows it."""

from __future__ import annotations

import errno
import socket as unix
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import zmq

from kvtier.errors import ConfigError
from kvtier.events.asking import DUMP, END, LAST, REQUEST_NBYTES, numbered
from kvtier.events.ring import Ring
from kvtier.events.schema import AllBlocksCleared, AnyEvent, batches, encode
from kvtier.hierarchy.news import News
from kvtier.hierarchy.state import State

INTERVAL = 0.05
"""Seconds between batches while nobody asks for anything."""
RING_NBYTES = 64 << 20
SLOW = 256
"""Batches that one subscriber may have queued; what it does not take then it misses."""
REPLAY, REPLAY_NBYTES = 1024, 16 << 20
"""Batches of one answer to who missed some, and bytes of them; for more he asks again."""
PART = 1024
"""Rows of the table in one part of a dump."""
LINGER = 200
"""Milliseconds that the last batch may take to leave."""


class Publisher:
    """Publishes what enters and leaves the tiers of a host, on a thread of its own, until `close`.

    Where it cannot listen it does nothing, and says why: a host serves engines without it.

    Args:
        state: of the host.
        endpoint: where subscribers connect: "tcp://ADDRESS:PORT" (port 0 for any free one), "ipc://PATH".
        replay_endpoint: where they ask; "" for the port after it.
        node: the host's name.
        topic: of every batch.
        buffer: batches that are kept for those who missed some.
        clock: seconds since the epoch.

    Attributes:
        fault: why it does not publish; empty when it does.
    """

    def __init__(
        self,
        state: State,
        endpoint: str,
        *,
        replay_endpoint: str = "",
        node: str = "",
        topic: str = "",
        buffer: int = 10_000,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._state, self._node, self._topic, self._clock = state, node, topic.encode(), clock
        self._counts: Counter[str] = Counter()
        self._ring = Ring(int(clock() * 1e6), batches=buffer, nbytes=RING_NBYTES)
        self._closing = threading.Event()
        self._where = {"endpoint": endpoint, "replay_endpoint": replay_endpoint}
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._out = self._context.socket(zmq.PUB)
        self._asked = self._context.socket(zmq.ROUTER)
        self.fault = ""
        with state.lock:
            state.publishing = self.status
        try:
            self._listen(endpoint, replay_endpoint)
        except zmq.ZMQError as exc:
            self.fault = f"no events: cannot listen on {endpoint}: {exc.strerror}; set events.endpoint to a free one"
            self._shut()
            return
        self._news = News(state.table)
        with state.lock:
            state.news = self._news
        self._thread = threading.Thread(target=self._run, name="kvtier-events", daemon=True)
        self._thread.start()

    def status(self) -> dict[str, Any]:
        """Where it listens, the number of the last batch, what was published, asked for and lost, as plain values."""
        counts = {name: self._counts[name] for name in ("batches", "blocks", "replays", "dumps", "lost", "errors")}
        waiting = 0 if self.fault else self._news.waiting
        where = {**self._where, "topic": self._topic.decode()}
        return {**where, "fault": self.fault, "last": self._ring.last, "waiting": waiting, **counts}

    def close(self) -> None:
        """Say that nothing can be had here any more, and stop; idempotent."""
        if self.fault or self._closing.is_set():
            return
        with self._state.lock:
            self._state.news = None
        self._closing.set()
        self._thread.join()

    def _listen(self, endpoint: str, replay_endpoint: str) -> None:
        self._out.sndhwm = SLOW
        self._asked.sndhwm = REPLAY + 1  # who asks and does not take the answer has no more than one waiting
        self._asked.maxmsgsize = REQUEST_NBYTES
        for socket in (self._out, self._asked):
            socket.ipv6 = "[" in endpoint
            socket.linger = LINGER
        self._where["endpoint"] = _bind(self._out, endpoint)
        self._where["replay_endpoint"] = _bind(self._asked, replay_endpoint or next_to(endpoint))

    def _run(self) -> None:
        self._send([AllBlocksCleared(self._node)])
        while not self._closing.is_set():
            try:
                if self._asked.poll(int(INTERVAL * 1000)):
                    self._answer(self._asked.recv_multipart())
                self._publish()
            except Exception:  # noqa: BLE001 - one bad batch must not end all others
                self._counts["errors"] += 1
                self._closing.wait(INTERVAL)
        self._publish()
        self._send([AllBlocksCleared(self._node)])
        self._shut()

    def _publish(self) -> None:
        changes, lost = self._news.take()
        if lost:
            self._counts["lost"] += 1
            self._ring.skip()
            self._send([])  # so that whoever listens sees the gap
        for events in batches(changes, self._node):
            self._send(events)

    def _send(self, events: list[AnyEvent]) -> None:
        payload = encode(self._clock(), events)
        number = self._ring.append(payload)
        self._out.send_multipart((self._topic, numbered(number), payload))
        self._counts["batches"] += 1
        self._counts["blocks"] += sum(0 if isinstance(e, AllBlocksCleared) else len(e.block_hashes) for e in events)

    def _answer(self, frames: list[bytes]) -> None:
        """Whoever asks for something else gets no answer."""
        if len(frames) != 3:
            return
        who, _, request = frames
        if len(request) == len(END):
            self._counts["replays"] += 1
            wanted = int.from_bytes(request, "big")
            for number, payload in self._ring.since(wanted, batches=REPLAY, nbytes=REPLAY_NBYTES):
                self._reply(who, self._topic, numbered(number), payload)
            self._reply(who, b"", END, b"")
        elif request == LAST:
            self._publish()
            self._reply(who, self._topic, numbered(self._ring.last))
        elif request.startswith(DUMP):
            self._reply(who, *self._part(request[len(DUMP) :]))

    def _part(self, token: bytes) -> tuple[bytes, ...]:
        """Topic, number, payload and next token of a part of a dump.

        What changes while the parts are taken is in the batches behind the number that the first part has.
        """
        life = numbered(self._ring.first)
        start = 0
        if token:
            if len(token) != 16 or token[:8] != life:
                return self._topic, END, b"", b""
            start = int.from_bytes(token[8:], "big")
        else:
            self._counts["dumps"] += 1
            self._publish()
        last = numbered(self._ring.last)
        with self._state.lock:
            entered, following = self._news.part(start, PART)
        events = [event for batch in batches(entered, self._node) for event in batch]
        payload = encode(self._clock(), events)
        return self._topic, last, payload, life + numbered(following) if following >= 0 else b""

    def _reply(self, who: bytes, *frames: bytes) -> None:
        self._asked.send_multipart((who, b"", *frames))

    def _shut(self) -> None:
        self._out.close()
        self._asked.close()
        self._context.term()


def next_to(endpoint: str) -> str:
    """Where a publisher is asked when that is not configured: the next port, or the path with ".replay".

    Raises:
        ConfigError: what is no endpoint.
    """
    kind, _, where = endpoint.partition("://")
    if kind == "ipc" and where:
        return f"{endpoint}.replay"
    address, _, port = where.rpartition(":")
    if kind != "tcp" or not address or not (port.isdecimal() or port == "*"):
        raise ConfigError(f'{endpoint!r} is no endpoint; write "tcp://ADDRESS:PORT" or "ipc://PATH"')
    following = int(port) + 1 if port.isdecimal() and int(port) else 0
    return f"tcp://{address}:{following}"


def _is_taken(path: str) -> bool:
    """Whether somebody listens at a Unix socket: ZeroMQ would take it away from him without a word."""
    with unix.socket(unix.AF_UNIX, unix.SOCK_STREAM) as probe:
        try:
            probe.connect("\0" + path[1:] if path.startswith("@") else path)
        except OSError:
            return False
    return True


def _bind(socket: zmq.Socket[bytes], endpoint: str) -> str:
    if endpoint.startswith("ipc://") and _is_taken(endpoint.removeprefix("ipc://")):
        raise zmq.ZMQError(errno.EADDRINUSE)
    socket.bind(endpoint)
    bound = socket.getsockopt(zmq.LAST_ENDPOINT)
    return bound.decode().rstrip("\0") if isinstance(bound, bytes) else endpoint
